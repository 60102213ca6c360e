"""What every member says when a majority is away, or all that held a part: who must come, until when, what then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from peers.console.words import command_to_join
from swarm.clock import moment
from swarm.consensus.roster import Member, Roster
from swarm.events import QuorumLost, Waiting
from swarm.ids import ENDS, PeerId, stage_part
from swarm.membership.founding_record import genesis
from swarm.membership.quorum import MissingReplicas, Quorum
from swarm.membership.status import PeerStatus
from swarm.step.blocked import awaited_holders
from tests.harness.rigs.membership import RUN, EventList, FakeClock

KEPT = 2
UNLESS = ", unless it is there again"
"""Who does not lead does not know who asks to join."""
B_LOST = "a stage host to join for stage-1 (swarm join INVITE --stage 1): b is lost; a copy is kept"


def roster(**held: str) -> Roster:
    """Peers by their names, with the part that each holds."""
    return Roster(
        Member(peer=name, name=name, part=part, role="trainer" if part == ENDS else "stage", addresses=())
        for name, part in held.items()
    )


SMALL = roster(a="stage-0", b="stage-1", t="ends", u="ends")
LARGE = roster(a="stage-0", b="stage-1", c="stage-0", t="ends", u="ends")
FOUNDED = Roster([*SMALL.members, Member(peer="f", name="f", part=None, role="bootstrap", addresses=())])


class Scene:
    """A member's surroundings, in which somebody is gone as soon as a test says so."""

    def __init__(self, there: Roster, me: str, leader: str) -> None:
        self.gone: dict[PeerId, str] = {}
        self.events, self.clock = EventList(), FakeClock()
        self.situation = PeerStatus(self.events)
        digests = {stage_part(0): "0" * 64, stage_part(1): "1" * 64, ENDS: "2" * 64}
        self.position = SimpleNamespace(
            head=genesis(RUN, there, digests), roster=there, is_member=True, over=False, cut_off="", open_step=1,
            leader=PeerId(leader), forking=SimpleNamespace(fork=None),
        )  # fmt: skip
        watch = cast(Any, SimpleNamespace(gone=self.gone))
        around = SimpleNamespace(
            watch=watch,
            endpoint=SimpleNamespace(peer=PeerId(me)),
            manifest=SimpleNamespace(run=SimpleNamespace(copies=KEPT, rewind="ask")),
            how_to_join=command_to_join,
            clock=self.clock,
        )
        run = SimpleNamespace(
            around=around, position=self.position, situation=self.situation, rules=SimpleNamespace(quorum_grace_s=600.0)
        )
        self.vacancy, self.quorum = MissingReplicas(cast(Any, run)), Quorum(cast(Any, run))

    def lose(self, *names: str) -> None:
        self.gone |= {PeerId(name): "it is silent" for name in names}
        self.look()

    def look(self) -> None:
        self.quorum.look()
        self.vacancy.look()

    @property
    def waited(self) -> list[str]:
        return [event.what for event in self.events.of(Waiting)]


# --- a part is lost --------------------------------------------------------------------------------------------------


def test_every_member_says_who_must_join_for_a_lost_part_until_it_is_held_again() -> None:
    here = Scene(SMALL, me="t", leader="u")
    here.lose("b")
    assert here.waited == [B_LOST]
    here.gone.clear()
    here.look()
    assert here.situation.waiting_for == ""


@pytest.mark.parametrize(
    ("there", "gone", "copies", "said"),
    [
        (SMALL, "", KEPT, ""),
        (
            SMALL,
            "tu",
            KEPT,
            "a replica of ends: t (silent), u (silent); nobody keeps a copy; next: start t or u where it was" + UNLESS,
        ),
        (FOUNDED, "tu", KEPT, "a trainer to join for ends (as a trainer): t, u are lost; a copy is kept"),
        (LARGE, "b", 4, "stage-1 to be taken over from a copy: b is lost"),
        (SMALL, "b", 0, "a replica of stage-1: b (silent); nobody keeps a copy; next: start b where it was" + UNLESS),
        (
            LARGE,
            "ac",
            0,
            "a replica of stage-0: a (silent), c (silent); nobody keeps a copy; next: start a or c where it was"
            + UNLESS,
        ),
    ],
)
def test_who_must_come_is_said_for_each_lost_part(there: Roster, gone: str, copies: int, said: str) -> None:
    lost = {PeerId(name): "silent" for name in gone}
    assert awaited_holders(there, lost, copies) == said


# --- a majority is away ----------------------------------------------------------------------------------------------


def test_member_without_a_majority_says_until_when_it_waits_and_what_comes_then() -> None:
    here = Scene(roster(a="stage-0", b="stage-1", t="ends", c="stage-0", d="stage-1", u="ends"), me="a", leader="b")
    here.clock.now = 1_700_000_000.0
    here.lose("c", "d", "u")
    assert here.events.of(QuorumLost) == [QuorumLost(step=1, there=3, voters=6, alone_at=1_700_000_600.0)]
    until = moment(1_700_000_600.0)
    assert here.waited == [
        f"a majority: 3 of 6 voters answer, 4 are needed; without it, from {until} on those that are there go on "
        "provisionally"
    ]


def test_minority_that_lacks_a_part_never_goes_on_alone_and_says_so() -> None:
    here = Scene(SMALL, me="a", leader="b")
    here.lose("t", "u")
    assert [event.alone_at for event in here.events.of(QuorumLost)] == [None]
    assert here.waited == ["a majority: 2 of 4 voters answer, 3 are needed, however long that takes"]
