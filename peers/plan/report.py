"""A plan as plain data for scripts, and as lines for people. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from peers.console.words import amount, count, listed
from swarm.disk import size_text
from swarm.planning.alternatives import (
    DEVICES,
    AloneForecast,
    BytesForecast,
    SliceForecast,
    TensorForecast,
    alone,
    carried,
    mfu,
    slices,
    tensors,
)
from swarm.planning.predict import CLOSING_ROUND_TRIPS, UPDATE_S, PartForecast, StepForecast, predict
from swarm.planning.workload import PeerClass, Workload

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What was found for one run: the best plan, others, and what the manifest's own cut gives (``asked``, None where
    it does not fit). ``kinds`` is how much text there is of each, where that is known; ``delink_at`` the step with
    which stages that share their layers part: the plans are of the steps after it."""

    title: str
    work: Workload
    classes: Sequence[PeerClass]
    plans: Sequence[StepForecast]
    asked: StepForecast | None
    peers_from: str
    kinds: tuple[float, ...] = ()
    delink_at: int = 0

    @property
    def carried(self) -> BytesForecast:
        """Return what all links carry in a step of the best plan."""
        return carried(self.work, self.best)

    @property
    def at_first(self) -> StepForecast | None:
        """Return a step before stages part, when every host of the best plan serves any of them; None where they share
        nothing, or never part."""
        if not self.delink_at:
            return None
        *hosts, trainers = self.best.layout.places
        layout = replace(self.best.layout, places=(tuple(map(sum, zip(*hosts, strict=True))), trainers))
        return predict(replace(self.work, shared=True), self.classes, layout)

    @property
    def best(self) -> StepForecast:
        """The fastest."""
        return self.plans[0]

    @property
    def alone(self) -> list[AloneForecast]:
        """One machine of each class, by itself."""
        return [alone(self.work, one, self.best) for one in self.classes]

    @property
    def sliced(self) -> SliceForecast:
        """Return what slices of rows would save."""
        return slices(self.best)

    @property
    def cut_tensors(self) -> TensorForecast | None:
        """Return what cutting layers across devices of a peer would give."""
        return tensors(self.work, self.classes, self.best)

    def document(self) -> dict[str, Any]:
        """Return all of it, seconds and bytes, for ``--json``."""
        best, tensor = self.best, self.cut_tensors
        palm, of_peak = mfu(self.work, self.classes, best, self.work.palm_flops)
        binding, following = best.limits[0], best.limits[1]
        return {
            "schema": SCHEMA,
            "model": self.title,
            "peers_from": self.peers_from,
            **_layout(best, self.classes),
            **_figures(best),
            "mfu_palm": palm,
            "mfu_causal": mfu(self.work, self.classes, best, self.work.causal_flops)[0],
            "mfu_of": "peak" if of_peak else "attained",
            **asdict(self.carried),
            "bytes_over_plain": self.carried.over_plain,
            "shared": self._shared(),
            "binding": asdict(binding),
            "next": {**asdict(following), "times": following.rate / binding.rate},
            "manifest": self.keys(),
            "asked": None if self.asked is None else {**_layout(self.asked, self.classes), **_figures(self.asked)},
            "others": [{**_layout(one, self.classes), **_figures(one)} for one in self.plans[1:4]],
            "alone": [
                {**asdict(one), "step_s": one.step_s if math.isfinite(one.step_s) else None, "worth_it": one.worth_it}
                for one in self.alone
            ],
            "slices": {**asdict(self.sliced), "worth_it": self.sliced.worth_it},
            "tensors": None if tensor is None else {**asdict(tensor), "worth_it": tensor.worth_it},
        }

    def _shared(self) -> dict[str, Any] | None:
        """Return what a step takes before stages part; None where :attr:`at_first` is."""
        if (at_first := self.at_first) is None:
            return None
        sent = carried(replace(self.work, shared=True), at_first)
        return _figures(at_first) | asdict(sent) | {"bytes_over_plain": sent.over_plain, "until_step": self.delink_at}

    def keys(self) -> dict[str, Any]:
        """Return the keys of a manifest that has the best plan's cut."""
        layout = self.best.layout
        batch = {"microbatch_size": layout.rows, "microbatches_per_step": self.best.microbatches}
        return {"split": {"stages": len(layout.stages), "layers_per_stage": list(layout.stages)}, "batch": batch}

    # --- lines -------------------------------------------------------------------------------------------------------

    def lines(self) -> Iterator[str]:
        """Yield the plan for people."""
        best, work = self.best, self.work
        layout, binding = best.layout, best.limits[0]
        yield f"{self.title}; {count(sum(one.count for one in self.classes), 'peer')} of {self.peers_from}"
        yield from _table(best, self.classes)
        again = "computed again in the backward" if layout.recompute else "kept for the backward"
        yield f"microbatch   {count(layout.rows, 'row')}, {best.microbatches} a step; activations are {again}"
        yield (f"step         {_time(best.step_s)}: {best.tokens_s:,.0f} tokens/s"
               f"{_as_they_come(best)}")  # fmt: skip
        palm, of_peak = mfu(work, self.classes, best, work.palm_flops)
        causal, _ = mfu(work, self.classes, best, work.causal_flops)
        of = "of the devices' peak" if of_peak else "of what the devices attain in a block: no peak is given"
        yield f"MFU          {palm:.1%} as PaLM counts, {causal:.1%} with causal attention; {of}"
        distances = [f"{one.name} ({one.rate / binding.rate:.2f} times as much)" for one in best.limits[1:2]]
        yield f"bound by     {binding.name}: {binding.rate:.3g} microbatches/s; next {distances[0]}"
        yield from self._parts_beside()
        if self.asked is None:
            yield "as asked     the cut of the manifest does not fit these peers"
        elif self.asked.layout != layout:
            yield f"as asked     {_time(self.asked.step_s)} a step with the manifest's own cut and microbatches"
        yield from self._beside()
        sizes = "" if len(set(layout.stages)) == 1 else f", layers_per_stage = {list(layout.stages)}"
        yield f"RUN.toml     split = {{ stages = {len(layout.stages)}{sizes} }}"
        yield (f"             batch = {{ microbatch_size = {layout.rows}, "
               f"microbatches_per_step = {best.microbatches} }}")  # fmt: skip

    def _parts_beside(self) -> Iterator[str]:
        """Yield what variants and sharing ask for and cost, where there are any."""
        work, at_first = self.work, self.at_first
        if not work.loads and not work.alike:
            return
        bytes_, one = self.carried, "a part for each stage"
        if work.loads:
            one, hosts = "one variant a stage", len(self.best.parts) - 1
            origin = self.peers_from.partition(" (")[0]
            how = f"text of each kind as {origin} says" if self.kinds else "as much text of each kind"
            yield f"hosts        {hosts} at least, one for each variant of each stage; loads are for {how}"
        elif at_first is None:
            yield "hosts        1 at least: any of them serves every stage, to the end"
        else:
            pace = f"{_time(at_first.step_s)} a step, {at_first.tokens_s:,.0f} tokens/s"
            yield f"shared       until step {self.delink_at} any host serves every stage: {pace}; the rest is after it"
            stages = len(self.best.layout.stages)
            yield f"hosts        1 at least before that step, {stages} from it on, one for each stage"
            bytes_, one = carried(replace(work, shared=True), at_first), "stages that have parted"
        yield (f"bytes        {size_text(bytes_.step_bytes)} a step over all links, {bytes_.over_plain:.3f} times as"
               f" much as with {one} and these hosts")  # fmt: skip

    def _beside(self) -> Iterator[str]:
        alone_s = [one for one in self.alone if one.way != "none"]
        if not alone_s:
            yield "alone        no machine has memory for the whole model"
        else:
            quickest = min(alone_s, key=lambda one: one.step_s)
            swaps = ", its stages in turns on the device" if quickest.way == "swap" else ""
            faster = (
                "faster than the swarm: train there, with --role all"
                if quickest.step_s < self.best.step_s
                else "slower"
            )
            yield f"alone        {quickest.name}: {_time(quickest.step_s)} a step{swaps}: {faster}"
        if thin := [one.name for one in alone_s if one.worth_it]:
            yield f"links        too thin for a pipeline at {listed(thin)}: hold every part there, with --role all"
        sliced = self.sliced
        fewer = f"microbatches of a step at a replica {sliced.under_way}, 4K = {sliced.enough}"
        pays = f"would save {_time(sliced.saves_s)} a step" if sliced.worth_it else "would not pay"
        yield f"slices       of rows (TeraPipe; no mode of this version) {pays}: {fewer}"
        if (tensor := self.cut_tensors) is not None:
            better = "pays: one layer a stage is the finest cut" if tensor.worth_it else "cut layers first"
            yield (f"tensors      across {DEVICES} devices of a peer (--device cuda:0+cuda:1): "
                   f"{_time(tensor.tensor_s)} a microbatch at {tensor.stage} for {_time(tensor.whole_s)} on one, "
                   f"{_time(tensor.between_s)} of it between them; by layers {_time(tensor.whole_s / DEVICES)} at "
                   f"each: {better}")  # fmt: skip

    def explained(self) -> Iterator[str]:
        """Yield each formula with its numbers."""
        best, work = self.best, self.work
        rows, each = best.layout.rows, f"({work.activation_bytes:,.0f} + {work.gradient_bytes:,.0f})"
        yield ""
        for at, part in enumerate(best.parts):
            yield from self._part_explained(at, part)
        yield (
            f"crossing   rows x (activation + gradient) = {rows} x {each} ="
            f" {rows * (work.activation_bytes + work.gradient_bytes):,.0f} bytes each way at a host, and at a trainer"
        )
        yield from (f"limit      {limit.name}: {limit.rate:.4g} microbatches/s" for limit in best.limits)
        yield f"filling    of a journey ({_time(best.journey_s)}), until all work = {_time(best.filling_s)}"
        yield (
            f"feeding    microbatches / rate = {best.microbatches} / {best.rate:.4g} ="
            f" {best.microbatches / best.rate:.4g} s; in whole ones at each replica {_time(best.feeding_s)}"
        )
        yield f"averaging  the longest of 2 x bytes x P x (R - 1) / (R x bandwidth) = {_time(best.averaging_s)}"
        yield f"update     {UPDATE_S * 1e9:g} ns a parameter of the largest part = {_time(best.update_s)}"
        yield f"closing    {CLOSING_ROUND_TRIPS} round trips = {_time(best.closing_s)}"
        seconds = (best.filling_s, best.feeding_s, best.averaging_s, best.update_s, best.closing_s)
        added = " + ".join(f"{one:.4g}" for one in seconds)
        yield f"step       {added} = {best.step_s:.4g} s for {best.tokens:,} tokens"
        yield (
            "MFU        tokens/s x operations a token / sum of devices; PaLM: 6 x N + 12 x L x D x T ="
            f" {work.palm_flops:.4g}, causal {work.causal_flops:.4g}"
        )
        yield f"available  {best.available:.4f} of the pace on average, while peers that left are replaced"
        for one in self.alone:
            yield (
                f"alone      {one.name} ({one.way}) pays if c/tx = {one.crossing:.3g} < min(1, g x c/swap ="
                f" {one.hidden:.3g}), and 4A x m > 8(P_model - P_stage): {'yes' if one.less_sent else 'no'}"
            )

    def _part_explained(self, at: int, part: PartForecast) -> Iterator[str]:
        layout, memory, needs = self.best.layout, part.memory, part.needs
        times, tokens = 4 if layout.recompute and part.layers else 3, layout.rows * self.work.context
        passes = "" if part.load == 1 else f", of which {part.load:.3g} pass it"
        yield (
            f"{part.name:<10} {times} x {needs.flops:.4g} x {tokens} tokens = {times * needs.flops * tokens:.4g}"
            f" operations a microbatch; computing {part.compute_rate:.4g}, links {part.link_rate:.4g}, each replica"
            f" the slower of both: {part.rate:.4g} microbatches/s{passes}"
        )
        yield (
            f"           memory: training {needs.parameters:,.0f} parameters {_gib(memory.state)},"
            f" {memory.graphs} graphs of {_gib(memory.graph_bytes)}, payloads {_gib(memory.payloads)}, copies"
            f" {_gib(memory.copies)}, the process; {_gib(memory.total)} in all"
        )
        replicas = sum(layout.places[at])
        yield (
            f"           averaging: 2 x {self.work.averaged_bytes:.3g} x {needs.parameters:,.0f} x {replicas - 1} /"
            f" {replicas} / bandwidth = {_time(part.averaging_s)}"
        )


