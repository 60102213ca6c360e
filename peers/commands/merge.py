"""``swarm merge``: models that sites trained apart from one base, as one model that transformers loads.

Without calibration each tensor is the mean of the sites' by preference, and two models' parts are in memory at a time.
With a text of each site's kind what each tensor of each site weighs is learnt, with all models in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data_shards.documents import rows_of
from data_shards.shard import Shard
from peers.checkpoints.choose_checkpoint import ChosenStep, choose_step, run_tokenizer
from peers.checkpoints.named import BASE, SITE, NamedStep
from peers.checkpoints.recut import decided_by
from peers.commands.evaluate import MAX_ROWS, ROWS_AT_ONCE
from peers.commands.export import ExportContent, Exported, export, part_weights
from peers.console.interrupt import check
from peers.console.lasting import Told
from peers.console.words import count, listed
from peers.data.building import build_from_files
from peers.data.tokenizer_files import run_encoding
from swarm.consensus.records import CloseRecord
from swarm.device import free_memory
from swarm.disk import size_text
from swarm.errors import ConfigError, StateError
from swarm.models.family import ModelFamily, PartModule
from swarm.models.layout import install_weights, state_of
from swarm.models.lora import LoraFamily
from swarm.models.merging import STEPS, Shares, TextRows, add_share, learn, learning_bytes, linear, weighed
from swarm.models.registry import family_of, lora_of
from swarm.models.spec import DType, PartSpec
from swarm.state.checkpoints.files import read_manifest, steps
from swarm.state.checkpoints.proof import proof_in

CALIBRATE = "--calibrate"
RUN, COMMON = 32, 0.1
"""So many tokens in a row are no accident, unless it is little of a text: a licence, or how a file begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedSite:
    """A site's checkpoint, what it counts for (above 0), and a text of its kind where there is one."""

    chosen: ChosenStep
    weight: float
    text: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Merging:
    """A base, and the sites that went on from it: their weights are 1 together."""

    base: ChosenStep
    sites: tuple[MergedSite, ...]

    @property
    def models(self) -> tuple[ChosenStep, ...]:
        """Return the base and the sites' checkpoints."""
        return self.base, *(site.chosen for site in self.sites)

    def linear(self) -> Shares:
        """Return what each model weighs by preference alone."""
        family = plain_family(self.base)
        return linear(state_of(family.build(family.whole)), [site.weight for site in self.sites])


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """What the models of a merging weigh in each tensor, and the loss on the calibration text by preference, in nats a
    token: of the linear merge, and of the learnt one."""

    shares: Shares
    linear: float
    learnt: float


def plain_family(chosen: ChosenStep) -> ModelFamily:
    """Return the family of a run's whole model, with adapters added to its weights."""
    family = family_of(chosen.manifest.model)
    return family.inner if isinstance(family, LoraFamily) else family


# --- what is merged ---------------------------------------------------------------------------------------------------


def merging_of(base: NamedStep, sites: Sequence[tuple[NamedStep, float]], texts: Sequence[Path]) -> Merging:
    """Return what is merged of a base and sites with their weights, with a text for each of these or none. A site of
    weight 0 is checked, and no part of it.

    Raises:
        ConfigError: No such step, models that do not fit together, a site of which nothing here shows that it went on
            from the base, or too few texts or too many.
        CommandError: Parts of a checkpoint are not on this machine.
        StateError: A checkpoint is damaged.
    """
    if texts and len(texts) != len(sites):
        allowed = f"a text for each of {count(len(sites), 'site')}, in their order"
        raise ConfigError(CALIBRATE, len(texts), allowed, f"Name one for each {SITE}, or none.")
    first = _chosen(base)
    found = [
        MergedSite(chosen=_chosen(named), weight=weight, text=text)
        for (named, weight), text in zip(sites, texts or (None,) * len(sites), strict=True)
    ]
    for site in found:
        _check_fits(first, site.chosen)
    return Merging(base=first, sites=tuple(site for site in found if site.weight))


def _chosen(named: NamedStep) -> ChosenStep:
    try:
        chosen = choose_step(named.directory, named.step)
    except ConfigError as error:
        if error.key != "--step":
            raise
        raise ConfigError(
            named.key, named.words, f"a step that is here, {error.allowed}", "Or leave out @STEP."
        ) from None
    if chosen.manifest.split.variants:
        raise ConfigError(named.key, named.words, "a run whose stages have no variants", "Leave it out.",
                          why="it is several models")  # fmt: skip
    return chosen


