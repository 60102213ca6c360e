"""What an older or newer wire version left on this machine: refused, with the cause and the next command."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from peers.checkpoints.writer import keep_run
from peers.cli.app import run as swarm
from peers.exit_codes import EXIT_INCOMPATIBLE
from peers.founding_files import load_foundation, make_run
from peers.home.run_directory import RunDirectory
from peers.options.foundation import Foundation
from swarm import WIRE_VERSION
from swarm.config import load_manifest
from swarm.errors import OtherWire
from tests.harness.rigs.peers import KeptRun, kept_run

pytestmark = pytest.mark.usefixtures("elsewhere")

OLDER = WIRE_VERSION - 1


@pytest.fixture
def before(tmp_path: Path, run: KeptRun) -> RunDirectory:
    """A whole checkpoint of a run of before, as a machine keeps it."""
    directory = run.keep(tmp_path / "home" / "runs" / "run of before", 10)
    say(directory.manifest, OLDER)
    return directory


def say(manifest: Path, wire: int) -> None:
    text = manifest.read_text()
    assert f"wire = {WIRE_VERSION}\n" in text
    manifest.write_text(text.replace(f"wire = {WIRE_VERSION}\n", f"wire = {wire}\n"))


COMMANDS = {
    "verify": ["ckpt", "verify", "DIR"],
    "pull": ["ckpt", "pull", "elsewhere", "--from", "DIR"],
    "pull into": ["ckpt", "pull", "DIR", "--from", "OTHER"],
    "sample": ["sample", "DIR"],
    "resume": ["new", "--resume", "DIR"],
    "new": ["new", "FILE"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_command_on_a_run_of_before_says_why_not_and_what_to_type(
    command: str, before: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = kept_run(name="other", nonce="0" * 15 + "1").keep(tmp_path / "other", 10)
    places = {"DIR": str(before.root), "FILE": str(before.manifest), "OTHER": str(other.root)}
    was = before.manifest.read_bytes()
    assert swarm([places.get(word, word) for word in COMMANDS[command]]) == EXIT_INCOMPATIBLE
    cause, check, next_ = capsys.readouterr().err.splitlines()
    assert cause == (f"error: run.wire = {OLDER} cannot be used: {before.manifest} is of an older version of swarm")
    assert check == f"  check: expected {WIRE_VERSION}, the wire version of this swarm"
    assert next_.startswith("  next:  go on with it in the swarm that made it, or found a new run with its settings: ")
    assert before.manifest.read_bytes() == was

    copy, _, found = next_.partition("settings: ")[2].partition(" && ")
    subprocess.run(copy, shell=True, check=True)
    *_, new, file, flag, tokenizer = shlex.split(found)
    assert (new, file, flag) == ("new", "RUN.toml", "--tokenizer")
    foundation = Foundation(file=Path(file), tokenizer=Path(tokenizer))
    founded = make_run(foundation, load_foundation(foundation)).manifest
    kept = kept_run().manifest
    assert (founded.run.wire, founded.model, founded.optimizer) == (WIRE_VERSION, kept.model, kept.optimizer)


@pytest.mark.parametrize("line", [f"wire = {OLDER}", f"wire={OLDER}", f"\twire   =  {OLDER}"])
@pytest.mark.parametrize("name", ["RUN.toml", "mine.toml"])
def test_what_is_advised_for_a_manifest_in_the_working_directory_overwrites_nothing(
    name: str, line: str, before: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = before.manifest.read_text().replace(f"wire = {OLDER}\n", f"{line}\n")
    there = {name: said, "RUN.toml": said if name == "RUN.toml" else "another's", "RUN-2.toml": "another's"}
    for file, text in there.items():
        (tmp_path / file).write_text(text)
    assert swarm(["new", name]) == EXIT_INCOMPATIBLE
    copy, _, found = capsys.readouterr().err.partition("settings: ")[2].partition(" && ")
    subprocess.run(copy, shell=True, check=True)
    assert {file: (tmp_path / file).read_text() for file in there} == there
    assert shlex.split(found)[-2:] == ["new", "RUN-3.toml"]
    assert load_foundation(Foundation(file=Path("RUN-3.toml")))
    assert (tmp_path / "RUN-3.toml").read_text() == said.replace(f"{line}\n", "")


def test_command_on_a_run_of_a_newer_version_says_to_update(
    before: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    before.manifest.write_text(before.manifest.read_text().replace(f"wire = {OLDER}", f"wire = {WIRE_VERSION + 1}"))
    assert swarm(["ckpt", "verify", str(before.root)]) == EXIT_INCOMPATIBLE
    cause, _, next_ = capsys.readouterr().err.splitlines()
    assert "is of a newer version of swarm" in cause
    assert next_ == "  next:  Update swarm on this machine."


def test_peer_writes_no_run_over_one_of_before(before: RunDirectory, run: KeptRun) -> None:
    was = before.manifest.read_bytes()
    with pytest.raises(OtherWire):
        keep_run(before, run.manifest, run.files)
    assert before.manifest.read_bytes() == was
    with pytest.raises(OtherWire):
        load_manifest(before.manifest)
