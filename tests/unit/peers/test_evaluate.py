from __future__ import annotations

from pathlib import Path

import pytest

from data_shards.tokenize import tokenizer_digest, train_tokenizer
from peers.commands.evaluate import Sampling, load_checkpoint, sample_text
from peers.console.words import CommandError
from peers.home.run_directory import RunDirectory
from peers.manifest_file import write_manifest
from swarm.config import Manifest, RunConfig, StartWhen, TokenizerConfig
from swarm.errors import StateError
from tests.harness.fake_swarm import write_checkpoints
from tests.harness.rigs.peers import TEXT

RUN = RunConfig(steps=3, start_when=StartWhen(stage_hosts=2, trainers=1))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A finished run with checkpoints of steps 0 and 3."""
    directory = RunDirectory(tmp_path)
    tokenizer_json = train_tokenizer([TEXT], 2048)
    directory.tokenizer.write_bytes(tokenizer_json)
    named = TokenizerConfig(digest=tokenizer_digest(tokenizer_json))
    write_manifest(Manifest(run=RUN, tokenizer=named), directory.manifest)
    write_checkpoints(tmp_path)
    return directory


def _tear(run: RunDirectory, step: int) -> Path:
    path = run.checkpoints / f"step-{step:08d}" / "stage-0.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    return path


def test_checkpoint_newest_torn_is_passed_over_aloud(run: RunDirectory) -> None:
    whole = load_checkpoint(run)
    assert (whole.step, whole.passed_over) == (3, None)
    torn = _tear(run, 3)
    older = load_checkpoint(run)
    assert older.step == 0
    assert older.passed_over is not None
    assert str(torn) in older.passed_over
    assert len(sample_text(older, Sampling(prompt="The", tokens=3))) > 0


def test_checkpoint_asked_for_by_step_and_torn_names_the_file_and_the_remedy(run: RunDirectory) -> None:
    torn = _tear(run, 3)
    with pytest.raises(StateError, match="Use the step before it, or copy the damaged file") as caught:
        load_checkpoint(run, 3)
    assert str(torn) in str(caught.value)


def test_checkpoint_all_torn_says_so(run: RunDirectory) -> None:
    for step in (0, 3):
        _tear(run, step)
    with pytest.raises(StateError, match="no checkpoint is complete"):
        load_checkpoint(run)


def test_checkpoint_whose_parts_are_elsewhere_names_them_and_where_they_belong(run: RunDirectory) -> None:
    for step in (0, 3):
        for part in ("stage-1", "ends"):
            (run.checkpoints / f"step-{step:08d}" / f"{part}.safetensors").unlink()
    with pytest.raises(
        CommandError, match="no step is complete here: the newest, step 3 lacks stage-1 and ends"
    ) as newest:
        load_checkpoint(run)
    assert str(run.checkpoints / "step-00000003") in newest.value.check
    assert f"ckpt pull {run.root} --from A --from B" in newest.value.next
    with pytest.raises(CommandError, match="step 0 lacks stage-1 and ends here"):
        load_checkpoint(run, 0)


def test_checkpoint_newest_lacks_a_part_that_is_said_beside_the_older_one(run: RunDirectory) -> None:
    (run.checkpoints / "step-00000003" / "stage-1.safetensors").unlink()
    older = load_checkpoint(run)
    assert (older.step, older.passed_over) == (0, "step 3, which lacks stage-1 here")


def test_checkpoint_of_another_run_is_refused(run: RunDirectory) -> None:
    text = run.manifest.read_text()
    run.manifest.write_text(text.replace("steps = 3", "steps = 4"))
    with pytest.raises(StateError, match="belongs to run"):
        load_checkpoint(run)


def test_tokenizer_missing_says_where_to_get_it(run: RunDirectory) -> None:
    run.tokenizer.unlink()
    with pytest.raises(StateError, match="Copy it from another peer"):
        load_checkpoint(run)
