"""What a close record says of the links between the replicas of a part, as their averaging sees it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from swarm.averaging.schedules.costs import Link
from swarm.ids import PeerId
from swarm.optimization.records import CloseRecord
from swarm.optimization.roster import Member

ASSUMED_BYTES_PER_S = 12_500_000
"""Of a link whose latency alone is known yet, because only small vectors went over it: 100 Mbit/s."""


def links_of(record: CloseRecord) -> Mapping[PeerId, Link]:
    """Those that were measured, of the members of the next step."""
    return {
        PeerId(member.peer): Link(
            latency_s=record.links[member.peer][0] / 1e6,
            bytes_per_s=record.links[member.peer][1] or ASSUMED_BYTES_PER_S,
            site=site_of(member),
        )
        for member in record.roster
        if member.peer in record.links
    }


def dial_only(record: CloseRecord) -> frozenset[PeerId]:
    """Members that call others, and that nobody should call where there is a choice."""
    return frozenset(PeerId(member.peer) for member in record.roster if member.outgoing)


def site_of(member: Member) -> str:
    """Whose link it shares: the host of its most useful address, itself where that says nothing. Behind one router all
    have the same."""
    for address in member.addresses:
        parts = address.split("/")
        if len(parts) > 2 and parts[1] in ("ip4", "ip6", "dns", "dns4", "dns6") and "p2p-circuit" not in parts:
            return parts[2]
    return member.peer
