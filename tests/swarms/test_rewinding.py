"""What a lineage that is given up leaves behind: nothing that is filed by the number of a step."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from peers.chaos.faults import Partition, SlowDevice
from peers.chaos.plan import On, Strike
from swarm.errors import BugError
from swarm.events import CutOff, LineageGivenUp, StepClosed
from tests.swarms.test_lineages import MOST, WHOLE, story, who


def test_who_was_ahead_and_rewinds_skips_nothing_and_is_cut_off_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The majority's hosts are slower: those that rewind come to each of their steps a second time."""
    caplog.set_level(logging.WARNING)
    at = On(StepClosed, peer="host-0", nth=2)
    swarm = story(  # asserts the invariants
        tmp_path,
        Strike("cut", at, Partition(WHOLE, ("bootstrap", *MOST), seconds=60.0)),
        *(Strike(f"slow {name}", at, SlowDevice(name, 4.0)) for name in ("host-2", "host-3")),
        steps=24,
        trainers=4,
    )
    assert who(swarm, LineageGivenUp) == set(WHOLE)
    assert all(len(swarm.peers[name].events.of(CutOff)) == 1 for name in WHOLE)
    assert not [record for record in caplog.records if record.exc_info and isinstance(record.exc_info[1], BugError)]
