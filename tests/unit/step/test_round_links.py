"""What a record tells averaging about links."""

from __future__ import annotations

import pytest

from swarm.averaging.schedules.costs import LinkCost
from swarm.consensus.records import NO_RECORD, CloseRecord
from swarm.consensus.roster import Member
from swarm.step.rounds import ASSUMED_BYTES_PER_S, dial_only, links_of, site_of


def member(peer: str, *addresses: str) -> Member:
    return Member(peer=peer, role="stage", name=peer, part="stage-0", addresses=addresses, incarnation=1)


RELAYED = "/ip4/9.9.9.9/tcp/1/p2p/r/p2p-circuit/p2p/c"
A, B, C = (
    member("a", "/ip4/1.2.3.4/tcp/5/p2p/a", "/ip4/10.0.0.1/tcp/5/p2p/a"),
    member("b"),
    member("c", RELAYED).model_copy(update={"outgoing": True}),
)


def test_record_gives_links_of_those_that_were_measured_and_who_can_only_dial() -> None:
    record = CloseRecord(
        run="0" * 64, step=1, committed=(), tokens=0, loss_sum=0.0, grad_norm=0.0, clip=1.0, lr=0.0, digests={},
        cursors={}, roster=(A, B, C), links={"a": (2000, 0), "c": (500_000, 77)}, previous=NO_RECORD,
    )  # fmt: skip
    assert links_of(record) == {
        "a": LinkCost(latency_s=0.002, bytes_per_s=ASSUMED_BYTES_PER_S, site="1.2.3.4"),
        "c": LinkCost(latency_s=0.5, bytes_per_s=77, site="c"),
    }
    assert dial_only(record) == {"c"}


@pytest.mark.parametrize(
    ("one", "site"),
    [
        (A, "1.2.3.4"),
        (B, "b"),
        (C, "c"),
        (member("d", "/memory/d/p2p/d"), "d"),
        (member("e", RELAYED, "/dns4/x.y/tcp/1"), "x.y"),
    ],
)
def test_site_is_the_host_that_is_dialled(one: Member, site: str) -> None:
    assert site_of(one) == site
