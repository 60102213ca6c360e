"""Which faults fired, as a pytest plugin: with ``--fired`` the last lines are a table of kinds, how many fired, and in
how many tests that ask their plan, or the report of a play, whether all did (the property ``fired`` of a test)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from peers.chaos.plan import FaultPlan

FIRED = "fired"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option of the module's docstring."""
    parser.getgroup("drawn").addoption("--fired", action="store_true", help="tell the faults that fired, by kind")


def pytest_configure(config: pytest.Config) -> None:
    """Workers have the controller's options."""
    if config.getoption("fired"):
        config.pluginmanager.register(_Fired(config), "fired")


class _Fired:
    """Listens to the plans of each test in whatever process runs it, and to the reports in the one that tells."""

    def __init__(self, config: pytest.Config) -> None:
        self._plans: dict[FaultPlan, None] = {}
        self._faults, self._tests = Counter[str](), Counter[str]()
        patch, missing = pytest.MonkeyPatch(), FaultPlan.missing

        def asked(plan: FaultPlan) -> list[str]:
            self._plans[plan] = None
            return missing(plan)

        patch.setattr(FaultPlan, "missing", asked)
        config.add_cleanup(patch.undo)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
        """What its fixtures have asked counts for the first test that has them."""
        if call.when == "call":
            item.user_properties += [(FIRED, plan.counts) for plan in self._plans]
            self._plans.clear()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count them."""
        found: list[Mapping[str, int]] = [counts for name, counts in report.user_properties if name == FIRED]
        if report.when == "call" and report.passed:
            self._faults.update(sum(map(Counter, found), Counter[str]()))
            self._tests.update({kind for counts in found for kind in counts})

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The most frequent first."""
        for kind, count in self._faults.most_common():
            terminalreporter.write_line(f"fired: {kind:16} {count:6} in {self._tests[kind]:4} tests")
