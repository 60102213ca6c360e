"""Which codec each boundary uses in the next step, where the manifest says ``auto``: decided with each close record, by
all its members alike, and named in it. Pure.

A boundary lies before each stage, and behind the last. What is exact stays where links have room for it; where they
have not, ``int8h`` sends about a quarter of float32's bytes. Whether they have is measured in *shares*: for how much of
the time in which the swarm computes a microbatch the links of a middle member of a group, its share of the group's
microbatches considered, would be busy with the bytes that ``int8h`` saves. Members that measured nothing count for
nothing, and where nothing is known everything stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import NamedTuple

from swarm.compression.names import AUTO, exact_codec
from swarm.compression.registry import codec_named
from swarm.consensus.records import CloseRecord, CodecPair
from swarm.consensus.roster import Roster
from swarm.ids import PeerId
from swarm.models.spec import TensorSpec

SMALLER = "int8h"
"""What ``auto`` chooses where links are short of room. Not ``int4h``, whose error is eighteen times as large, and which
no run that was measured has trained with: a manifest may name it."""
LEAST_SHARE, MOST_SHARE = 1 / 16, 3 / 4
"""Of a microbatch's time, from which on a saving is worth an error: the benchmark ``wan`` gains .16 of what is saved,
so one percent from there on; and what is saved at most before exact payloads keep a link busy all the time."""
SHARE_PER_RATE = 1 / 333e6
"""Share for each byte a second. One core encodes and decodes int8h at .26 GB/s of float32 (benchmark ``codecs`` at
df58d3c1), so that from some 250 Mbit/s on it takes a CPU longer than is gained, unless the link is nearly full."""
FILLED_SHARE = 0.92
"""Of what a link carries, wiring fills so much: what waits in a full one's queue is late, with closing behind it."""
RETURN_SHARE = 1 / 2
"""Of what a saving must be worth to be made, below which it is given up again: no choice flips with each step."""


