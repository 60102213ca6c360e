"""Several files followed at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from swarm.events import LinkUsage
from swarm.ids import PeerId
from swarm.monitoring.reader import EventTail
from swarm.monitoring.recorder import Recorder
from tests.harness.rigs.clocks import FakeClock


def test_tail_of_growing_files_gives_each_event_once_in_order_of_time(tmp_path: Path) -> None:
    tail = EventTail({name: tmp_path / name for name in ("a", "b", "missing")})
    clock = FakeClock()
    usage = LinkUsage(step=1, bytes_sent=1, bytes_received=1)
    with Recorder(tmp_path / "a", PeerId("A"), clock) as a, Recorder(tmp_path / "b", PeerId("B"), clock) as b:
        for sink in (a, b, a):
            clock.now += 1
            sink.emit(usage)
        assert [(told.name, told.record.wall) for told in tail.read_rest()] == [("a", 1.0), ("b", 2.0), ("a", 3.0)]
        assert tail.read() == []
        b.emit(usage)
        assert [told.name for told in tail.read()] == ["b"]
    with Recorder(tmp_path / "missing", PeerId("M"), clock) as late:
        late.emit(usage)
    assert [told.record.peer for told in tail.read()] == ["M"]


def test_monitoring_imported_whole_needs_neither_torch_nor_hivemind() -> None:
    program = (
        "import sys, pkgutil, importlib, swarm.monitoring as m\n"
        "for module in pkgutil.iter_modules(m.__path__, 'swarm.monitoring.'): importlib.import_module(module.name)\n"
        "print(sorted({'torch', 'hivemind', 'numpy'} & set(sys.modules)))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert run.stdout == "[]\n"
