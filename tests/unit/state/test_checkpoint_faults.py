"""Checkpoints on disks that fail, fill up or lose their power, and files whose bits flip."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.disk import write_whole
from swarm.errors import StateError
from swarm.ids import PartName, stage_part
from swarm.models.layout import FlatLayout
from swarm.state.checkpoints.files import SMALL_HEADER_BYTES, read_header
from swarm.state.checkpoints.parts import (
    CheckpointManifest,
    held,
    latest,
    load_part,
    part_path,
    read_manifest,
    step_directory,
    verify_part,
    write_manifest,
    write_part,
)
from swarm.state.snapshot import Snapshot, digest
from tests.harness.rigs.state import RUN, BrokenDisk, PowerCut, install, snapshot

OTHER = FlatLayout.from_shapes([("c", (2, 2))])
OLD, NEW = 1, 2


@pytest.fixture(autouse=True)
def _no_waiting_for_a_real_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, BrokenDisk())


def parts_of(step: int, seed: int) -> list[Snapshot]:
    return [snapshot(step=step, seed=seed), snapshot(step=step, seed=seed, part=stage_part(1), layout=OTHER)]


def write_step(root: Path, step: int, seed: int = 0) -> None:
    parts = parts_of(step, seed)
    digests = {str(part.part): digest(part) for part in parts}
    write_manifest(root, CheckpointManifest(run=RUN, step=step, parts=digests))
    for part in parts:
        write_part(root, part, {"run": RUN}, expected_digest=digests[part.part])


def loads(root: Path, step: int) -> bool:
    """Whether all of it is there to the last bit."""
    record = read_manifest(root, step)
    for part in record.parts:
        verify_part(root, record, PartName(part))
    return held(root, step).complete


def calls_of_a_step(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    with monkeypatch.context() as patch:
        disk = install(patch, BrokenDisk())
        write_step(root, NEW)
    return disk.calls


@pytest.mark.parametrize("lost", ["nothing", "bytes", "names"])
def test_power_cut_after_every_call_leaves_the_old_or_the_new_and_never_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Half of the points end a new step, the other half one that takes the place of another history's."""
    seen = set()
    for replaced in (False, True):
        trial = tmp_path / f"{replaced}"
        write_step(trial, NEW if replaced else OLD)
        calls = calls_of_a_step(trial, monkeypatch)
        assert {"write", "fsync", "replace"} <= set(calls)
        assert len(calls) > 30
        for at in range(1, len(calls) + 1):
            root = tmp_path / f"{replaced}-{at}"
            write_step(root, OLD)
            if replaced:
                write_step(root, NEW, seed=7)
            with monkeypatch.context() as patch:
                disk = install(patch, BrokenDisk(at, PowerCut()))
                with pytest.raises(PowerCut):
                    write_step(root, NEW, seed=0 if not replaced else 8)
            disk.bury()
            assert disk.fired
            if lost != "nothing":
                disk.forget(names=lost == "names")
            assert loads(root, OLD)
            seen.add(_what_is_there(root, replaced))
            write_step(root, NEW, seed=0 if not replaced else 8)
            assert loads(root, NEW), "the next attempt must not stumble over what is left"
    assert {"none", "new"} <= seen
    assert "old" in seen


@pytest.mark.parametrize("lost", ["nothing", "bytes", "names"])
def test_power_cut_after_every_call_leaves_a_file_as_it_was_or_as_it_shall_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    old, new = b"old" * 50, [b"new" * 20, memoryview(b"er" * 30)]
    whole = b"".join(new)
    path, seen = tmp_path / "file", set()
    for at in range(1, 40):
        path.write_bytes(old)
        with monkeypatch.context() as patch:
            disk = install(patch, BrokenDisk(at, PowerCut()))
            try:
                write_whole(path, new)
            except PowerCut:
                disk.bury()
                if lost != "nothing":
                    disk.forget(names=lost == "names")
        if not disk.fired:
            disk.forget(names=True)
            assert path.read_bytes() == whole, "it returned before all of it was on the disk"
            break
        seen.add(path.read_bytes())
    else:
        pytest.fail("it needs more calls than were tried")
    assert seen == {old, whole}


