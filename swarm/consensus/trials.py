"""Trainers whose microbatches pull against all others': when the run takes nothing more of one, and for how long. Pure.

Each replica of a stage says of each trainer whose microbatches it holds how far they point where the others' do
(``Sketches`` of :mod:`swarm.optim.accumulate`). It sees its own microbatches only: so no sums by trainer travel, and
none is anybody's to make up. Its words are signed with its result and stand in the record, so all members judge the
same words.

One replica's word is little. All words of a record are cut off at what half of them reach, so one that lies weighs no
more than any other; and a trainer fails where at more than half of the stages its words are below nothing by SURE
standard errors, and by FAR of what others' are above it, while most of those are not below it. Who is only unlike the
others, as code is among prose, pulls less, and not against them.

A trainer may make its microbatches of another's that it has computed first, to have that one fail. Each word is
therefore a mean without the lowest (:func:`swarm.optim.accumulate.pulls`): no single trainer lowers what is said of
another below what the honest others are to that one. So nobody makes one fail that does not pull against those. One
that does a little, for it is unlike them all, can be made to: itself is among those others, and makes what they pull
together look less. By search over adversaries that takes a fifth and more of what the others pull, of five trainers,
and a third, of six. Of four honest text reaches what it takes: they are not judged.

Who fails has no quota for a while, each time for twice as long. It stays a member, and nobody calls it a liar.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import median_high, median_low
from typing import Annotated

from pydantic import Field

from swarm.columns import Routed, held
from swarm.consensus.roster import Roster
from swarm.consensus.slowness import FORGET, Suspension, doubled
from swarm.ids import ENDS, PartName, PeerId
from swarm.schema import FEWEST_TRAINERS, WHOLE_WORD, Count, Message, PartField

Words = Annotated[tuple[Annotated[int, Field(ge=-WHOLE_WORD, le=WHOLE_WORD)], ...], Field(max_length=20_000)]
"""A replica's, of the trainers whose microbatches it holds, by their ids; 0 says nothing."""
CUT = 100
"""What a word counts that is cut off."""
FEWEST, FEWEST_WORDS = 24, 12
"""Of fewer microbatches, or by fewer words, no trainer is judged."""
SURE = 5.0
"""Standard errors."""
FAR = 0.75
"""A trainer fails that pulls against the others so many times as far as they pull together. (Measured: text in capitals
among prose, honest, 0.2; gradients that are turned around, of five, 0.9.)"""
MOST = 96
"""From so many microbatches on what is older counts half: who changes is judged by what it does now."""
FIRST_REST, MOST_DOUBLINGS = 256, 6
"""For so many steps a trainer that fails feeds nothing, and how often that is doubled."""
UNSURE, MAX_AWAY = 2.0, 64
"""Who leaves while it is below nothing by so many standard errors is remembered as well, and goes on from there when it
is back: else it would leave each time before it is judged. So many of those that are away, who were there last."""


class Tally(Message):
    """What the replicas of one stage say of a trainer: of how many of its microbatches and by how many ``words`` it is
    judged there, their sum, and that of their squares."""

    microbatches: Count = 0
    words: Count = 0
    total: Annotated[int, Field(ge=-(1 << 50), le=1 << 50)] = 0
    squares: Count = 0

    @property
    def mean(self) -> float:
        """Return how far it pulls with the others, from −1 to 1."""
        return self.total / max(1, self.words) / CUT

    @property
    def enough(self) -> bool:
        """Return whether it may be judged by them."""
        return self.microbatches >= FEWEST and self.words >= FEWEST_WORDS

    def below(self, errors: float) -> bool:
        """Return whether the mean is below nothing by so many standard errors."""
        words = max(1, self.words)
        mean = self.total / words
        return mean + errors * math.sqrt(max(0.0, self.squares / words - mean * mean) / words) < 0.0

    def more(self, microbatches: int, cuts: Sequence[int]) -> Tally:
        """Return it with these words of so many microbatches."""
        half = 2 if self.microbatches >= MOST else 1
        return Tally(
            microbatches=self.microbatches // half + microbatches,
            words=self.words // half + len(cuts),
            total=round(self.total / half) + sum(cuts),
            squares=self.squares // half + sum(cut * cut for cut in cuts),
        )


class Trial(Suspension):
    """What records say of one trainer: the ``tallies`` of stages, how often it failed, and when it may feed again. Of
    one that has just failed the tallies by which it did are there."""

    tallies: Annotated[dict[PartField, Tally], Field(max_length=1024)] = {}

    @property
    def rest(self) -> Trial:
        """Return it without what it is judged by."""
        return Trial(times=self.times, until=self.until)

    @property
    def mean(self) -> float:
        """Return how far it pulls with the others, from −1 to 1: at the stage in the middle, of two the kinder."""
        return median_high([one.mean for one in self.tallies.values()] or [0.0])

    @property
    def microbatches(self) -> int:
        """Return by how many it is judged at most."""
        return max((one.microbatches for one in self.tallies.values()), default=0)

    def below(self, errors: float) -> bool:
        """Return whether that is below nothing by so many standard errors, at more than half of the stages."""
        return 2 * sum(one.below(errors) for one in self.tallies.values()) > len(self.tallies)

    @property
    def against(self) -> bool:
        """Return whether it surely pulls against them, at more than half of the stages."""
        return 2 * sum(one.enough and one.below(SURE) for one in self.tallies.values()) > len(self.tallies)