def _check_fits(base: ChosenStep, site: ChosenStep) -> None:
    shown = f"{site.directory.root}@{site.step}"
    if plain_family(site).export_config() != plain_family(base).export_config():
        raise ConfigError(SITE, shown, f"a model of the shape of the base, {plain_family(base).described}",
                          "Merge checkpoints of runs that began with one model.")  # fmt: skip
    if site.manifest.tokenizer.digest != base.manifest.tokenizer.digest:
        raise ConfigError(SITE, shown, f"the base's tokenizer, {base.manifest.tokenizer.digest[:12]}",
                          "Merge checkpoints of runs that began with one model.")  # fmt: skip
    if not went_on_from(base, site):
        at = decided_by(proof_in(base.record, base.manifest.run_id).record)
        raise ConfigError(
            SITE, shown, f"a run that went on from record {at[:12]}, step {base.step} of {base.manifest.run.name}",
            f"Name the checkpoint that all sites began with: {BASE} RUN@STEP",
            why=_began_with(site),
        )  # fmt: skip


def went_on_from(base: ChosenStep, site: ChosenStep) -> bool:
    """Return whether a site's directory shows that its run began with the base: its manifest names the record that
    decided the base's state, or among its checkpoints is that very state."""
    state, parent = proof_in(base.record, base.manifest.run_id).record, site.manifest.run.parent
    if parent is not None and parent.record == decided_by(state):
        return True
    lora, of_base = lora_of(site.manifest.model), lora_of(base.manifest.model)
    if lora is not None and of_base is not None and lora.digests != of_base.digests:  # adapters begin alike everywhere
        return False
    return any(record.digests == state.digests for record in _records(site))


def _records(site: ChosenStep) -> Iterator[CloseRecord]:
    """The records of a site's checkpoints up to its own, as far as they can be read."""
    for step in steps(site.directory.checkpoints):
        if step <= site.step:
            with contextlib.suppress(StateError):
                yield proof_in(read_manifest(site.directory.checkpoints, step), site.manifest.run_id).record


def _began_with(site: ChosenStep) -> str:
    parent = site.manifest.run.parent
    if parent is not None:
        return f"it went on from record {parent.record[:12]}, step {parent.step} of run {parent.run[:12]}"
    return f"none of its checkpoints of steps {listed(list(map(str, steps(site.directory.checkpoints))))} is that state"


# --- learning what each model weighs ----------------------------------------------------------------------------------


def calibrate(merging: Merging, device: torch.device, told: Told) -> Calibrated:
    """Learn what each tensor of each site weighs, of a merging of several sites that have texts. Where that gives no
    lower loss on these than the preference itself, it stays at that.

    Raises:
        ConfigError: A text cannot be used, or is known to be in a site's shard; or memory does not suffice.
        StateError: A checkpoint is damaged, or a loss is not a number.
    """
    family = plain_family(merging.base)
    model = family.build(family.whole)
    needed = learning_bytes(sum(tensor.numel() for tensor in state_of(model).values()), len(merging.sites))
    if needed > (free := free_memory(device)):
        why = f"{count(len(merging.models), 'model')} take {size_text(needed)} with what is learnt, "
        why += f"and {size_text(free)} are free on {device}"
        remedy = f"Leave {CALIBRATE} out: that takes a part of two models. Or use another --device or machine."
        raise ConfigError(CALIBRATE, family.described, "a machine with more memory", remedy, why=why)
    texts = [_rows(merging, site.text, device) for site in merging.sites if site.text is not None]
    models = [{name: tensor.to(device) for name, tensor in _tensors(one, None).items()} for one in merging.models]
    weights = [site.weight for site in merging.sites]

    def loss(shares: Shares) -> float:
        install_weights(model, weighed(models, shares))
        return sum(weight * _loss(model, text) for weight, text in zip(weights, texts, strict=True))

    def step(number: int) -> None:
        check()
        told("learning what each tensor weighs, steps", number, STEPS)

    plain = merging.linear()
    learnt = learn(model, models, weights, texts, step)
    found = Calibrated(shares=learnt, linear=loss(plain), learnt=loss(learnt))
    return found if found.learnt < found.linear else dataclasses.replace(found, shares=plain)


