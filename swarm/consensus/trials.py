"""Trainers whose microbatches pull against all others': when the run takes nothing more of one, and for how long. Pure.

Each replica of a stage says of each trainer whose microbatches it holds how far they point where the others' do
(:mod:`swarm.optim.sketches`). It sees its own microbatches only: so no sums by trainer travel, and none is anybody's to
make up. Its words are signed with its result and stand in the record, so all members judge the same words.

One replica's word is little. All words of a record are cut off at what half of them reach, so one that lies weighs no
more than any other; of a step's stages the one in the middle counts, of two the kinder; and a trainer fails where its
words are below nothing by SURE standard errors, and by half of what others' are above it, while most of those are not
below it. Who is only unlike the others, as code is among prose, pulls less, and not against them.

Who fails has no quota for a while, each time for twice as long. It stays a member, and nobody calls it a liar.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median_low
from typing import Annotated, Protocol

from pydantic import Field

from swarm.consensus.roster import Roster
from swarm.ids import ENDS, MicrobatchId, PartName, PeerId, stage_of
from swarm.schema import Count, Message

WHOLE_WORD = 10_000
"""Words are cosines, in 1 / WHOLE_WORD."""
Words = Annotated[tuple[Annotated[int, Field(ge=-WHOLE_WORD, le=WHOLE_WORD)], ...], Field(max_length=20_000)]
"""A replica's, of the trainers whose microbatches it holds, by their ids; 0 says nothing."""
CUT = 100
"""What a word counts that is cut off."""
FEWEST, FEWEST_WORDS = 24, 12
"""Of fewer microbatches, or by fewer words, no trainer is judged."""
SURE = 5.0
"""Standard errors."""
FAR = 0.5
"""A trainer fails that pulls against the others so many times as far as they pull together. (Measured: text in capitals
among prose, honest, 0.27 in the first steps, then nothing; gradients that are turned around 0.7 and more.)"""
MOST = 96
"""From so many microbatches on what is older counts half: who changes is judged by what it does now."""
FEWEST_TRAINERS = 3
"""Of two nobody can say which one is right."""
FIRST_REST, MOST_DOUBLINGS = 256, 6
"""For so many steps a trainer that fails feeds nothing, and how often that is doubled."""
FORGET = 4
"""So many times as long as a trainer rested it is remembered after it."""


class FedRow(Protocol):
    """A committed microbatch, as far as it matters here."""

    @property
    def microbatch(self) -> MicrobatchId:
        """Return what it is."""

    @property
    def route(self) -> tuple[str, ...]:
        """Return which replica of each stage holds its gradient."""


class Trial(Message):
    """What records say of one trainer: of how many of its microbatches and by how many ``words`` it is judged, their
    sum, and that of their squares; how often it failed, and the first step that it may feed again. Of one that has
    just failed the words by which it did are there."""

    microbatches: Count = 0
    words: Count = 0
    total: Annotated[int, Field(ge=-(1 << 50), le=1 << 50)] = 0
    squares: Count = 0
    times: Count = 0
    until: Count = 0

    @property
    def mean(self) -> float:
        """Return how far it pulls with the others, from −1 to 1."""
        return self.total / self.words / CUT if self.words else 0.0

    def below(self, errors: float) -> bool:
        """Return whether that is below nothing by so many standard errors."""
        if not self.words:
            return False
        mean = self.total / self.words
        error = math.sqrt(max(0.0, self.squares / self.words - mean * mean) / self.words)
        return mean + errors * error < 0.0

    @property
    def against(self) -> bool:
        """Return whether it surely pulls against them."""
        return self.microbatches >= FEWEST and self.words >= FEWEST_WORDS and self.below(SURE)


Known = Mapping[str, Trial]
"""By trainer; who is not in it has not been judged."""


def judged(committed: Sequence[FedRow], replica: str, stage: int | None) -> tuple[PeerId, ...]:
    """Return the trainers of whom a replica of a stage has to say something, in the order in which it does; nobody for
    one of the ends, which holds a single one's."""
    if stage is None:
        return ()
    return tuple(sorted({PeerId(one.microbatch.trainer) for one in committed if one.route[stage] == replica}))


def checked_words(
    roster: Roster, committed: Sequence[FedRow], said: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the words that can be: of replicas of stages, of as many trainers as each has to judge, three and more."""
    found: dict[str, tuple[int, ...]] = {}
    for by, words in sorted(said.items()):
        part = roster[by].part if by in roster else None
        stage = None if part is None else stage_of(PartName(part))
        if stage is not None and len(words) >= FEWEST_TRAINERS and len(words) == len(judged(committed, by, stage)):
            found[by] = tuple(words)
    return found


def resting(known: Known, step: int) -> dict[PeerId, int]:
    """Return the trainers that have no quota in a step, with the first that they may feed again."""
    return {PeerId(peer): one.until for peer, one in known.items() if one.until > step}


def failed(known: Known, step: int) -> dict[PeerId, Trial]:
    """Return the trainers that the record of a step takes the quota from."""
    return {PeerId(peer): one for peer, one in known.items() if one.until > step and one.words}


def following(
    known: Known, step: int, roster: Roster, committed: Sequence[FedRow], said: Mapping[str, tuple[int, ...]]
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
            one = Trial(times=one.times, until=one.until)
        elif peer in samples:
            one = _more(one, *samples[peer])
        if peer in roster or (one.times and step < one.until + FORGET * _rest(one.times)):
            now[peer] = one
    able = {trainer: one for trainer, one in now.items() if trainer in roster and one.words and one.until <= step}
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
    roster: Roster, committed: Sequence[FedRow], said: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, list[int]]]:
    """Return by trainer how many of its microbatches are judged, and the words."""
    usual = median_low([abs(word) for words in said.values() for word in words if word] or [1])
    found: dict[str, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for by, words in sorted(said.items()):
        stage = stage_of(PartName(roster[by].part or ENDS))
        assert stage is not None  # noqa: S101 - only those of stages are asked
        counts = Counter(one.microbatch.trainer for one in committed if one.route[stage] == by)
        for trainer, word in zip(sorted(counts), words, strict=True):
            if word:
                cut = round(CUT * max(-usual, min(usual, word)) / usual)
                found[trainer][stage].append((counts[trainer], cut))
    samples: dict[str, tuple[int, list[int]]] = {}
    for of_whom, stages in found.items():
        kinder = sorted(stages.values(), key=lambda told: fmean(cut for _, cut in told))[len(stages) // 2]
        samples[of_whom] = sum(count for count, _ in kinder), [cut for _, cut in kinder]
    return samples


def _more(one: Trial, microbatches: int, cuts: Sequence[int]) -> Trial:
    half = 2 if one.microbatches >= MOST else 1
    return one.model_copy(
        update={
            "microbatches": one.microbatches // half + microbatches,
            "words": one.words // half + len(cuts),
            "total": round(one.total / half) + sum(cuts),
            "squares": one.squares // half + sum(cut * cut for cut in cuts),
        }
    )


def _rest(times: int) -> int:
    return FIRST_REST << min(times - 1, MOST_DOUBLINGS)
