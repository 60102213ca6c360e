"""Is training in the swarm the same training? Whole swarms of processes against a plain loop in one process."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.models.gpt_config import GptConfig
from swarm.optim.schedules import OptimizerConfig
from swarm.pipeline.batch import BatchConfig
from tests.benchmarks._parity_run import Data, Layout, Scale, TrainedRun, WiredGroup, build_data, make_manifest, train
from tests.benchmarks.runner import Cell, Result, Size

if TYPE_CHECKING:
    from tests.benchmarks._parity_compare import Comparison

LAYOUTS = (
    Layout(name="2 stages × 2, private ends", stages=2, replicas=2, ends="private"),
    Layout(name="2 stages × 2, hosted ends", stages=2, replicas=2, ends="hosted"),
    Layout(name="4 stages × 1, private ends", stages=4, replicas=1, ends="private"),
)
SMALL = Scale(
    model=GptConfig(vocab_size=512, dim=64, layers=4, heads=4, context=64, dropout=0.1),
    batch=BatchConfig(microbatch_size=4, microbatches_per_step=8),
    optimizer=OptimizerConfig(lr=1e-3, warmup_steps=5, clip_norm=0.5),
    steps=20,
    characters=70_000,
)
"""With dropout, whose masks must not depend on who computes; with clipping in most steps; and with so little text that
epochs end within the run. The learning rate is below the default because it sets how far training amplifies
float32 rounding, and with it the smallest fault that can be seen. Measured over 14 draws of batches and masks, the
plain loop beside itself with each step's microbatches added backwards: worst tensor 1.5e-7 in the median and 5e-7 at
most at 1e-3, 4e-6 at most at 2e-3, and 1.5e-5 (9e-5 without dropout) at 3e-3. The worst is the first
block's attention output, behind which every norm divides by the small embeddings."""

FULL = Scale(model=GptConfig(), batch=BatchConfig(), optimizer=OptimizerConfig(), steps=30, characters=None)
"""Model, batch, optimizer and text of ``swarm quickstart``; a quarter of an hour on two free cores. Expect float32 rows
to miss. At 3e-3 (the default then) the loss rises once when the warm-up ends, and rounding grows a hundredfold within a
few steps. Measured at step 20 of one run: swarm beside plain loop 2.1e-5, where the order of additions alone
makes 3.7e-5 and AdamW's rounding alone 1.5e-5. The reproducible rows are exact here too."""

SMOKE_LAYOUTS = (Layout(name="1 stage × 2, private ends", stages=1, replicas=2, ends="private"),)
SMOKE = replace(SMALL, batch=BatchConfig(microbatch_size=2, microbatches_per_step=4), steps=3, characters=20_000)

MAX_REL_DIFF = 1e-5
MANY_IN_FLIGHT, ONE_IN_FLIGHT = 6, 1

KEYS = (
    "max_rel_diff", "max_rel_diff_target", "max_abs_diff_reproducible", "max_abs_diff_reproducible_target",
    "max_loss_rel_diff", "losses_differing_reproducible", "digests_differing_reproducible",
    "two_wirings_same_digests", "two_wirings_microbatches_rerouted", "microbatches", "layouts",
)  # fmt: skip
COLUMNS = (
    "layout",
    "sums",
    "microbatches",
    "max_rel_diff",
    "worst_tensor",
    "max_abs_diff",
    "loss_rel_diff",
    "order_alone_rel",
    "adamw_alone_rel",
    "moved_rel",
    "run_s",
    "replay_s",
)


def run(size: Size) -> Result:
    """Weights and losses of real swarms against plain PyTorch, three layouts, float32 and reproducible."""
    scale = {Size.SMOKE: SMOKE, Size.DEFAULT: SMALL, Size.FULL: FULL}[size]
    layouts = SMOKE_LAYOUTS if size is Size.SMOKE else LAYOUTS
    with tempfile.TemporaryDirectory(prefix="parity-") as temporary:
        root = Path(temporary)
        group = WiredGroup(root / "launch.log")
        try:
            group.open()
            data = build_data(root / "data", scale)
            measured = [
                _measure(group, root, layout, scale, data, reproducible=reproducible)
                for layout in layouts
                for reproducible in (False, True)
            ]
            many = next(trained for trained, compared in measured if compared.reproducible)
            one = _wire_again(group, root, many, data)
        finally:
            group.stop()
    return _result([compared for _, compared in measured], (many, one))


def _measure(
    group: WiredGroup, root: Path, layout: Layout, scale: Scale, data: Data, *, reproducible: bool
) -> tuple[TrainedRun, Comparison]:
    from tests.benchmarks._parity_compare import compare_exact, compare_plain

    _tell(f"{layout.name}, {_sums(reproducible)} …")
    manifest = make_manifest(layout, scale, data, reproducible=reproducible)
    group.in_flight = MANY_IN_FLIGHT if reproducible else None
    trained = train(group, _root(root, layout, reproducible), layout, manifest, data)
    compared = compare_exact(trained) if reproducible else compare_plain(trained)
    _tell(f"  {compared.run_s:.1f} s run, {compared.replay_s:.1f} s replay, max rel diff {compared.distance.rel:.3g}")
    return trained, compared


