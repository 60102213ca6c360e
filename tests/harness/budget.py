"""How long a run of everything may take on this machine, and what of it is drawn: pure, but for :func:`measure`.

What must hold is always run, whatever it takes. The rest is drawn by the commit: it gets what time is left, each phase
in proportion to what it takes on a good machine, and what one leaves over goes to those after it. A machine is measured
by what tests are made of, in as many processes as tests run in, so that a busy or throttled one counts as the slow one
it is. Nothing here decides a verdict: what is not drawn is named, and fails nothing.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

GOOD = {"python": 215.0, "torch": 82_000.0, "disk": 3_200.0}
"""Turns a second of each meter, both processes together, on two idle cores of a good machine (Xeon with AVX-512)."""
WEIGHTS = {"python": 0.8, "torch": 0.15, "disk": 0.05}
"""The share of each in what tests spend."""
WORKERS = 2
MARGIN = 0.85
"""A drawn phase begins no test in the last part of its time, so that those it has begun come to their end."""

METER = """
import json, os, sys, tempfile, time
seconds = float(sys.argv[1])
def rate(turn):
    turn()
    done, start = 0, time.monotonic()
    while time.monotonic() - start < seconds:
        turn()
        done += 1
    return done / (time.monotonic() - start)
def python():
    table = {}
    for number in range(40_000):
        table[number % 977] = table.get(number % 977, 0) + len(str(number))
def disk():
    with tempfile.TemporaryFile() as file:
        file.write(bytes(65536))
        file.flush()
        os.fsync(file.fileno())
found = {"python": rate(python), "disk": rate(disk)}
import torch
torch.set_num_threads(1)
left = torch.ones(96, 96)
found["torch"] = rate(lambda: (left @ left).add_(1).sum())
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Phase:
    """One part of a run of everything.

    Attributes:
        name: As it is printed.
        good_s: Seconds that it takes on a good machine.
        always: Whether it is run to its end whatever that takes.
        least_s: Seconds on a good machine before its first test ends: with less it is not begun.
    """

    name: str
    good_s: float
    always: bool = False
    least_s: float = 0.0


def slowness(found: dict[str, float]) -> float:
    """Return how many times longer than a good machine one takes that makes so many turns a second."""
    return sum(weight * GOOD[name] / max(found[name], 1e-9) for name, weight in WEIGHTS.items())


def measure(seconds: float = 1.0) -> dict[str, float]:
    """Return turns a second of each meter, of :data:`WORKERS` processes together, which take so many seconds for each.
    Blocks. Raises RuntimeError when a meter fails."""
    command = [sys.executable, "-c", METER, str(seconds)]
    meters = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(WORKERS)]
    said = [meter.communicate()[0] for meter in meters]
    if any(meter.returncode for meter in meters):
        raise RuntimeError(f"the machine cannot be measured: a meter ended with {[one.returncode for one in meters]}")
    each = [json.loads(text) for text in said]
    return {name: sum(one[name] for one in each) for name in GOOD}


def share(phase: Phase, after: Sequence[Phase], left_s: float, slow: float = 1.0) -> float:
    """Return the seconds that a drawn phase may take of those left, when these phases come after it on a machine so
    many times slower than a good one: what they do not need, or, where that is too little, by what each needs."""
    later_s = slow * sum(one.good_s for one in after)
    needed_s = slow * phase.good_s
    return left_s - later_s if left_s >= needed_s + later_s else max(0.0, left_s) * needed_s / (needed_s + later_s)


def drawn_first(names: Sequence[str], seed: str) -> list[str]:
    """Return the names in an order drawn by the seed: equal for equal seeds, everywhere."""
    return sorted(names, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
