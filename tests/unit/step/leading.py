"""What tests of leading a step share."""

from __future__ import annotations

from typing import Any

from swarm.consensus.records import Contribution
from swarm.consensus.roster import Member, Roster
from swarm.ids import MicrobatchId, PeerId
from tests.unit.step.puppets import LEADER, Stage
from tests.unit.step.world import ROSTER, A, B, T

OTHER = next(peer for peer in (A, B) if peer != LEADER)
U = PeerId("U")
HOSTED = Roster(
    [
        Member(peer=peer, role=role, name="n", part=part, addresses=())  # type: ignore[arg-type]
        for peer, role, part in [
            (A, "stage", "stage-0"),
            (B, "stage", "stage-0"),
            (T, "trainer", None),
            (U, "trainer", None),
        ]
    ]
)


THREE = Roster([*ROSTER.members, Member(peer="C", role="stage", name="c", part="stage-0", addresses=())])
"""A part with a replica more: two of them can be right."""


async def stage(**settings: Any) -> Stage:
    made = await Stage(**settings).set()
    await made.feed()
    return made


def by(trainer: PeerId, position: int, host: PeerId = A) -> Contribution:
    microbatch = MicrobatchId(trainer, "00" * 8, 0, position)
    return Contribution(microbatch=microbatch, tokens=10, loss_sum=1.5, route=(host,))
