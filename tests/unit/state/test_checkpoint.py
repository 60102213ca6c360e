from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from swarm.errors import StateError
from swarm.ids import stage_part
from swarm.models.layout import FlatLayout
from swarm.state.checkpoints.parts import (
    CheckpointManifest,
    flaw,
    held,
    latest,
    load_part,
    load_part_weights,
    load_weights,
    part_path,
    read_manifest,
    step_directory,
    steps,
    verify_part,
    write_manifest,
    write_part,
)
from swarm.state.snapshot import digest
from tests.harness.rigs.state import RUN, snapshot

OTHER = FlatLayout.from_shapes([("c", (2, 2))])


def write_step(root: Path, step: int) -> None:
    parts = [snapshot(step=step), snapshot(step=step, part=stage_part(1), layout=OTHER)]
    for part in parts:
        write_part(root, part, {"run": RUN})
    digests = {part.part: digest(part) for part in parts}
    write_manifest(root, CheckpointManifest(run=RUN, step=step, parts=digests, detail={"cursors": {"a": [0, 3]}}))


def test_checkpoint_round_trip_is_exact(tmp_path: Path) -> None:
    write_step(tmp_path, 12)
    loaded = load_part(tmp_path, 12, stage_part(0), expected_digest=digest(snapshot(step=12)))
    assert digest(loaded) == digest(snapshot(step=12))
    assert load_weights(tmp_path, 12).keys() == {"a", "b", "c"}
    assert read_manifest(tmp_path, 12).detail == {"cursors": {"a": [0, 3]}}
    names = {path.name for path in step_directory(tmp_path, 12).iterdir()}
    assert names == {"stage-0.safetensors", "stage-1.safetensors", "record.json"}


def test_checkpoint_file_is_plain_safetensors_with_the_parameters_names(tmp_path: Path) -> None:
    path = write_part(tmp_path, snapshot(), {"run": RUN})
    tensors = load_file(path)
    assert tensors.keys() == {"a", "b", "exp_avg.a", "exp_avg.b", "exp_avg_sq.a", "exp_avg_sq.b"}
    assert torch.equal(tensors["a"], snapshot().weights["a"])


def test_checkpoint_without_record_does_not_count(tmp_path: Path) -> None:
    assert latest(tmp_path / "absent") is None
    write_step(tmp_path, 1)
    write_part(tmp_path, snapshot(step=2), {})
    assert steps(tmp_path) == (1, 2)
    assert latest(tmp_path) == 1
    with pytest.raises(StateError, match="not completed"):
        load_weights(tmp_path, 2)


@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "record"])
def test_checkpoint_damaged_is_passed_over_with_a_reason(tmp_path: Path, damage: str) -> None:
    write_step(tmp_path, 1)
    write_step(tmp_path, 2)
    path = step_directory(tmp_path, 2) / "stage-1.safetensors"
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        os.truncate(path, path.stat().st_size - 5)
    elif damage == "empty":
        os.truncate(path, 0)
    else:
        path = path.with_name("record.json")
        os.truncate(path, 20)
    assert str(path) in (flaw(tmp_path, 2) or "")
    assert latest(tmp_path) == 1
    with pytest.raises(StateError, match="Use the step before it, or copy the damaged file"):
        load_weights(tmp_path, 2)


def test_checkpoint_with_a_flipped_bit_is_refused_when_loaded(tmp_path: Path) -> None:
    write_step(tmp_path, 1)
    path = step_directory(tmp_path, 1) / "stage-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    with pytest.raises(StateError, match=r"stage-0\.safetensors: the content does not match"):
        load_part(tmp_path, 1, stage_part(0))


def test_weights_alone_are_verified_and_the_moments_not_read(tmp_path: Path) -> None:
    write_step(tmp_path, 1)
    record, path = read_manifest(tmp_path, 1), step_directory(tmp_path, 1) / "stage-0.safetensors"
    weights = load_part_weights(tmp_path, record, stage_part(0))
    assert all(torch.equal(weights[name], tensor) for name, tensor in snapshot(step=1).weights.items())
    whole = path.read_bytes()
    begins = 8 + int.from_bytes(whole[:8], "little")
    for place, damaged in ((-3, False), (begins, True)):
        data = bytearray(whole)
        data[place] ^= 4
        path.write_bytes(data)
        with pytest.raises(StateError, match="the content does not match") if damaged else nullcontext():
            load_part_weights(tmp_path, record, stage_part(0))
    path.write_bytes(whole)
    other = record.model_copy(update={"parts": {"stage-0": "0" * 64}})
    with pytest.raises(StateError, match=r"stage-0\.safetensors: digest"):
        load_part_weights(tmp_path, other, stage_part(0))


def test_checkpoint_of_another_step_part_or_digest_is_refused(tmp_path: Path) -> None:
    write_step(tmp_path, 1)
    with pytest.raises(StateError, match="digest"):
        load_part(tmp_path, 1, stage_part(0), expected_digest="00" * 32)
    step_directory(tmp_path, 1).rename(step_directory(tmp_path, 3))
    with pytest.raises(StateError, match="after step 1"):
        load_part(tmp_path, 3, stage_part(0))
    assert "says step 1" in (flaw(tmp_path, 3) or "")


def test_checkpoint_of_another_history_takes_the_place_of_a_step_and_is_never_mixed_with_it(tmp_path: Path) -> None:
    write_step(tmp_path, 4)
    new = [snapshot(step=4, seed=9), snapshot(step=4, seed=9, part=stage_part(1), layout=OTHER)]
    parts = {part.part: digest(part) for part in new}
    write_manifest(tmp_path, CheckpointManifest(run=RUN, step=4, parts=parts))
    assert held(tmp_path, 4).parts == {}
    write_part(tmp_path, new[0], {"run": RUN})
    assert "digest" in (flaw(tmp_path, 4) or "")
    write_part(tmp_path, new[1], {"run": RUN})
    assert latest(tmp_path) == 4
    assert torch.equal(load_weights(tmp_path, 4)["c"], new[1].weights["c"])


def test_checkpoint_file_of_another_run_does_not_count(tmp_path: Path) -> None:
    write_step(tmp_path, 1)
    write_part(tmp_path, snapshot(step=1), {"run": "cd" * 32})
    assert "it is of run cdcdcdcdcdcd" in (flaw(tmp_path, 1) or "")


def test_checkpoint_state_that_is_not_the_record_s_is_not_written(tmp_path: Path) -> None:
    write_step(tmp_path, 1)
    with pytest.raises(StateError, match="the record says 000000000000"):
        write_part(tmp_path, snapshot(step=1, seed=3), {"run": RUN}, expected_digest="0" * 64)
    assert latest(tmp_path) == 1


def test_verify_part_reads_every_byte_and_says_how_many(tmp_path: Path) -> None:
    write_step(tmp_path, 1)
    path = part_path(tmp_path, 1, stage_part(0))
    record = read_manifest(tmp_path, 1)
    assert verify_part(tmp_path, record, stage_part(0)) == path.stat().st_size
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert flaw(tmp_path, 1) is None, "the header cannot show it"
    with pytest.raises(StateError, match=r"stage-0\.safetensors: the content does not match"):
        verify_part(tmp_path, record, stage_part(0))


def test_checkpoint_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StateError, match="choose another directory"):
        write_part(blocked, snapshot(), {})
    target = step_directory(tmp_path, 0) / "stage-0.safetensors"
    target.mkdir(parents=True)
    with pytest.raises(StateError, match="choose another directory"):
        write_part(tmp_path, snapshot(), {})
    assert list(target.parent.iterdir()) == [target]
