"""A run's manifest and tokenizer in its directory: whole, whenever the power fails, and mended where they were not."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from peers.checkpoints import writer as checkpoints
from peers.checkpoints.verify import named_files
from peers.checkpoints.writer import keep_run
from peers.home.run_directory import RunDirectory
from swarm.config import load_manifest
from swarm.errors import ConfigError, StateError
from tests.harness.rigs.peers import BrokenDisk, KeptRun, PowerCut, install, kept_run

FILES = ["LICENSE", "additional_chat_templates/tools.jinja", "run.toml", "tokenizer.json"]


@pytest.fixture(scope="module")
def run() -> KeptRun:
    kept = kept_run()
    kept.beside = {"LICENSE": b"free\n", "additional_chat_templates/tools.jinja": b"{{ tools }}"}
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in kept.beside.items()}
    kept.manifest = kept.manifest.model_copy(update={"files": digests})
    return kept


def keep(run: KeptRun, root: Path) -> RunDirectory:
    directory = RunDirectory(root)
    keep_run(directory, run.manifest, run.files)
    return directory


def usable(run: KeptRun, directory: RunDirectory) -> bool:
    """Whether a checkpoint there could be used."""
    return (
        load_manifest(directory.manifest).run_id == run.manifest.run_id
        and named_files(directory, run.manifest) == run.files
    )


def files(directory: RunDirectory) -> list[str]:
    return sorted(str(path.relative_to(directory.root)) for path in directory.root.rglob("*") if path.is_file())


def test_a_file_of_somebody_elses_is_not_written_over(run: KeptRun, tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("mine")
    with pytest.raises(StateError, match="LICENSE: this file is not the run's, and was not changed"):
        keep(run, tmp_path)
    assert (tmp_path / "LICENSE").read_text() == "mine"


@pytest.mark.parametrize("left", [b"", b"[run]\nname = "], ids=["empty", "half"])
@pytest.mark.parametrize("name", FILES)
def test_a_torn_file_is_mended_by_the_next_peer(run: KeptRun, tmp_path: Path, name: str, left: bytes) -> None:
    directory = keep(run, tmp_path)
    (tmp_path / name).write_bytes(left)
    with pytest.raises((ConfigError, StateError)):
        usable(run, directory)
    keep(run, tmp_path)
    assert usable(run, directory)
    assert files(directory) == FILES


def test_power_that_fails_at_any_call_leaves_each_file_whole_or_away(
    run: KeptRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    for at in range(1, 200):
        directory = RunDirectory(tmp_path / str(at))
        disk = BrokenDisk(at, PowerCut())
        with monkeypatch.context() as patch:
            install(patch, disk)
            try:
                keep_run(directory, run.manifest, run.files)
            except PowerCut:
                calls += 1
        disk.bury()
        if not disk.fired:
            break
        disk.forget(names=False)
        for name, data in run.files.items():
            assert not directory.file(name).exists() or directory.file(name).read_bytes() == data
        assert not directory.manifest.exists() or load_manifest(directory.manifest) == run.manifest
        keep_run(directory, run.manifest, run.files)
        assert usable(run, directory)
    assert calls > 10


def test_what_was_kept_is_on_the_disk(run: KeptRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(tmp_path / "run")
    disk = install(monkeypatch, BrokenDisk())
    keep_run(directory, run.manifest, run.files)
    disk.forget(names=True)
    assert usable(run, directory)


def test_a_disk_that_refuses_is_named(run: KeptRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, pieces: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(checkpoints, "write_whole", refuse)
    with pytest.raises(StateError, match="Check space"):
        keep_run(RunDirectory(tmp_path), run.manifest, run.files)
