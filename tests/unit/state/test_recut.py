"""A checkpoint cut into other parts has every tensor as it was, or is not made at all."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.errors import StateError
from swarm.ids import ENDS, PartName, stage_part
from swarm.models.gpt_config import GptConfig
from swarm.models.layout import VECTORS, FlatLayout
from swarm.models.registry import family_of
from swarm.models.spec import SplitConfig
from swarm.state.checkpoints import recut as under_test
from swarm.state.checkpoints.parts import CheckpointManifest, load_part, part_path, write_part
from swarm.state.checkpoints.recut import recut, whole_model
from swarm.state.snapshot import Snapshot, digest

STEP = 7
RUN, OTHER = "1a" * 32, "2b" * 32
LAYERS = 6
CUTS = {
    "2 to 4": ((3, 3), (2, 2, 1, 1)),
    "4 to 2": ((2, 2, 1, 1), (3, 3)),
    "3 to 3": ((2, 2, 2), (1, 4, 1)),
    "1 to 6": ((6,), (1,) * 6),
}


def layouts(sizes: Sequence[int], ends: str, vectors: tuple[str, ...] = VECTORS) -> dict[PartName, FlatLayout]:
    """Where the parts of a model's cut have their tensors."""
    family = family_of(GptConfig(vocab_size=300, dim=32, layers=LAYERS, heads=2, context=16))
    split = SplitConfig.model_validate({"stages": len(sizes), "layers_per_stage": tuple(sizes), "ends": ends})
    return {spec.name: family.layout(family.build(spec)).kept_by(vectors) for spec in family.parts(split)}


def keep(root: Path, cut: Mapping[PartName, FlatLayout]) -> CheckpointManifest:
    """A checkpoint of random numbers, which are functions of tensor and vector."""
    parts = {}
    for part, layout in cut.items():
        snapshot = Snapshot.blank(part, STEP, layout)
        for number, vector in enumerate(snapshot.vectors):
            for name, view in layout.views(vector).items():
                generator = torch.Generator().manual_seed(sum(name.encode()) * 8 + number)
                view.copy_(torch.randn(view.shape, generator=generator))
        write_part(root, snapshot, {"run": RUN})
        parts[str(part)] = digest(snapshot)
    return CheckpointManifest(run=RUN, step=STEP, parts=parts)


def tensors(root: Path, record: CheckpointManifest) -> dict[tuple[str, str], Any]:
    found = {}
    for part in map(PartName, record.parts):
        snapshot = load_part(root, STEP, part, expected_digest=record.parts[part])
        for vector, name in zip(snapshot.vectors, snapshot.layout.vectors, strict=True):
            found |= {(key, name): view.clone() for key, view in snapshot.layout.views(vector).items()}
    return found


@pytest.mark.parametrize("ends", ["private", "hosted"])
@pytest.mark.parametrize("cut", CUTS)
def test_recut_keeps_every_bit_and_the_whole_digest(cut: str, ends: str, tmp_path: Path) -> None:
    old, new = CUTS[cut]
    record = keep(tmp_path / "old", layouts(old, ends))
    made, whole = recut(tmp_path / "old", record, tmp_path / "new", OTHER, layouts(new, ends))
    assert (made.run, made.step, list(made.parts)) == (OTHER, STEP, list(map(str, layouts(new, ends))))
    before, after = tensors(tmp_path / "old", record), tensors(tmp_path / "new", made)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key].view(torch.int32), after[key].view(torch.int32)) for key in before)
    assert whole_model(tmp_path / "old", record).digest == whole_model(tmp_path / "new", made).digest == whole
    # Cut back it is the same files' states: nothing of the cut stays in them.
    again, _ = recut(tmp_path / "new", made, tmp_path / "again", RUN, layouts(old, ends))
    assert again.parts == record.parts


def test_whole_digest_sees_each_moment(tmp_path: Path) -> None:
    record = keep(tmp_path, layouts((3, 3), "private"))
    before = whole_model(tmp_path, record).digest
    part = stage_part(1)
    snapshot = load_part(tmp_path, STEP, part)
    snapshot.vectors[2][0] += 1.0
    write_part(tmp_path, snapshot, {"run": RUN})
    changed = record.model_copy(update={"parts": {**record.parts, part: digest(snapshot)}})
    assert whole_model(tmp_path, changed).digest != before


def test_recut_has_one_state_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Snapshot]] = []
    alive: list[int] = []
    blank = Snapshot.blank

    def counted(part: PartName, step: int, layout: FlatLayout) -> Snapshot:
        snapshot = blank(part, step, layout)
        made.append(weakref.ref(snapshot))
        alive.append(sum(one() is not None for one in made))
        return snapshot

    record = keep(tmp_path / "old", layouts((1,) * 6, "private"))
    monkeypatch.setattr(Snapshot, "blank", staticmethod(counted))
    recut(tmp_path / "old", record, tmp_path / "new", OTHER, layouts((1, 2, 3), "private"))
    assert len(made) == 7 + 4 + 4  # read, made, and read back
    assert max(alive) == 1


def test_recut_of_a_damaged_part_makes_nothing(tmp_path: Path) -> None:
    record = keep(tmp_path / "old", layouts((3, 3), "private"))
    path = part_path(tmp_path / "old", STEP, stage_part(1))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StateError, match="stage-1"):
        recut(tmp_path / "old", record, tmp_path / "new", OTHER, layouts((2, 2, 2), "private"))
    assert not (tmp_path / "new").exists()


def test_recut_refuses_files_that_change_under_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed byte after the first pass: the whole digest of what was written tells."""
    record = keep(tmp_path / "old", layouts((3, 3), "private"))
    path, check = part_path(tmp_path / "old", STEP, stage_part(0)), under_test._check_cut
    flipped = []

    def flip(*arguments: Any) -> None:
        check(*arguments)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        flipped.append(path)

    monkeypatch.setattr(under_test, "_check_cut", flip)
    with pytest.raises(StateError, match="the whole model has digest"):
        recut(tmp_path / "old", record, tmp_path / "new", OTHER, layouts((2, 2, 2), "private"))
    assert flipped == [path]


@pytest.mark.parametrize("wrong", ["lost", "twice", "shape", "vectors"])
def test_recut_refuses_parts_of_another_model(wrong: str, tmp_path: Path) -> None:
    record = keep(tmp_path / "old", layouts((3, 3), "private"))
    cut = layouts((2, 2, 2), "private")
    words = {
        "lost": "no part would hold",
        "twice": "too: this model",
        "shape": "but the checkpoint has",
        "vectors": "of one optimizer",
    }
    if wrong == "lost":
        del cut[ENDS]
    elif wrong == "twice":
        cut[stage_part(3)] = cut[stage_part(0)]
    elif wrong == "vectors":
        cut = layouts((2, 2, 2), "private", VECTORS[:2])
    else:
        first = cut[stage_part(0)].shapes
        cut[stage_part(0)] = FlatLayout.from_shapes([(first[0][0], (3, 5)), *first[1:]])
    with pytest.raises(StateError, match=words[wrong]):
        recut(tmp_path / "old", record, tmp_path / "new", OTHER, cut)


def test_whole_model_refuses_a_tensor_that_two_parts_hold(tmp_path: Path) -> None:
    cut = layouts((3, 3), "private")
    record = keep(tmp_path, {**cut, stage_part(2): cut[stage_part(0)]})
    with pytest.raises(StateError, match="stage-0 and stage-2 of step 7 both hold"):
        whole_model(tmp_path, record)
