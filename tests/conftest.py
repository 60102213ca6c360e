"""What every test gets: a temporary directory with a short path, uvloop, one torch thread, and a look at what is left.

* Each test process has a temporary directory of its own (short: a Unix socket's path ends at 107 bytes) and an id in
  ``SWARM_TEST_ID``, inherited by everything it starts.
* After each module, and after each test marked ``process``, nothing of ours may be left: no process, no socket, no
  shared memory. After each asynchronous test no task may be left on its loop.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

# Before anything imports torch: N test processes with a thread for each core would only wait for each other.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The set-up compiles nothing: what is imported is compiled once, and not again by each of hundreds of processes.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
import pytest_asyncio
import uvloop
from hypothesis import settings

from tests.harness.processes import MARKER, assert_nothing_left, take_snapshot

pytest_plugins = ["tests.harness.drawn", "tests.harness.fired", "pytester"]

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")  # the same examples each time, and no verdict by how busy the machine is

_LONGEST_TEMPORARY = 32
_TURNS_TO_END = 20
"""How often a cancelled task may still be scheduled before it counts as left behind."""


def pytest_configure(config: pytest.Config) -> None:
    """Gives this test process its own temporary directory and id. xdist's workers each come by here as well."""
    # A process that ignores these hands that on to all it starts, and peers that are started so outlive their terminal.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # pytest keeps the folders of tmp_path, with what failed tests left in them, where it always does.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    gc.set_threshold(50_000, 20, 20)
    sys.dont_write_bytecode = False
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # xdist's controller runs no test itself
    above = tempfile.gettempdir()
    ours = tempfile.mkdtemp(prefix="sw-", dir=above if len(above) <= _LONGEST_TEMPORARY else "/tmp")
    os.environ["TMPDIR"] = tempfile.tempdir = ours
    os.environ[MARKER] = "/".join(filter(None, [os.environ.get(MARKER), uuid.uuid4().hex[:8]]))
    config.add_cleanup(lambda: shutil.rmtree(ours, ignore_errors=True))


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that peers run on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All that use the engine run one after the other: whoever ends first removes what any of them has made."""
    for item in items:
        if item.get_closest_marker("docker"):
            item.add_marker(pytest.mark.xdist_group("docker"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Ends a run whose groups xdist does not see: it sends tests to workers by what follows the @ of their names."""
    grouped = [item for item in session.items if item.get_closest_marker("xdist_group")]
    if session.config.getoption("loadgroup", default=False) and any("@" not in item.nodeid for item in grouped):
        raise pytest.UsageError("--dist loadgroup groups nothing: this pytest-xdist does not know this pytest")


@pytest.fixture(scope="module", autouse=True)
def _imported_once() -> None:
    """What is imported stays: garbage is looked for in what tests make, and not in all of torch each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_by_module() -> Iterator[None]:
    before = take_snapshot()
    yield
    assert_nothing_left(before)


@pytest.fixture(autouse=True)
def _nothing_left_by_test(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.node.get_closest_marker("process"):
        yield
        return
    before = take_snapshot()
    yield
    assert_nothing_left(before)


@pytest.fixture(autouse=True)
def _no_tasks_left_by_test(request: pytest.FixtureRequest) -> None:
    # Asked for only where a loop runs that ends with the test: the loop of a module keeps the tasks of its fixtures.
    marker = request.node.get_closest_marker("asyncio")
    if marker and marker.kwargs.get("loop_scope") in (None, "function"):
        request.getfixturevalue("_no_tasks_left")


@pytest_asyncio.fixture
async def _no_tasks_left() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    for _ in range(_TURNS_TO_END):
        await asyncio.sleep(0)
    left = [task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()]
    assert not left, "tasks left on the loop:\n  " + "\n  ".join(map(repr, left))


@pytest.fixture
def home() -> Iterator[Path]:
    """An empty directory with a short path, for sockets; gone afterwards. Use ``tmp_path`` for everything else."""
    path = Path(tempfile.mkdtemp(prefix="h-"))
    yield path
    shutil.rmtree(path)
