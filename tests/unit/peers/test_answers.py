"""What a peer says of the copies in its run, and of those in it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peers.control.answers import NodeCommands
from peers.control.status import MemberReport
from peers.settings import PeerSettings
from swarm.consensus.roster import Member, Roster
from swarm.consensus.slowness import Barred
from swarm.ids import PeerId
from swarm.pipeline.activity import PipelineActivity


def member(peer: str, part: str | None, name: str = "") -> Member:
    role = "trainer" if part == "ends" else "stage" if part else "bootstrap"
    return Member(peer=peer, role=role, name=name or peer, part=part, addresses=())


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


def test_status_says_who_is_barred_and_until_when(tmp_path: Path) -> None:
    commands = NodeCommands(PeerSettings(home=tmp_path, role="stage", name="a"), "a", 0.0, lambda reason: reason)
    barred = {"c": Barred(times=1, until=260), "d": Barred(times=1, until=5)}
    around = SimpleNamespace(roster=Roster(STAGES[:2], barred=barred), situation=SimpleNamespace(step=4))
    commands.adopt(cast(Any, None), cast(Any, None), cast(Any, around), cast(Any, None))
    (told,) = commands._barred().items()
    assert told[0] == "c"
    assert told[1].startswith("is barred until step 260: proven wrong")


async def test_members_come_with_how_many_hops_were_checked_and_apart_from_those_who_wait_with_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = NodeCommands(PeerSettings(home=tmp_path, role="stage", name="twin"), "a", 0.0, lambda reason: reason)
    situation = SimpleNamespace(activity=lambda: PipelineActivity(checked={PeerId("b"): 3}))
    roster = Roster([member("a", "stage-0", "twin"), member("b", "stage-0")])
    around, manifest = (
        SimpleNamespace(roster=roster, situation=situation),
        SimpleNamespace(run=SimpleNamespace(copies=0)),
    )
    commands.adopt(cast(Any, manifest), cast(Any, None), cast(Any, around), cast(Any, None))
    waits = MemberReport(name="twin", peer="w", role="stage", part=None, state="waiting", link="unknown", addresses=())

    async def links(endpoint: object) -> dict[str, str]:
        return {}

    async def announced(links: object) -> list[MemberReport]:
        return [waits]

    monkeypatch.setattr(commands, "_links", links)
    monkeypatch.setattr(commands, "_announced", announced)
    monkeypatch.setattr(commands, "_endpoint", object())
    found = await commands._peers({})
    assert [(one.name, one.checked) for one in found] == [("twin~a", 0), ("b", 3), ("twin~w", 0)]