def _layout(one: StepForecast, classes: Sequence[PeerClass]) -> dict[str, Any]:
    parts = []
    for at, part in enumerate(one.parts):
        here = {cls.name: number for cls, number in zip(classes, one.layout.places[at], strict=True) if number}
        first = sum(one.layout.stages[: part.stage])
        layers = [first, first + part.layers] if part.layers else None
        parts.append({"part": part.name, "layers": layers, "load": part.load, "peers": here,
                      "microbatches_s": part.rate, "link_share": _link_share(one, part),
                      "memory": {**asdict(part.memory), "total": part.memory.total}})  # fmt: skip
    return {"parts": parts, "rows": one.layout.rows, "microbatches": one.microbatches,
            "recompute": one.layout.recompute}  # fmt: skip


def _figures(one: StepForecast) -> dict[str, Any]:
    seconds = ("filling_s", "feeding_s", "averaging_s", "update_s", "closing_s")
    return {"step_s": one.step_s, "tokens_s": one.tokens_s, "available": one.available,
            "seconds": {name.removesuffix("_s"): getattr(one, name) for name in seconds}}  # fmt: skip


def _table(one: StepForecast, classes: Sequence[PeerClass]) -> Iterator[str]:
    loads = any(part.load != 1 for part in one.parts)
    rows = [("part", "layers", *(("load",) if loads else ()), "peers", "memory", "microbatches/s", "link")]
    for at, part in enumerate(one.parts):
        here = [f"{number} x {cls.name}" for cls, number in zip(classes, one.layout.places[at], strict=True) if number]
        first = sum(one.layout.stages[: part.stage])
        layers = f"{first}-{first + part.layers - 1}" if part.layers else "-"
        rows.append((part.name, layers, *((f"{part.load:.3g}",) if loads else ()), listed(here),
                     _gib(part.memory.total), f"{part.rate:.3g}", f"{_link_share(one, part):.0%}"))  # fmt: skip
    resting = [cls.count - sum(here[kind] for here in one.layout.places) for kind, cls in enumerate(classes)]
    if any(resting):
        idle = [f"{number} x {cls.name}" for cls, number in zip(classes, resting, strict=True) if number]
        rows.append(("no place", "-", *(("-",) if loads else ()), listed(idle), "-", "-", "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _link_share(one: StepForecast, part: PartForecast) -> float:
    """Return for which share of the time in which a step is fed the links of a part's replicas carry."""
    return min(1.0, one.rate / part.link_rate) if part.link_rate else 1.0


def _as_they_come(one: StepForecast) -> str:
    if one.available >= 1.0:
        return ""
    return f", {one.available * one.tokens_s:,.0f} as peers come and go"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 1000 else f"{amount(seconds)}s"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"
