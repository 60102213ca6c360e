"""What do experts by kinds of text bring, and what do they cost, beside models without?

Runs of two stages in the simulator, the second with four variants. Text routes by kinds that are learnt without labels
(:mod:`tests.benchmarks._variants_case`).
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from tests.benchmarks._cases import play_cases
from tests.benchmarks.runner import Cell, Result, Size

KEYS = ("loss_over_dense", "loss_over_dense_bar", "bytes_over_dense", "bytes_over_dense_bar", "load_max_over_mean",
        "load_max_over_mean_bar", "load_best", "load_moved", "apart_over_dense", "large_over_dense")  # fmt: skip
COLUMNS = ("seed", "model", "prose", "code", "tables", "by share", "routed as trained", "KB a microbatch")
SEEDS = {Size.SMOKE: 1, Size.DEFAULT: 1, Size.FULL: 3}
STEPS = {Size.SMOKE: 2, Size.DEFAULT: 150, Size.FULL: 300}
LOAD = {Size.SMOKE: (2, 5), Size.DEFAULT: (40, 24), Size.FULL: (80, 24)}
"""Steps and hosts of the run that is about load."""
MODELS = ("large", "variants", "dense", "apart")
CHARACTERS = {Size.SMOKE: 100_000, Size.DEFAULT: 1_200_000, Size.FULL: 1_200_000}
SHARES = {"prose": 0.5, "code": 0.3, "tables": 0.2}


def run(size: Size) -> Result:
    """Loss, bytes and load of four variants with learnt kinds, beside dense, separate and larger models."""
    steps, hosts = LOAD[size]
    characters = {kind: round(share * CHARACTERS[size]) for kind, share in SHARES.items()}
    cases = [{"model": model, "seed": seed, "steps": STEPS[size], "hosts": 0, "characters": characters}
             for seed in range(SEEDS[size]) for model in MODELS]  # fmt: skip
    cases += [
        {"model": "load", "seed": seed, "steps": steps, "hosts": hosts, "characters": characters}
        for seed in range(SEEDS[size])
    ]
    played = play_cases("variants", cases)
    rows: list[list[Cell]] = []
    losses: dict[str, list[float]] = {model: [] for model in MODELS}
    sent: dict[str, list[float]] = {model: [] for model in MODELS}
    loads = [one for one in played if one["model"] == "load"]
    for one in played:
        if one["model"] == "load":
            continue
        late = {kind: found[1] for kind, found in one["losses"].items()}
        whole = sum(share * one["losses"][kind][0] for kind, share in SHARES.items())
        losses[one["model"]].append(sum(share * late[kind] for kind, share in SHARES.items()))
        sent[one["model"]].append(one["bytes"])
        rows.append([one["seed"], one["model"], *late.values(), losses[one["model"]][-1], whole, one["bytes"] / 1e3])
    worst = {model: max(a / b for a, b in zip(losses[model], losses["dense"], strict=True)) for model in MODELS}
    summary: dict[str, Any] = {
        "loss_over_dense": round(worst["variants"], 4),
        "loss_over_dense_bar": 0.97,
        "bytes_over_dense": round(fmean(sent["variants"]) / fmean(sent["dense"]), 4),
        "bytes_over_dense_bar": 1.01,
        "load_max_over_mean": round(max(one["load"] for one in loads), 3),
        "load_max_over_mean_bar": 1.15,
        "load_best": round(max(one["best"] for one in loads), 3),
        "load_moved": max(one["moved"] for one in loads),
        "apart_over_dense": round(worst["apart"], 4),
        "large_over_dense": round(worst["large"], 4),
    }
    return Result(columns=COLUMNS, rows=rows, summary=summary, notes=_notes(size))


def _notes(size: Size) -> tuple[str, ...]:
    steps, hosts = LOAD[size]
    return (
        f"nats a token on text that no run saw, all after {STEPS[size]} steps on the same tokens; a row is routed by "
        "its first half, of whose rest the loss is; routed as trained: by all of it, of all of it",
        "the kinds are learnt of a third of the text without labels; prose, code and tables are .5, .3 and .2 of it, "
        "and of the losses by share",
        "variants: 2 layers shared, then one of 4 experts of 2 layers; a token passes 4 layers, as in dense; apart: "
        "four dense models, each of the rows of a kind, which share the steps; large: 10 layers, so 2.5 times the work",
        f"load: {hosts} hosts, {steps} steps of {2 * hosts} microbatches, rebalance.mode = auto; in its second half "
        "the most microbatches of a host of experts over the mean, beside the best that so many hosts allow, and how "
        "many moved in that half",
        "of several seeds the worst ratio, and the mean of bytes",
    )
