"""What a peer says of the copies in its run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peers.control.answers import NodeCommands
from peers.settings import PeerSettings
from swarm.consensus.roster import Member, Roster


def member(peer: str, part: str | None) -> Member:
    role = "trainer" if part == "ends" else "stage" if part else "bootstrap"
    return Member(peer=peer, role=role, name=peer, part=part, addresses=())


STAGES = [member("a", "stage-0"), member("b", "stage-0"), member("c", "stage-1"), member("d", "stage-1")]
TRAINER, FOUNDER = member("t", "ends"), member("founder", None)


@pytest.mark.parametrize(
    ("members", "copies", "said"),
    [
        ([*STAGES, TRAINER, FOUNDER], 2, ""),
        ([STAGES[0], STAGES[2], TRAINER, FOUNDER], 4, "stage-0 has 3 of 4, stage-1 has 3 of 4"),
        ([*STAGES, TRAINER], 2, "ends has 0 of 1"),
        ([*STAGES, TRAINER], 0, ""),
        ([STAGES[0], STAGES[2], TRAINER], 2, "ends has 0 of 1"),
    ],
)
def test_status_says_of_private_ends_only_that_the_one_copy_there_can_be_is_missing(
    tmp_path: Path, members: list[Member], copies: int, said: str
) -> None:
    commands = NodeCommands(PeerSettings(home=tmp_path, role="stage", name="a"), "a", 0.0, lambda reason: reason)
    manifest = SimpleNamespace(run=SimpleNamespace(copies=copies))
    around = cast(Any, SimpleNamespace(roster=Roster(members)))
    commands.adopt(cast(Any, manifest), cast(Any, None), around, cast(Any, None))
    assert commands._fewer_copies() == said
