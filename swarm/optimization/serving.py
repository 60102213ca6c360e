"""Where one replica of a part reduces for the others and calls none of them: what becomes of a part in which nobody can
be called. Pure."""

from __future__ import annotations

from collections.abc import Container

from swarm.ids import PartName, PeerId
from swarm.optimization.roster import HowToJoin, Member, Roster, join_words


def unserved(roster: Roster, out: Container[str]) -> dict[PeerId, str]:
    """Who cannot take part in averaging besides those that are ``out``, and why: of every part in which all that are
    there only call others, all but the first by rank, which goes on alone."""
    found: dict[PeerId, str] = {}
    for part in roster.parts:
        there = [peer for peer in roster.replicas(part) if peer not in out]
        if all(roster[peer].outgoing for peer in there):
            why = f"no replica of {part} that others can call is left, and {there[0]} goes on alone" if there else ""
            found |= dict.fromkeys(there[1:], why)
    return found


def can_be_called(roster: Roster, part: PartName) -> bool:
    """Whether others can call a replica of this part, or nobody holds it yet."""
    replicas = roster.replicas(part)
    return not replicas or not all(roster[peer].outgoing for peer in replicas)


def lacks_server(roster: Roster, member: Member, how: HowToJoin = join_words) -> str:
    """Why ``member`` cannot join its part yet, with what must happen first; "" when it can: it, or a replica that is
    there, can be called."""
    if member.part is None or not member.outgoing or can_be_called(roster, PartName(member.part)):
        return ""
    return f"no replica of {member.part} can be called by others, nor can this one: {_first(member.part, how)}"


def serves_alone(staying: Roster, member: Member) -> bool:
    """Whether those of its part that are ``staying`` could not average any more without ``member``, who leaves."""
    if member.part is None or member.outgoing:
        return False
    others = staying.replicas(PartName(member.part))
    return len(others) > 1 and all(staying[peer].outgoing for peer in others)


def without_server(roster: Roster, how: HowToJoin = join_words) -> str:
    """Why a run cannot begin with this roster, with what must happen first; "" when it can."""
    lost = unserved(roster, ())
    parts = sorted({part for peer in lost if (part := roster[peer].part) is not None})
    if not parts:
        return ""
    return f"no replica of {parts[0]} can be called by others: {_first(parts[0], how)}"


def _first(part: str, how: HowToJoin) -> str:
    return f"one that can must join ({how(PartName(part), open_port=True)})"