def _what_is_there(root: Path, replaced: bool) -> str:
    """Of the new step: none (incomplete, and known to be), old (another history's) or new."""
    newest = latest(root)
    if newest != NEW:
        assert newest == OLD
        return "none"
    assert loads(root, NEW)
    record = read_manifest(root, NEW)
    if replaced and record.parts["stage-0"] == digest(parts_of(NEW, 7)[0]):
        return "old"
    assert record.parts["stage-0"] == digest(parts_of(NEW, 8 if replaced else 0)[0])
    return "new"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_disk_that_refuses_at_any_call_keeps_what_was_there_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    write_step(tmp_path / "trial", OLD)
    calls = calls_of_a_step(tmp_path / "trial", monkeypatch)
    refused = 0
    for at, name in enumerate(calls, 1):
        if name == "close":
            continue  # the bytes are synced by then
        root = tmp_path / str(at)
        write_step(root, OLD)
        with monkeypatch.context() as patch:
            disk = install(patch, BrokenDisk(at, OSError(code, os.strerror(code))))
            failure = ""
            try:
                write_step(root, NEW)
            except StateError as error:
                failure = str(error)
        assert disk.fired
        if failure:
            refused += 1
            assert os.strerror(code) in failure
            assert str(root) in failure
        assert loads(root, OLD)
        assert latest(root) in (OLD, NEW)
        if name != "unlink":
            assert not list(root.rglob("*.tmp")), f"{name} at {at}"
        write_step(root, NEW)
        assert loads(root, NEW)
    assert refused >= 20


def test_disk_without_room_to_reserve_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_step(tmp_path, OLD)
    calls = calls_of_a_step(tmp_path, monkeypatch)
    shutil.rmtree(step_directory(tmp_path, NEW))
    at = calls.index("posix_fallocate") + 1
    disk = install(monkeypatch, BrokenDisk(at, OSError(errno.EOPNOTSUPP, "not here")))
    write_step(tmp_path, NEW)
    assert disk.fired
    assert loads(tmp_path, NEW)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    if os.geteuid() != 0:
        pytest.fail("marked root")
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.root
def test_disk_really_full_keeps_the_step_before(small_disk: Path) -> None:
    wide = FlatLayout.from_shapes([("w", (100, 100))])  # 120 kB a part
    first = snapshot(step=1, layout=wide)
    record = {"stage-0": digest(first)}
    write_manifest(small_disk, CheckpointManifest(run=RUN, step=1, parts=record))
    write_part(small_disk, first, {"run": RUN})
    second = snapshot(step=2, layout=FlatLayout.from_shapes([("w", (150, 100))]))
    write_manifest(small_disk, CheckpointManifest(run=RUN, step=2, parts={"stage-0": digest(second)}))
    with pytest.raises(StateError, match="No space left on device"):
        write_part(small_disk, second, {"run": RUN})
    assert latest(small_disk) == 1
    assert digest(load_part(small_disk, 1, stage_part(0))) == record["stage-0"]
    assert not list(small_disk.rglob("*.tmp"))


def test_bit_flipped_anywhere_is_found(tmp_path: Path) -> None:
    """One bit of every byte of the record and of a part's length, header and tensors."""
    write_step(tmp_path, OLD)
    record = step_directory(tmp_path, OLD) / "record.json"
    for path in (record, part_path(tmp_path, OLD, stage_part(1))):
        whole = path.read_bytes()
        for place in range(len(whole)):
            changed = bytearray(whole)
            changed[place] ^= 1 << (place % 8)
            path.write_bytes(changed)
            with pytest.raises(StateError, match=path.name.replace(".", r"\.")):
                loads(tmp_path, OLD)
        path.write_bytes(whole)
    assert loads(tmp_path, OLD)


@pytest.mark.parametrize("name", ["record.json", "stage-1.safetensors"])
def test_file_cut_anywhere_is_found_without_reading_the_tensors(tmp_path: Path, name: str) -> None:
    write_step(tmp_path, OLD)
    path = step_directory(tmp_path, OLD) / name
    whole = path.read_bytes()
    # The record's last byte ends the line only.
    for length in range(len(whole) - (name == "record.json")):
        path.write_bytes(whole[:length])
        assert not held(tmp_path, OLD).complete
        assert any(str(path) in trouble for trouble in held(tmp_path, OLD).troubles)
    path.write_bytes(whole + b"\0")
    assert not held(tmp_path, OLD).complete


def test_hostile_header_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    write_step(tmp_path, OLD)
    path = part_path(tmp_path, OLD, stage_part(1))
    for header in (
        b'{"c":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,0]}}',
        b'{"c":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}}',
        b'{"c":{"dtype":"F64","shape":[0],"data_offsets":[0,0]}}',
        b'{"c":{"dtype":"F32","shape":[-1],"data_offsets":[0,0]}}',
        b'{"c":7}',
        b"[1]",
        b"[" * 100_000,
    ):
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(StateError, match="stage-1"):
            load_part(tmp_path, OLD, stage_part(1))
    path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(StateError, match="torn"):
        load_part(tmp_path, OLD, stage_part(1))


def test_header_longer_than_its_file_can_need_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "ends.safetensors"
    length = SMALL_HEADER_BYTES + (1 << 20)
    path.write_bytes(length.to_bytes(8, "little") + b" " * length)
    with pytest.raises(StateError, match=f"torn: {length + 8} bytes with a header of {length}"):
        read_header(path)
