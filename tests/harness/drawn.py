"""What is run of the tests, as a pytest plugin: what must hold always, and of the rest what there is time for.

* ``--part always`` runs the tests of one module, properties, conformance, rules about the sources and every promise;
  ``--part rest`` all others that were selected.
* ``--budget MINUTES`` begins none of the rest after that time. The rest then comes in an order drawn by ``--draw
  SEED``, by default the commit. Tests that were not begun are named at the end as *not run*, and fail nothing.
* ``SWARM_TEST_OUTCOMES`` names a file to which each test's beginning and outcome are appended, one JSON object a line,
  for the one who started pytest and may have to end it.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness.budget import drawn_first
from tests.harness.sources import ROOT

UNTIL, OUTCOMES = "SWARM_TEST_UNTIL", "SWARM_TEST_OUTCOMES"
ALWAYS = (
    "tests/unit/",
    "tests/properties/",
    "tests/conformance/",
    "tests/harness/",
    "tests/golden/",
    "tests/benchmarks/",
)
RULES = "tests/test_"
LEFT_OUT = ("root", "docker", "browser", "smoke", "nemesis", "extras", "long")
"""Markers of what needs more than a machine has, or more time."""
NOT_RUN = "not run: "
OUT_OF_TIME = f"{NOT_RUN}out of time"


def always_run(item: pytest.Item) -> bool:
    """Whether a test is never left out for want of time."""
    if any(map(item.get_closest_marker, LEFT_OUT)):
        return False
    return bool(item.get_closest_marker("promise")) or item.nodeid.startswith((*ALWAYS, RULES))


def told(not_run: Iterable[str]) -> str:
    """Return the tests that were not run, counted by file, for people."""
    files = Counter(node.partition("::")[0].removeprefix("tests/") for node in not_run)
    return ", ".join(f"{file} ({count})" if count > 1 else file for file, count in sorted(files.items()))


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the module's docstring."""
    group = parser.getgroup("drawn", "what is run")
    group.addoption("--part", choices=("always", "rest"), help="what must hold always, or the rest")
    group.addoption("--budget", type=float, metavar="MINUTES", help="begin none of the rest after that time")
    group.addoption("--draw", metavar="SEED", help="of the order in which the rest is begun (default: the commit)")


def pytest_configure(config: pytest.Config) -> None:
    """Workers have the controller's deadline by their environment."""
    if hasattr(config, "workerinput"):
        return
    os.environ.pop(UNTIL, None)
    minutes = config.getoption("budget")
    if minutes is not None:
        os.environ[UNTIL] = str(time.monotonic() + 60 * minutes)
        config.option.loadscopereorder = False  # xdist's, by which large groups would always come first
    config.pluginmanager.register(_Outcomes(os.environ.pop(OUTCOMES, None)), "outcomes")


def commit() -> str:
    """Return what is drawn by: the checkout's commit; nothing outside a clone or where there is no git."""
    try:
        head = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
        return subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def seed_of(config: pytest.Config) -> str:
    """Return what the order of the rest is drawn by."""
    return config.getoption("draw") or commit()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what is not of the part, and orders the rest."""
    of_part = {"always": True, "rest": False}.get(config.getoption("part"))
    if of_part is not None:
        left = [item for item in items if always_run(item) is not of_part]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if always_run(item) is of_part]
    if UNTIL in os.environ:
        rest = {item.nodeid: item for item in items if not always_run(item)}
        files: dict[str, list[str]] = {}
        for node in drawn_first(list(rest), seed := seed_of(config)):
            files.setdefault(node.partition("::")[0], []).append(node)  # a module's tests share what they stand on
        order = [rest[node] for file in drawn_first(list(files), seed) for node in files[file]]
        items[:] = [item for item in items if item.nodeid not in rest] + order


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture is made."""
    if time.monotonic() > float(os.environ.get(UNTIL, "inf")) and not always_run(item):
        pytest.skip(OUT_OF_TIME)


class _Outcomes:
    """Writes down what became of each test, and says at the end what was not run."""

    def __init__(self, path: str | None) -> None:
        self._path = Path(path) if path else None
        self._not_run: list[str] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        """Every worker has collected the same."""
        self._write({"collected": [each.partition("@")[0] for each in ids]})

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without workers."""
        if session.items:
            self._write({"collected": [item.nodeid for item in session.items]})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """For the one who has to end a test that does not."""
        self._write({"began": nodeid.partition("@")[0], "at": time.monotonic()})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One line for a test, and another one where its fixtures failed afterwards."""
        node = report.nodeid.partition("@")[0]
        if report.skipped and isinstance(report.longrepr, tuple) and NOT_RUN in report.longrepr[2]:
            self._not_run.append(node)
        elif report.failed or report.when == "call" or (report.when == "setup" and report.skipped):
            self._write({"test": node, "outcome": report.outcome, "seconds": round(report.duration, 3)})

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """In the words of :func:`told`."""
        if self._not_run:
            drawn = f"drawn by {seed_of(config)}"
            terminalreporter.write_line(f"{OUT_OF_TIME}, {drawn}: {len(self._not_run)} tests: {told(self._not_run)}")

    def _write(self, line: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
