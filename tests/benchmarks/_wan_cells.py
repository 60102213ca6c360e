"""The cells of the benchmark ``wan``: a machine's link, work and tensors, and what they allow at best. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

STAGES, REPLICAS, TRAINERS = 4, 2, 2
MICROBATCHES = 64
"""Of a step."""
BASE = (568, 1, 10)
"""Compute in ms, activation in MB and part in MB of the cells that are named by their link alone."""
BITS = 8e6
"""Of a megabyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One setting; all machines are alike.

    Attributes:
        mbit: Megabits a second of a machine, each way.
        rtt: Milliseconds there and back.
        compute_ms: Of a stage's forward and backward of one microbatch.
        activation_mb: Of what crosses a boundary, in float32; its gradient is as large.
        part_mb: Of what is averaged, of a stage and of the ends, in float32.
    """

    mbit: int
    rtt: int
    compute_ms: int = BASE[0]
    activation_mb: int = BASE[1]
    part_mb: int = BASE[2]

    @property
    def name(self) -> str:
        """The end of its keys: the link, and the rest where it is not as in most cells."""
        rest = (self.compute_ms, self.activation_mb, self.part_mb)
        more = "" if rest == BASE else "_{}ms_{}mb_{}mb".format(*rest)
        return f"{self.mbit}_{self.rtt}{more}"

    @property
    def compute_s(self) -> float:
        """Seconds of ``compute_ms``."""
        return self.compute_ms / 1e3

    @property
    def links(self) -> dict[str, Any]:
        """The links between all machines, as :meth:`swarm.sim.links.Links.parse` reads them."""
        machine = {"peer": "*", "up_mbit_per_s": self.mbit, "down_mbit_per_s": self.mbit}
        default = {"latency_ms": self.rtt / 2, "jitter_ms": self.rtt / 100}
        return {"default": default, "machine": [machine]}


NAMED = (Cell(mbit=80, rtt=80), Cell(mbit=200, rtt=300), Cell(mbit=500, rtt=100), Cell(mbit=50, rtt=100))
"""Those with keys of their own in the summary; the others are rows of the table."""
CELLS = (
    *NAMED,
    Cell(mbit=500, rtt=10),
    Cell(mbit=50, rtt=300),
    Cell(mbit=200, rtt=100, part_mb=100),
    Cell(mbit=200, rtt=10, activation_mb=8),
    Cell(mbit=500, rtt=100, compute_ms=66),
    Cell(mbit=500, rtt=100, compute_ms=5317, activation_mb=8),
    Cell(mbit=500, rtt=100, compute_ms=7059, activation_mb=8, part_mb=100),
    Cell(mbit=80, rtt=100, compute_ms=5317, activation_mb=8, part_mb=100),
)
PUBLISHED = {66: 18.1, 568: 32.1, 5317: 82.1, 7059: 89.5}
"""Percent of GPU time used, by compute in ms a batch: compute ÷ (compute + waiting for the network) as in the slides of
SWARM's first author (66 and 298 ms, 568 and 1204, 5317 and 1158, 7059 and 832, at 500 Mbit/s; arXiv 2301.11913)."""
PUBLISHED_MBIT = 500

EARLY = {"mode": "overlap", "early_share": 0.5}
"""As much as may be early with AdamW: what is, the row says."""
OVERRIDES: dict[str, dict[str, dict[str, Any]]] = {
    "sync": {},
    "sync_int8h": {"codecs": {"activations": "int8h"}},
    "sync_auto": {"codecs": {"activations": "auto"}},
    "overlap": {"speed": EARLY},
    "overlap_int8h": {"codecs": {"activations": "int8h"}, "speed": EARLY},
    "overlap_int8h_20": {"codecs": {"activations": "int8h"}, "speed": EARLY | {"early_share": 0.2}},
    "overlap_int8h_30": {"codecs": {"activations": "int8h"}, "speed": EARLY | {"early_share": 0.3}},
}
"""Modes of the product, by name, and the sections of the manifest that make them: another is a line here."""
WIRE = {mode: 66 / 256 for mode, sections in OVERRIDES.items() if "codecs" in sections}
"""Bytes of what crosses a boundary ÷ those of float32, where they are or may become fewer."""
MODES = (*OVERRIDES,)
BRIEF = {
    "80_80": ("sync", "overlap", "overlap_int8h", "overlap_int8h_20", "overlap_int8h_30"),
    "200_300": ("sync", "overlap", "overlap_int8h", "overlap_int8h_20", "overlap_int8h_30"),
    "500_100": ("sync", "overlap"),
    "50_100": ("overlap",),
}
"""What is played where not all is, by cell."""


def transfer_s(cell: Cell, wire: float = 1.0) -> float:
    """Return the seconds for which the busiest machine's link carries what one microbatch costs it, each way.

    Stage hosts and trainers have the same: two activations or gradients in and two out, and its share of averaging,
    which carries 2 (K - 1) ÷ K of the part each way, over the microbatches of a step that pass through the machine.
    ``wire``: bytes on the wire ÷ those of float32, of what crosses boundaries.
    """
    averaged_mb = 2 * (REPLICAS - 1) / REPLICAS * cell.part_mb / (MICROBATCHES / REPLICAS)
    ends_mb = 2 * (TRAINERS - 1) / TRAINERS * cell.part_mb / (MICROBATCHES / TRAINERS)
    per_host = (2 * wire * cell.activation_mb + averaged_mb) * BITS / (cell.mbit * 1e6)
    per_trainer = (2 * wire * cell.activation_mb + ends_mb) * BITS / (cell.mbit * 1e6)
    return max(per_host, per_trainer * REPLICAS / TRAINERS)  # while a host computes one, a trainer feeds so many


def bound(cell: Cell, mode: str = "sync") -> float:
    """Return the most of its device time that a stage can work: what its link lets through, were nothing waited for."""
    return min(1.0, cell.compute_s / transfer_s(cell, WIRE.get(mode, 1.0)))


def plain_bound(cell: Cell) -> float:
    """Return the bound as SWARM states it: compute beside what crosses the stage's boundaries, without averaging."""
    return min(1.0, cell.compute_s / (2 * cell.activation_mb * BITS / (cell.mbit * 1e6)))


def published(cell: Cell) -> float | None:
    """Return SWARM's published share for this compute and rate; None where there is none. Its tensors are others."""
    return PUBLISHED[cell.compute_ms] / 100 if cell.mbit == PUBLISHED_MBIT else None
