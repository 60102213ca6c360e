"""What a peer has sent, by kind and receiver: the figures of ``swarm data audit``. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swarm.consensus.roster import Roster
from swarm.ids import PeerId

KINDS: Mapping[str, tuple[str, ...]] = {
    "activations": (
        "pipeline/1/forward",
        "pipeline/1/targets",
        "pipeline/1/evaluate",
        "pipeline/1/recall",
        "trainer/1/output",
        "trainer/1/recall",
    ),
    "gradients": ("pipeline/1/backward", "trainer/1/gradient"),
    "averaging": ("averaging/1/", "mass/1/", "versions/1/", "residual/1/", "observe/1/next", "observe/1/ahead"),
    "state": ("state/1/", "frozen/1/", "checkpoint/1/"),
    "records": (
        "observe/1/",
        "step/1/",
        "lead/1/",
        "feed/1/",
        "rescue/1/",
        "admit/1/",
        "manifest/1/",
        "pipeline/1/audit",
    ),
}
"""By kind how the names of the methods begin that carry it. With hosted ends token ids and labels are activations; what
is asked for again counts as activations, be it a gradient. Who observes gets a step's mean beside the record."""
OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class SentTo:
    """Bytes sent to one peer, by kind; ``organisation`` is "" where no invite names it. ``peer`` is "" for those of
    very many that got least, together."""

    name: str
    peer: str
    organisation: str
    sent: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SentReport:
    """What a peer has sent since it was started: ``since``, seconds since the epoch, and to whom. ``routes`` is the
    manifest's ``split.routes``."""

    name: str
    organisation: str
    routes: str
    since: float
    receivers: tuple[SentTo, ...]


def kind_of(method: str) -> str:
    """Return the kind of what is sent for calls of a method."""
    return next((kind for kind, names in KINDS.items() if method.startswith(names)), OTHER)


def receivers(me: PeerId, sent_by: Mapping[str, Mapping[PeerId, int]], roster: Roster) -> tuple[SentTo, ...]:
    """Return what was sent to each other peer, those with the most first.

    Args:
        me: The peer that sent it; what it said to itself left no machine.
        sent_by: Bytes by method and receiver.
        roster: The newest one that is known.
    """
    found: dict[PeerId, dict[str, int]] = {}
    for method, counts in sent_by.items():
        for peer, size in counts.items():
            if peer != me:
                kinds = found.setdefault(peer, {})
                kinds[kind_of(method)] = kinds.get(kind_of(method), 0) + size
    homes: Mapping[str, str] = {} if roster.admissions is None else roster.admissions.organisations
    rows = (
        SentTo(name=roster.names.get(peer, ""), peer=peer, organisation=homes.get(peer, ""), sent=sent)
        for peer, sent in found.items()
    )
    return tuple(sorted(rows, key=lambda one: (-sum(one.sent.values()), one.peer)))


def sent_lines(rows: Iterable[Mapping[str, object]]) -> list[list[str]]:
    """Return a table of what ``receivers`` returned, as JSON has it, with a sum below."""
    kinds = [*KINDS, OTHER]
    table, total = [["to", "organisation", *kinds]], dict.fromkeys(kinds, 0)
    for row in rows:
        sent = row["sent"]
        assert isinstance(sent, Mapping)  # noqa: S101 - as SentTo has it
        for kind in kinds:
            total[kind] += int(sent.get(kind, 0))
        who = str(row["name"] or row["peer"] or "others")
        table.append([who, str(row["organisation"] or "-"), *(f"{sent.get(kind, 0):,}" for kind in kinds)])
    return [*table, ["all", "", *(f"{total[kind]:,}" for kind in kinds)]]