class LinkShare(NamedTuple):
    """What ``int8h`` would save a boundary: ``saved`` of the time that a microbatch takes the swarm, over links of
    ``rate`` bytes a second; ``busy`` is the share for which exact payloads keep them busy."""

    saved: float
    rate: int
    busy: float

    @property
    def needed(self) -> float:
        """Return what must be saved for a change."""
        return max(LEAST_SHARE, min(MOST_SHARE, self.rate * SHARE_PER_RATE))


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecRules:
    """What a manifest says of boundaries: ``activation`` is what crosses each of them, one before each of the
    ``stages`` and one behind; with ``hosted`` ends token ids cross the first, and nothing the last. ``forward`` and
    ``backward`` are codecs of activations and of their gradients, or "auto"."""

    activation: TensorSpec
    stages: int
    hosted: bool
    forward: str
    backward: str

    @property
    def recorded(self) -> bool:
        """Return whether close records name codecs."""
        return AUTO in (self.forward, self.backward)

    @property
    def first(self) -> CodecPair:
        """The codecs of a boundary of which nothing is known: what is ``auto`` is exact."""
        exact = exact_codec(self.activation.dtype)
        forward, backward = (exact if one == AUTO else one for one in (self.forward, self.backward))
        return forward, backward

    @property
    def possible(self) -> tuple[CodecPair, ...]:
        """The first ones, and those where all that is ``auto`` is smaller."""
        if not self.recorded:
            return (self.first,)
        forward, backward = (SMALLER if one == AUTO else one for one in (self.forward, self.backward))
        return self.first, (forward, backward)

    def of(self, record: CloseRecord) -> tuple[CodecPair, ...]:
        """Return the codecs of the step after this record, of each boundary."""
        return record.codecs or (self.first,) * (self.stages + 1)

    def link_seconds(self, record: CloseRecord) -> dict[PeerId, float]:
        """Return for how long each microbatch of the step after this record keeps a replica's link busy, each way; of
        those whose links were measured. What is wrong of it costs speed alone: it is no more than a claim."""
        codecs = [tuple(codec_named(one).wire_bytes(self.activation) for one in pair) for pair in self.of(record)]
        if self.hosted:  # token ids come, which are small, and nothing comes back or leaves
            codecs[0] = codecs[-1] = (0, 0)
        found = {}
        for before, behind, replicas in zip(codecs, codecs[1:], record.members.columns(), strict=False):
            size = max(before[0] + behind[1], behind[0] + before[1])  # what comes in, and what goes out
            for peer in replicas:
                if rate := record.links.get(peer, (0, 0))[1]:
                    found[peer] = size / (FILLED_SHARE * rate)
        return found

    def following(self, before: CloseRecord, record: CloseRecord) -> tuple[CodecPair, ...]:
        """Return the codecs that a record must name, by what else is in it and the record before; none where the
        manifest says them."""
        if not self.recorded:
            return ()
        exact, smaller = self.possible
        codecs = list(self.of(before))
        for boundary, share in self._shares(record).items():
            needed = share.needed * (RETURN_SHARE if codecs[boundary] == smaller else 1.0)
            codecs[boundary] = smaller if share.saved >= needed else exact
        return tuple(codecs)

    def why(self, before: CloseRecord, record: CloseRecord) -> str:
        """Return why the codecs after ``record`` are others than those after ``before``, in words; "" where they are
        not."""
        changed = [at for at, (old, new) in enumerate(zip(self.of(before), self.of(record), strict=True)) if old != new]
        shares = self._shares(record)
        if not changed or not set(changed) <= shares.keys():
            return ""
        busy = [shares[at].busy for at in changed]
        mbit = min(shares[at].rate for at in changed) * 8 / 1e6
        span = f"{min(busy):.0%} to {max(busy):.0%}" if round(min(busy), 2) < round(max(busy), 2) else f"{busy[0]:.0%}"
        exact = exact_codec(self.activation.dtype)
        return f"{exact} would keep links of {mbit:.3g} Mbit/s busy for {span} of a microbatch's time"

    def _shares(self, record: CloseRecord) -> dict[int, LinkShare]:
        """Of each boundary of which enough is known, that of its busier side."""
        pace_s = self._pace_s(record)
        if pace_s is None:
            return {}
        exact = codec_named(exact_codec(self.activation.dtype))
        size, small = exact.wire_bytes(self.activation), codec_named(SMALLER).wire_bytes(self.activation)
        groups = self._groups(record.members)
        found: dict[int, LinkShare] = {}
        for boundary in range(1, len(groups) - 1) if self.hosted else range(len(groups)):
            sides = []
            for group in (groups[boundary], groups[(boundary + 1) % len(groups)]):
                rates = [rate for peer in group if (rate := record.links.get(peer, (0, 0))[1])]
                if rates:
                    rate = median_high(rates)
                    busy = 2 * size / (rate * len(group) * pace_s)  # each member sends, and gets, a payload both ways
                    sides.append(LinkShare(busy * (size - small) / size, rate, busy))
            if sides:
                found[boundary] = max(sides)
        return found

    def _groups(self, roster: Roster) -> list[Sequence[PeerId]]:
        """The trainers, and the replicas of each stage: boundary n lies between the n-th of them and the next."""
        return [roster.trainers, *roster.columns()]

    def _pace_s(self, record: CloseRecord) -> float | None:
        """Seconds in which the slowest stage computes a microbatch, with all its replicas; None where no stage has
        told."""
        found = []
        for group in self._groups(record.members)[1:]:
            told = [record.paces[peer] for peer in group if peer in record.paces]
            if told:
                found.append(median_high(told) / 1e6 / len(group))
        return max(found, default=None)


FIXED = CodecRules(
    activation=TensorSpec((1,), "float32"), stages=0, hosted=False, forward="float32", backward="float32"
)
"""Of a run whose manifest says them: no record does."""
