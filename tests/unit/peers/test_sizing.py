"""``swarm new --peers``: stages of the sizes that the peers can hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peers.cli.app import run as swarm
from peers.console.words import CommandError
from peers.exit_codes import EXIT_USAGE
from peers.founding_files import Founded, load_foundation, make_run, resume_run, sized_document
from peers.options.foundation import Foundation
from peers.plan.peers_file import read_peers
from peers.plan.work import workload_of
from swarm.config import Manifest
from swarm.models.spec import even_stages
from swarm.planning.predict import part_memory
from swarm.planning.workload import PartLayout
from tests.harness.rigs.peers import kept_run

pytestmark = pytest.mark.usefixtures("elsewhere")

RUN_FILE = """
[run]
name = "uneven"
copies = 0
[model]
dim = 512
layers = 6
context = 64
[split]
stages = 3
[batch]
microbatch_size = 1
microbatches_per_step = 16
"""


def entry(name: str, count: int, gib: float, flops: float = 1e12) -> str:
    return f'[[peers]]\nname = "{name}"\ncount = {count}\nflops = {flops}\nmemory_gib = {gib}\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(RUN_FILE)
    return path


def peers_of(tmp_path: Path, *entries: str) -> Path:
    path = tmp_path / "peers.toml"
    path.write_text("".join(entries))
    return path


def founded(file: Path, **options: Any) -> tuple[Manifest, list[tuple[str, str]]]:
    foundation = Foundation(file=file, **options)
    document, said = sized_document(foundation, load_foundation(foundation))
    made: Founded = make_run(foundation, document)
    return made.manifest, list(said)


def takes(manifest: Manifest, layers: int, stages: int) -> float:
    """GiB that a stage of so many layers takes at one of several replicas, about."""
    work = workload_of(manifest)
    rest = even_stages(work.layers - layers, stages - 1)
    layout = PartLayout(stages=(layers, *rest), places=((1,),) * (stages + 1), rows=1, recompute=True)
    return part_memory(work, layout, 0).total / 2**30


def test_stages_are_sized_by_memory(file: Path, tmp_path: Path) -> None:
    """One machine holds many layers and the others one each: of three even stages they could hold none."""
    plain = load_manifest_of(file)
    small = (takes(plain, 1, 3) + takes(plain, 2, 3)) / 2
    peers = peers_of(tmp_path, entry("large", 1, 8), entry("small", 3, small))
    manifest, said = founded(file, peers=peers, stages=3)
    sizes = manifest.split.layers_per_stage
    assert sizes is not None
    assert sorted(sizes) == [1, 1, 4]
    assert (manifest.run.start_when.stage_hosts, manifest.run.start_when.trainers) == (3, 1)
    told = dict(said)
    assert f"the peers in {peers}: 4, 1, 1 layers, searched exactly" in told["sized for"]
    large = f"stage-{sizes.index(4)}"
    assert "4 layers" in told[large]
    assert "for 1 large; small cannot, it takes " in told[large]
    assert "cannot" not in told[f"stage-{sizes.index(1)}"]
    assert "GiB" in told["trainers"]


def load_manifest_of(file: Path) -> Manifest:
    foundation = Foundation(file=file)
    return make_run(foundation, load_foundation(foundation)).manifest


def test_checkpoint_is_cut_for_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = kept_run(layers=4)
    kept = run.keep(tmp_path / "home" / "runs" / f"kept-{run.manifest.run_id[:12]}", 10)
    peers = peers_of(tmp_path, entry("box", 4, 8))
    said = list[str]()
    monkeypatch.setattr("peers.console.lasting.FIRST_S", 0.0)
    foundation = Foundation(file=kept.root, resume=True, peers=peers, stages=3)
    made = resume_run(foundation, None, lambda label, text: said.append(f"{label} {text}"))
    assert [one.partition(":")[0] for one in said] == ["checking step 10", "searching layouts dealt out"]
    assert made.manifest.split.stages == 3
    assert sum(made.manifest.split.layers_per_stage or ()) == 4
    assert made.manifest.run.parent is not None
    assert [label for label, _ in made.said][0] == "sized for"
    assert {"cut anew", "whole"} <= dict(made.said).keys()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--peers", "nowhere.toml"], "--peers = 'nowhere.toml'"),
        (["--peers", "peers.toml", "--layers-per-stage", "3,3"], "Leave one of the two out."),
        (["--peers", "peers.toml", "--hosts", "1"], "--hosts = 1"),
    ],
)
def test_bad_usage(
    arguments: list[str], words: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peers_of(tmp_path, entry("box", 5, 8, 1e9))
    stages = [] if "--layers-per-stage" in arguments else ["--stages", "3"]
    assert swarm(["new", str(file), *arguments, *stages]) == EXIT_USAGE
    assert words in " ".join(capsys.readouterr().err.split())


def test_variants_and_stages_that_share_are_sized_by_who_holds_them(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[model]\nlayers = 6\n[split]\nvariants = [1, 2]\nroute_by = "domain"\ndomains = ["law", "code"]\n')
    peers = peers_of(tmp_path, entry("box", 8, 8))
    peers.write_text(f"kinds = [3, 1]\n{peers.read_text()}")
    manifest, said = founded(file, peers=peers)
    assert sum(manifest.split.layers_per_stage or ()) == 6
    assert (manifest.split.stages, manifest.split.variants) == (2, (1, 2))
    hosts = manifest.run.start_when.stage_hosts
    assert hosts + manifest.run.start_when.trainers == 8
    assert {"stage-1.v0of2", "stage-1.v1of2"} <= dict(said).keys()
    file.write_text('[model]\nlayers = 6\nshare = "stages"\ndelink_at = 9\n')
    peers.write_text(peers.read_text().partition("\n")[2])
    shared, _ = founded(file, peers=peers)
    assert len(set(shared.split.layers_per_stage or ())) == 1
    file.write_text('[model]\nlayers = 6\nshare = "stages"\nexperts = 4\nexpert_every = 3\n')
    mixed, _ = founded(file, peers=peers)
    assert mixed.split.layers_per_stage == (3, 3), "each has its experts in the same place"


def test_cut_that_fits_nobody_names_one_that_does(file: Path, tmp_path: Path) -> None:
    plain = load_manifest_of(file)
    peers = peers_of(tmp_path, entry("small", 8, (takes(plain, 1, 3) + takes(plain, 2, 3)) / 2))
    assert len(read_peers(peers, plain).classes) == 1
    with pytest.raises(
        CommandError, match="no layout with 2 stages and microbatches of 1 row fits these 8 peers"
    ) as no:
        founded(file, peers=peers, stages=2)
    assert "6 stages with batch.microbatch_size = " in no.value.next
    nobody = peers_of(tmp_path, entry("tiny", 8, 0.1))
    with pytest.raises(CommandError, match="no layout fits into the memory of these 8 peers"):
        founded(file, peers=nobody)