def _wire_again(group: WiredGroup, root: Path, many: TrainedRun, data: Data) -> TrainedRun:
    """The same manifest and the same peers, with one journey under way where there were many."""
    _tell(f"{many.layout.name}, reproducible, {ONE_IN_FLIGHT} in flight …")
    group.in_flight = ONE_IN_FLIGHT
    peers = many.directory.root
    return train(group, root / "wired", many.layout, many.manifest, data, same_peers_as=peers)


def routes_differing(one: TrainedRun, other: TrainedRun) -> int:
    """How many microbatches of two runs went another way, or in another step."""
    ways = [
        {(record.step, c.microbatch, c.route) for record in run.records for c in record.committed}
        for run in (one, other)
    ]
    return len(ways[0] - ways[1])


def _result(comparisons: Sequence[Comparison], wirings: tuple[TrainedRun, TrainedRun]) -> Result:
    plain = [c for c in comparisons if not c.reproducible]
    exact = [c for c in comparisons if c.reproducible]
    worst = max(c.distance.rel for c in plain)
    worst_exact = max(c.distance.abs for c in exact)
    rerouted, equal = routes_differing(*wirings), wirings[0].digests == wirings[1].digests
    summary: dict[str, Any] = {
        "max_rel_diff": worst,
        "max_rel_diff_target": MAX_REL_DIFF,
        "max_abs_diff_reproducible": worst_exact,
        "max_abs_diff_reproducible_target": 0.0,
        "max_loss_rel_diff": max(c.loss_rel for c in plain),
        "losses_differing_reproducible": sum(c.losses_differing or 0 for c in exact),
        "digests_differing_reproducible": sum(c.digests_differing or 0 for c in exact),
        "two_wirings_same_digests": equal,
        "two_wirings_microbatches_rerouted": rerouted,
        "microbatches": sum(c.microbatches for c in comparisons),
        "layouts": [asdict(c) for c in comparisons],
    }
    return Result(
        columns=COLUMNS, rows=[_row(c) for c in comparisons], summary=summary, notes=_notes(summary, comparisons)
    )


def _row(c: Comparison) -> list[Cell]:
    d = c.distance
    sums = _sums(c.reproducible)
    tensor = d.tensor if d.rel else None
    measured = [d.rel, tensor, d.abs, c.loss_rel, c.order_rel, c.adamw_rel, c.moved]
    return [c.layout, sums, c.microbatches, *measured, round(c.run_s, 1), round(c.replay_s, 1)]


def _notes(summary: dict[str, Any], comparisons: Sequence[Comparison]) -> list[str]:
    first = comparisons[0]
    notes = [
        f"{first.steps} steps, sync, float32 on the wire; loss {first.first_loss:.3f} to {first.last_loss:.3f}; "
        f"clipped in {sum(c.clipped for c in comparisons)} of {sum(c.steps for c in comparisons)} steps, "
        f"at most {max(c.epochs for c in comparisons)} epochs begun",
        "float32 rows: against autograd's own sums, torch.optim.AdamW and a clip by the float64 norm; order_alone_rel "
        "is how far that loop is from itself with each step's microbatches added backwards, adamw_alone_rel how far "
        "from the loop with the project's sums and AdamW",
        "reproducible rows: against float64 sums on a grid and the project's separately rounded AdamW, because "
        "torch.optim.AdamW rounds differently; the digests of all parts after all steps are compared too",
        f"the same manifest and peers with {MANY_IN_FLIGHT} and {ONE_IN_FLIGHT} journeys in flight: "
        f"{summary['two_wirings_microbatches_rerouted']} microbatches took another way, digests "
        + ("equal at every step" if summary["two_wirings_same_digests"] else "DIFFERENT"),
    ]
    if not summary["two_wirings_microbatches_rerouted"]:
        notes.append("the two wirings happened to be the same: that check proves nothing this time")
    if summary["max_rel_diff"] > MAX_REL_DIFF:
        notes.append(
            f"MISSED: max_rel_diff is above {MAX_REL_DIFF:g}. Where order_alone_rel or adamw_alone_rel is about as "
            "large, it is float32 rounding that training amplified, swarm or no swarm; where both are far less, a fault"
        )
    if summary["max_abs_diff_reproducible"] or summary["losses_differing_reproducible"]:
        notes.append("MISSED: a reproducible run is not its replay, bit for bit")
    return notes


def _root(root: Path, layout: Layout, reproducible: bool) -> Path:
    """Short, for the paths of sockets are below it."""
    return root / f"{layout.stages}{layout.replicas}{layout.ends[0]}{'r' if reproducible else 'f'}"


def _sums(reproducible: bool) -> str:
    return "reproducible" if reproducible else "float32"


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