def _rows(merging: Merging, path: Path, device: torch.device) -> TextRows:
    """A text as the first site's run would read it. Raises ConfigError also where it is known to be trained on."""
    first = merging.sites[0].chosen
    manifest = first.manifest
    encoding = run_encoding(run_tokenizer(first)[0], manifest.tokenizer, key=CALIBRATE)
    with tempfile.TemporaryDirectory(prefix="swarm-merge-") as scratch:
        built = Path(scratch) / "shard"
        build_from_files([path], built, encoding)
        shard = Shard.open(built)
        for site in merging.sites:
            if what := _trained_on(site.chosen, shard):
                raise ConfigError(CALIBRATE, str(path), "text that no site trained on", "Name other text.",
                                  why=f"{site.chosen.manifest.run.name} has trained on {what}")  # fmt: skip
        rows = rows_of(shard, manifest.model.context, manifest.batch.packing)
        rows.require(1)
        read = rows.read(np.linspace(0, rows.count - 1, min(rows.count, MAX_ROWS)).astype(int).tolist())
        positions = None if read.positions is None else torch.from_numpy(read.positions).to(device)
        return TextRows(torch.from_numpy(read.inputs).to(device), torch.from_numpy(read.targets).to(device), positions)


def _trained_on(site: ChosenStep, text: Shard) -> str:
    """Return what of a text is in a site's shard, "" where nothing here says that any is: records name shards by
    digest, and those of a run on this machine lie in its directory."""
    if text.manifest.digest[:16] in {one.microbatch.shard for record in _records(site) for one in record.committed}:
        return "the whole of it"
    size = text.manifest.tokens
    tokens = np.asarray(text.tokens, dtype=np.uint32)
    runs = {one.tobytes() for one in np.lib.stride_tricks.sliding_window_view(tokens, RUN)} if size >= RUN else set()
    for path in sorted(site.directory.shard(0).parent.glob("trainer-*")):
        shared = len(runs.intersection(_blocks(Shard.open(path)))) * RUN / size
        if shared > COMMON:
            return f"at least {min(shared, 1.0):.0%} of it"
    return ""


def _blocks(shard: Shard) -> Iterator[bytes]:
    """A shard's tokens, RUN at a time: wherever a text lies in it, some are runs of the text."""
    for first in range(0, shard.manifest.tokens - RUN + 1, RUN):
        yield np.asarray(shard.tokens[first : first + RUN], dtype=np.uint32).tobytes()


@torch.no_grad()
def _loss(model: PartModule, text: TextRows) -> float:
    """Nats a token."""
    total, counted = 0.0, 0
    for first in range(0, len(text.inputs), ROWS_AT_ONCE):
        check()
        some = text.take(slice(first, first + ROWS_AT_ONCE))
        targets = int((some.targets >= 0).sum())
        total += some.loss(model).item() * targets
        counted += targets
    if not np.isfinite(total):
        raise StateError("the loss on the calibration text is not a number: a model diverged")
    return total / counted


# --- the merged model -------------------------------------------------------------------------------------------------


def merge(
    merging: Merging, calibrated: Calibrated | None, into: Path, dtype: DType, told: Callable[[str], None]
) -> Exported:
    """Write the merged model into a new or empty directory, as :func:`~peers.commands.export.export` does, part by part
    as the first site's run is cut."""
    shares = merging.linear() if calibrated is None else calibrated.shares
    facts = {"base": _described(merging.base)}
    for number, site in enumerate(merging.sites, 1):
        scales = sorted(found[number] for found in shares.values())
        learnt = f"; its tensors weigh {scales[0]:.2f} to {scales[-1]:.2f}" if scales[0] < scales[-1] else ""
        facts[f"site {number}"] = f"{_described(site.chosen)}, preference {site.weight:g}{learnt}"
    content = ExportContent(
        weights=partial(_merged_part, merging, shares),
        title=" and ".join(site.chosen.manifest.run.name for site in merging.sites) + ", merged",
        origin="A language model merged of those that sites trained apart from one base with swarm.",
        facts=facts,
    )
    return export(merging.sites[0].chosen, into, dtype, told, content)


def _described(chosen: ChosenStep) -> str:
    return f"step {chosen.step} of `{chosen.manifest.run.name}`, id `{chosen.manifest.run_id}`"


def _merged_part(merging: Merging, shares: Shares, spec: PartSpec) -> dict[str, Tensor]:
    """The tensors of a part of the first site's cut, of all models that weigh anything in it."""
    names = frozenset(state_of(plain_family(merging.sites[0].chosen).build(spec)))
    total = dict[str, Tensor]()
    for number, chosen in enumerate(merging.models):
        if any(shares[name][number] for name in names):
            add_share(total, _tensors(chosen, names), shares, number)
    return total


def _tensors(chosen: ChosenStep, names: frozenset[str] | None) -> dict[str, Tensor]:
    """Return tensors of a checkpoint by name, all without ``names``: with those, and one part, in memory."""
    plain, found = plain_family(chosen), dict[str, Tensor]()
    for spec in chosen.specs:
        there = state_of(plain.build(spec)).keys()
        if names is None or names & there:
            check()
            weights = part_weights(chosen, spec)
            found |= {name: weights[name] for name in there if names is None or name in names}
    return found