Known = Mapping[str, Trial]
"""By trainer; who is not in it has not been judged."""


def judged(committed: Sequence[Routed], replica: str, part: PartName) -> tuple[PeerId, ...]:
    """Return the trainers of whom a replica of a stage has to say something, in the order in which it does; nobody for
    one of the ends, which holds a single one's."""
    if part == ENDS:
        return ()
    return tuple(sorted({PeerId(one.microbatch.trainer) for one, by in held(committed, part) if by == replica}))


def checked_words(
    roster: Roster, committed: Sequence[Routed], said: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the words that can be: of replicas of stages, of all trainers that each has to judge, if enough."""
    found: dict[str, tuple[int, ...]] = {}
    for by, words in sorted(said.items()):
        whom = judged(committed, by, PartName(roster[by].part or ENDS)) if by in roster else ()
        if len(words) == len(whom) >= FEWEST_TRAINERS:
            found[by] = tuple(words)
    return found


def few_trainers(trainers: int) -> str:
    """Return that of so many nobody is judged; "" where somebody may be."""
    return f"of {trainers} nobody is judged, of {FEWEST_TRAINERS} and more one is" if trainers < FEWEST_TRAINERS else ""


def resting(known: Known, step: int) -> dict[PeerId, int]:
    """Return the trainers that have no quota in a step, with the first that they may feed again."""
    return {PeerId(peer): one.until for peer, one in known.items() if one.until > step}


def failed(known: Known, step: int) -> dict[PeerId, Trial]:
    """Return the trainers that the record of a step takes the quota from."""
    return {PeerId(peer): one for peer, one in known.items() if one.until > step and one.tallies}


def following(
    known: Known, step: int, roster: Roster, committed: Sequence[Routed], said: Mapping[str, tuple[int, ...]]
) -> dict[str, Trial]:
    """Return what the record of a step says.

    Args:
        known: What the record before it says.
        step: The step.
        roster: Its members.
        committed: Its microbatches.
        said: The words that replicas said of them, as :func:`checked_words` has them.
    """
    samples, now = _samples(roster, committed, said), dict[str, Trial]()
    for peer in sorted({*known, *samples}):
        one = known.get(peer, Trial())
        if one.until > step:
            one = one.rest
        elif peer in samples:
            more = {part: one.tallies.get(part, Tally()).more(*told) for part, told in samples[peer].items()}
            one = one.model_copy(update={"tallies": {**one.tallies, **more}})
        if peer not in roster and not one.times and one.below(UNSURE):
            one = one.model_copy(update={"until": one.until or step})
        if peer in roster or step < _remembered(one):
            now[peer] = one
    away = sorted((one.until, peer) for peer, one in now.items() if peer not in roster and not one.times)
    for _, peer in away[:-MAX_AWAY]:
        del now[peer]
    able = {trainer: one for trainer, one in now.items() if trainer in roster and one.tallies and one.until <= step}
    for trainer, one in able.items():
        others = [other for of, other in able.items() if of != trainer]
        if one.against and len(others) >= FEWEST_TRAINERS - 1 and _most_pull_together(one, others):
            until = step + 1 + _rest(one.times + 1)
            now[trainer] = one.model_copy(update={"times": one.times + 1, "until": until})
    return now


def _most_pull_together(one: Trial, others: Sequence[Trial]) -> bool:
    """Return whether most others do, and ``one`` is as FAR against them: of texts without a common letter each unlearns
    at first a little of what others learn."""
    together = [other for other in others if not other.below(1.0)]
    return 2 * len(together) > len(others) and -one.mean >= FAR * median_low([other.mean for other in others])


def _samples(
    roster: Roster, committed: Sequence[Routed], said: Mapping[str, tuple[int, ...]]
) -> dict[str, dict[PartName, tuple[int, list[int]]]]:
    """Return by trainer and stage how many of its microbatches are judged, and the words, each cut off."""
    usual = median_low([abs(word) for words in said.values() for word in words if word] or [1])
    found: dict[str, dict[PartName, tuple[int, list[int]]]] = defaultdict(dict)
    for by, words in sorted(said.items()):
        part = PartName(roster[by].part or ENDS)
        counts = Counter(one.microbatch.trainer for one, holder in held(committed, part) if holder == by)
        for trainer, word in zip(sorted(counts), words, strict=True):
            if word:
                count, cuts = found[trainer].get(part, (0, []))
                cut = round(CUT * max(-usual, min(usual, word)) / usual)
                found[trainer][part] = count + counts[trainer], [*cuts, cut]
    return found


def _remembered(one: Trial) -> int:
    """Return the first step whose record says nothing more of a trainer that is away."""
    return one.until + FORGET * _rest(max(1, one.times)) if one.until else 0


def _rest(times: int) -> int:
    return doubled(FIRST_REST, times, MOST_DOUBLINGS)
