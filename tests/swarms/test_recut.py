"""A run goes on with other stages from a checkpoint: with the same model, from the same place in its text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from peers.checkpoints.writer import keep_run
from peers.founding_files import Founded, resume_run
from peers.home.run_directory import RunDirectory
from peers.options.foundation import Foundation
from swarm.config import Manifest
from swarm.events import DigestMismatch
from swarm.ids import PartName
from swarm.models.layout import install_weights
from swarm.models.registry import family_of
from swarm.state.checkpoints.files import read_manifest, step_directory
from swarm.state.checkpoints.parts import load_part, load_weights
from swarm.state.checkpoints.recut import whole_model
from tests.harness.swarm import VOCAB, LocalSwarm

CUT_AT, LAST, LAYERS = 3, 6, 6


def swarm_of(root: Path, kept: Path, hosts: int, *, goes_on: Founded | None = None, **sections: Any) -> LocalSwarm:
    """All its peers keep the run in one directory."""
    names = ("bootstrap", "trainer-0", *(f"host-{number}" for number in range(hosts)))
    sites: dict[str, dict[str, Any]] = {name: {"run_directory": kept, "checkpoint_every": CUT_AT} for name in names}
    root.mkdir()
    run = {"steps": LAST, "start_when": {"stage_hosts": hosts, "trainers": 1}, "copies": 0, **sections.pop("run", {})}
    if goes_on is not None:
        sites["bootstrap"]["resume"] = CUT_AT
    swarm = LocalSwarm(root, hosts=hosts, sites=sites, run=run, model={"layers": LAYERS}, **sections)
    if goes_on is not None:
        swarm.manifest = goes_on.manifest
    return swarm


async def cut_anew(tmp_path: Path, before: int, sizes: str, **sections: Any) -> tuple[LocalSwarm, LocalSwarm, Founded]:
    """A run that came to its end, and one that goes on from its middle, to the end."""
    kept, hosts = tmp_path / "before", sizes.count(",") + 1
    split = {"stages": before, **sections.pop("split", {})}
    first = swarm_of(tmp_path / "first", kept, before, split=split, **sections)
    await first.run()
    keep_run(RunDirectory(kept), first.manifest, {"tokenizer.json": first.tokenizer})
    checkpoint = step_directory(RunDirectory(kept).checkpoints, CUT_AT)
    foundation = Foundation(file=checkpoint, resume=True, layers_per_stage=sizes, hosts=hosts)
    founded = resume_run(foundation, tmp_path / "home")
    assert founded.resumed is not None
    second = swarm_of(tmp_path / "second", founded.resumed.directory.root, hosts, goes_on=founded)
    await second.run()
    assert not first.events(DigestMismatch) + second.events(DigestMismatch)
    return first, second, founded


def held_out(manifest: Manifest, root: Path, step: int) -> tuple[float, int]:
    """Loss of a checkpoint's model on text that nobody trained on."""
    family = family_of(manifest.model)
    module = family.build(family.whole)
    install_weights(module, load_weights(root, step))
    tokens = torch.randint(VOCAB, (8, 17), generator=torch.Generator().manual_seed(5))
    return module.evaluate(tokens[:, :-1], tokens[:, 1:])


@pytest.mark.parametrize(("before", "sizes"), [(2, "2,2,1,1"), (4, "3,3"), (3, "1,4,1")])
async def test_run_goes_on_with_other_stages_where_it_was(before: int, sizes: str, tmp_path: Path) -> None:
    """Reproducible, so that what it does next is what it would have done, but for how norms are added up."""
    first, second, founded = await cut_anew(tmp_path, before, sizes, run={"reproducible": True})
    assert founded.resumed is not None
    old, new = RunDirectory(tmp_path / "before").checkpoints, founded.resumed.directory.checkpoints
    assert whole_model(old, read_manifest(old, CUT_AT)).digest == whole_model(new, read_manifest(new, CUT_AT)).digest
    assert held_out(first.manifest, old, CUT_AT) == held_out(founded.manifest, new, CUT_AT)
    begun, *closed = second.history()
    parent = next(record for record in first.history() if record["step"] == CUT_AT)
    assert (begun["step"], begun["committed"], begun["cursors"]) == (CUT_AT, [], parent["cursors"])
    assert founded.manifest.run.parent is not None
    assert begun["previous"] == founded.manifest.run.parent.record
    assert [record["step"] for record in closed] == list(range(CUT_AT + 1, LAST + 1))
    would = {record["step"]: record for record in first.history()}
    for record in closed:
        fed = [sorted(str(one["microbatch"]) for one in each["committed"]) for each in (record, would[record["step"]])]
        assert fed[0] == fed[1]
        assert record["loss_sum"] == pytest.approx(would[record["step"]]["loss_sum"], rel=1e-6)
    assert held_out(founded.manifest, new, LAST) != held_out(founded.manifest, new, CUT_AT)
    assert held_out(founded.manifest, new, LAST)[0] == pytest.approx(held_out(first.manifest, old, LAST)[0], rel=1e-5)


@pytest.mark.parametrize(
    "sections",
    [
        {"optimizer": {"name": "muon"}},
        {"optimizer": {"name": "sgd"}},
        {"optimizer": {"name": "adafactor"}},
        {"averaging": {"mode": "local", "local": {"steps": 2, "fragments": 2}}},
        {"split": {"ends": "hosted"}},
    ],
    ids=["muon", "sgd", "adafactor", "local", "hosted"],
)
async def test_every_kind_of_state_is_cut(sections: dict[str, Any], tmp_path: Path) -> None:
    """With what each keeps next to the weights: matrices' momentum, anchors and the outer optimizer's momentum."""
    _, second, founded = await cut_anew(tmp_path, 2, "1,5", **sections)
    assert founded.resumed is not None
    before = whole(RunDirectory(tmp_path / "before").checkpoints)
    after = whole(founded.resumed.directory.checkpoints)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert any(bool(tensor.any()) for (_, vector), tensor in after.items() if vector != "params")
    assert [record["step"] for record in second.history()] == list(range(CUT_AT, LAST + 1))


def whole(root: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Every tensor in every vector of the step that is cut."""
    found: dict[tuple[str, str], torch.Tensor] = {}
    for part in read_manifest(root, CUT_AT).parts:
        snapshot = load_part(root, CUT_AT, PartName(part))
        for name, vector in zip(snapshot.layout.vectors, snapshot.vectors, strict=True):
            found |= {(key, name): view for key, view in snapshot.layout.kept_in(name).views(vector).items()}
    return found
