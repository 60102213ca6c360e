"""Draw strikes that no event sets off: by a seed, in the shape of the spot market, or as a trace file says. Pure.

When spot machines are taken back, how many at once, and when others come in their place follows the public traces of
Bamboo and Parcae: removals are a Poisson process whose rate grows with the machines that are up, each takes a geometric
number of them (mean 2.1, at most 6: Bamboo's p3 trace, where every second one takes more than one), lifetimes are
memoryless but for that, and each machine comes back after an exponential delay of mean 10 minutes where machines live
for 100 (0.6 removals per machine and hour). Time is told in steps, so the same shape is played at any churn: at 1 % a
machine lives for 100 steps and is gone for 10.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.chaos.scenario import FaultSchedule, TraceSection
from swarm.errors import ConfigError

EDGE = 0.1
"""No strike lies in this part at either end of its span, so that two have some time between them."""
BULK_MEAN, BULK_MOST = 2.1, 6
DOWN_SHARE = 0.1
"""Mean seconds until a machine is replaced, as a share of its mean life."""
NOTICED_SHARE = 0.5
"""Part of the removals that are announced. Clouds announce all of them and promise nothing, machines of people just
vanish; no trace says how many were: an assumption."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A strike at ``at_s`` after the schedule began: what, to ``count`` peers, chosen by ``luck`` in [0, 1) among those
    who may be struck then. It lasts ``seconds`` (a pause), or they are back after as many, with a new disk or with
    theirs."""

    at_s: float
    kind: str
    luck: float
    seconds: float
    count: int = 1
    new_disk: bool = False


def draws(schedule: FaultSchedule, seed: int, seconds: float) -> tuple[Draw, ...]:
    """The strikes of so many seconds, in order. Equal arguments give equal draws; a longer time only adds some."""
    rng = random.Random(f"chaos {seed}")
    span = 3600.0 / schedule.per_hour
    kinds, weights = zip(*sorted(schedule.kinds.items()), strict=True)
    found = []
    for number in range(int(seconds / span)):
        at_s = (number + EDGE + (1 - 2 * EDGE) * rng.random()) * span
        kind = rng.choices(kinds, weights)[0]
        low, high = schedule.pause_s if kind == "pause" else schedule.back_s
        lasts = low + (high - low) * rng.random()
        if schedule.stretch_s is not None:
            at_s += at_s // schedule.stretch_s * schedule.quiet_s
        found.append(Draw(at_s, str(kind), rng.random(), lasts, 1, rng.random() < schedule.new_disk))
    return tuple(draw for draw in found if draw.at_s < seconds)


@dataclass(frozen=True, slots=True)
class Removal:
    """These places lose their machine at ``at_s``, all at once; ``back_s`` is when each has another. ``noticed``: the
    machines are told before."""

    at_s: float
    places: tuple[int, ...]
    back_s: tuple[float, ...]
    noticed: bool


def bulk_size(rng: random.Random) -> int:
    """Return the number of machines in one removal: geometric, of mean BULK_MEAN before it is cut off at BULK_MOST."""
    stays = 1.0 - 1.0 / BULK_MEAN
    return min(BULK_MOST, 1 + int(math.log(1.0 - rng.random()) / math.log(stays)))


def mean_bulk() -> float:
    """The mean of :func:`bulk_size`, cut off as it is."""
    stays = 1.0 - 1.0 / BULK_MEAN
    return sum(stays**size for size in range(BULK_MOST))


def spot_trace(*, places: int, churn: float, step_s: float, until_s: float, seed: int) -> tuple[Removal, ...]:
    """Removals before ``until_s``, in order, from ``places`` that all have a machine at 0. ``churn`` is the expected
    share of the machines that are up which is removed in ``step_s`` seconds; a removal takes no more than there are.
    """
    rng = random.Random(f"spot {seed}")
    up, returns = set(range(places)), list[tuple[float, int]]()
    life_s = step_s / churn
    now, removals = 0.0, list[Removal]()
    while True:
        rate = len(up) / (life_s * mean_bulk())
        next_s = now + rng.expovariate(rate) if up else math.inf
        if returns and returns[0][0] <= next_s:  # memoryless: what was drawn for fewer machines is drawn again
            now, place = heapq.heappop(returns)
            up.add(place)
            if now >= until_s:
                return tuple(removals)
            continue
        if next_s >= until_s:
            return tuple(removals)
        now = next_s
        taken = tuple(rng.sample(sorted(up), min(bulk_size(rng), len(up))))
        back = tuple(now + rng.expovariate(1.0 / (DOWN_SHARE * life_s)) for _ in taken)
        removals.append(Removal(now, taken, back, rng.random() < NOTICED_SHARE))
        up -= set(taken)
        for back_s, place in zip(back, taken, strict=True):
            heapq.heappush(returns, (back_s, place))


def removed(trace: Sequence[Removal]) -> int:
    """Machines removed in all."""
    return sum(len(removal.places) for removal in trace)


def market(trace: TraceSection, places: int, seed: int, seconds: float) -> tuple[Draw, ...]:
    """Return removals like those of the spot market: seeded, in bulk, half of it with notice; each machine comes back
    with a new disk."""
    if trace.churn_per_minute is None:
        return ()
    removals = spot_trace(
        places=places,
        churn=trace.churn_per_minute,
        step_s=60.0,
        until_s=seconds * trace.speed,
        seed=seed,
    )
    rng = random.Random(f"market {seed}")
    return tuple(
        Draw(
            removal.at_s / trace.speed,
            "stop" if removal.noticed else "kill",
            rng.random(),
            (sum(removal.back_s) / len(removal.back_s) - removal.at_s) / trace.speed,
            len(removal.places),
            True,
        )
        for removal in removals
    )


def read_trace(trace: TraceSection, beside: Path, seed: int) -> tuple[Draw, ...]:
    """Read lines "seconds, how many, back after seconds", where # begins a comment; kills, with a new disk. Raises
    ConfigError naming the line that is none."""
    path = beside / str(trace.file)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError("trace.file", str(path), "a readable file", f"{error.strerror}; check the path.") from error
    rng = random.Random(f"trace {seed}")
    found = []
    for number, line in enumerate(lines, 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        try:
            at_s, count, back_s = _numbers(text)
        except ValueError:
            wanted = "seconds, how many (1 or more), back after seconds"
            raise ConfigError(f"{path}, line {number}", line, wanted, "Correct that line.") from None
        found.append(Draw(at_s / trace.speed, "kill", rng.random(), back_s / trace.speed, count, True))
    return tuple(sorted(found, key=lambda draw: draw.at_s))


def _numbers(text: str) -> tuple[float, int, float]:
    """Raises ValueError for what cannot be struck by: a draw of nobody, or at no time, would stop all after it."""
    first, second, third = text.split(",")
    at_s, count, back_s = float(first), int(second), float(third)
    if not (0 <= at_s < math.inf and 0 <= back_s < math.inf and count >= 1):
        raise ValueError(text)
    return at_s, count, back_s


def choose(draw: Draw, among: Collection[str], ready: Mapping[str, str]) -> tuple[str, ...]:
    """Return the struck peers of those named in ``among``, up to ``draw.count``; none when everybody is spared.
    ``ready`` are those who live, are ready and not struck already, and which part each holds: none loses its last, by
    several falling together either."""
    left = Counter(ready.values())
    free = sorted(set(ready) & set(among))
    random.Random(draw.luck).shuffle(free)
    chosen: list[str] = []
    for name in free:
        if len(chosen) < draw.count and left[ready[name]] > 1:
            left[ready[name]] -= 1
            chosen.append(name)
    return tuple(chosen)
