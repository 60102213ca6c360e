"""``swarm plan`` as it is typed, and the peers of a run under way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peers.commands.plan import manifest_named, plan_for
from peers.console.words import CommandError
from peers.exit_codes import EXIT_ERROR, EXIT_USAGE
from peers.plan.live import live_run
from peers.plan.peers_file import DEVICES, read_peers
from peers.plan.work import workload_of
from swarm.errors import ConfigError
from tests.harness.rigs.peers import Typed

GPU = """
[[peers]]
name = "gpu"
count = 3
device = "rtx3090"
host_memory_gib = 32
down_mbit = 200
stay_hours = 2
"""
CPU = """
[[peers]]
name = "cpu"
count = 3
flops = 5e10
memory_gib = 4
"""


@pytest.fixture
def peers(tmp_path: Path) -> Path:
    path = tmp_path / "peers.toml"
    path.write_text(GPU + CPU)
    return path


def test_plan_prints_layout_step_and_what_binds(peers: Path, typed: Typed) -> None:
    told = typed("plan", "tiny", "--peers", peers).out
    for words in ("stage-0", "trainers", "tokens/s", "as PaLM counts", "causal attention", "bound by", "next",
                  "as peers come and go", "alone", "TeraPipe", "split = {", "memory"):  # fmt: skip
        assert words in told
    assert "averaging" not in told
    explained = typed("plan", "tiny", "--peers", peers, "--explain").out
    for words in ("3 x", "graphs of", "limit", "filling", "feeding", "averaging", "closing", "PaLM: 6 x N", "c/tx"):
        assert words in explained


def test_plan_sets_devices_of_one_peer_beside_the_cut_by_layers(tmp_path: Path, typed: Typed) -> None:
    (tmp_path / "gpus.toml").write_text(GPU)
    (told,) = [line for line in typed("plan", "tiny", "--peers", tmp_path / "gpus.toml").out.splitlines()
               if line.startswith("tensors")]  # fmt: skip
    assert "--device cuda:0+cuda:1" in told
    found = typed("plan", "tiny", "--peers", tmp_path / "gpus.toml", "--json").json["tensors"]
    assert found["tensor_s"] == pytest.approx(found["whole_s"] / 2 + found["between_s"])
    assert told.endswith("cut layers first") == (not found["worth_it"])


def test_plan_has_machines_on_thin_links_hold_every_part(tmp_path: Path, typed: Typed) -> None:
    file = tmp_path / "gpus.toml"
    found = {}
    for links in ("1", "1000000"):
        file.write_text(GPU.replace("down_mbit = 200", f"down_mbit = {links}\nup_mbit = {links}"))
        told = typed("plan", "tiny", "--peers", file)
        found[links] = [line for line in told.out.splitlines() if line.startswith("links ")]
    assert [len(found[links]) for links in ("1", "1000000")] == [1, 0]
    assert found["1"][0].endswith("hold every part there, with --role all")


def test_plan_as_json_holds_together(peers: Path, typed: Typed) -> None:
    document = typed("plan", "tiny", "--peers", peers, "--json").json
    json.dumps(document, allow_nan=False)
    assert document["schema"] == 1
    assert sum(document["seconds"].values()) == pytest.approx(document["step_s"])
    assert document["next"]["times"] >= 1.0
    assert document["mfu_of"] == "attained"
    stages = document["manifest"]["split"]
    assert sum(stages["layers_per_stage"]) == 4
    assert stages["stages"] == len(document["parts"]) - 1
    assert document["manifest"]["batch"]["microbatch_size"] * document["microbatches"] == 128
    for part in document["parts"]:
        assert part["memory"]["total"] <= 32 * 2**30
    assert document["asked"]["step_s"] >= document["step_s"] * 0.999


def test_plan_refuses_what_means_nothing_and_says_why_nothing_fits(tmp_path: Path, typed: Typed, snapshot: Any) -> None:
    files = (
        "[[peers]", "", "peers = 3", GPU + "flop = 3", GPU.replace("rtx3090", "rtx3099"),
        GPU.replace("host_memory_gib = 32", ""), CPU.replace("flops = 5e10", ""), CPU.replace("memory_gib = 4", ""),
        CPU.replace("= 5e10", "= -1.0"), CPU.replace("= 5e10", "= nan"), CPU + CPU,
        CPU.replace("4", "0.3"), CPU.replace("3", "1"),
    )  # fmt: skip
    path = tmp_path / "peers.toml"
    path.write_text(GPU)
    lines = ("plan tiny", "plan --peers FILE", "plan tinny --peers FILE", "plan tiny --peers nowhere.toml",
             "plan tiny --peers FILE --memory-gib 4", "plan --swarm x --memory-gib many",
             "plan --swarm nonsense")  # fmt: skip
    refused = [typed(*(path if word == "FILE" else word for word in line.split())) for line in lines]
    for content in files:
        path.write_text(content)
        refused.append(typed("plan", "tiny", "--peers", path))
    assert [one.code for one in refused] == [EXIT_USAGE] * (len(refused) - 2) + [EXIT_ERROR] * 2
    assert all("next:" in one.err for one in refused)
    assert refused == snapshot


def test_devices_are_reckoned_at_less_than_their_peak(peers: Path) -> None:
    plain = manifest_named("tiny")
    halved = plain.model_copy(update={"model": plain.model.model_copy(update={"compute": "bfloat16"})})
    gpu, cpu = read_peers(peers, halved).classes
    assert gpu.flops == pytest.approx(0.4 * DEVICES["rtx3090"].bfloat16)
    assert gpu.peak_flops == DEVICES["rtx3090"].bfloat16
    assert gpu.down == 25e6
    assert read_peers(peers, plain).classes[0].peak_flops == DEVICES["rtx3090"].float32
    assert cpu.peak_flops is None
    assert cpu.host_memory is None


def test_hosted_ends_leave_trainers_without_work_but_one_is_needed(peers: Path) -> None:
    manifest = manifest_named("tiny")
    hosted = manifest.model_copy(update={"split": manifest.split.model_copy(update={"ends": "hosted"})})
    best = plan_for(hosted, read_peers(peers, hosted), print).best
    assert best.layout.trainers >= 1
    assert best.parts[-1].needs.parameters == 0


EXPERTS = """
[run]
start_when = { stage_hosts = 5 }
[split]
variants = [1, 4]
route_by = "text"
"""
SHARED = """
[model]
share = "stages"
delink_at = 40
"""


def test_plan_gives_each_variant_hosts_by_its_load(tmp_path: Path, peers: Path, typed: Typed) -> None:
    run = tmp_path / "experts.toml"
    run.write_text(EXPERTS)
    peers.write_text("kinds = [4, 2, 1, 1]\n" + GPU.replace("count = 3", "count = 12"))
    document = typed("plan", run, "--peers", peers, "--json").json
    loads = {one["part"]: one["load"] for one in document["parts"]}
    assert loads == {"stage-0": 1, **{f"stage-1.v{v}of4": load for v, load in enumerate((0.5, 0.25, 0.125, 0.125))},
                     "trainers": 1}  # fmt: skip
    assert document["manifest"]["split"]["stages"] == 2
    assert 0.5 < document["bytes_over_plain"] <= 1.0
    said = typed("plan", run, "--peers", peers).out
    for words in ("load", "stage-1.v3of4", "5 at least, one for each variant of each stage", "times as much as with"):
        assert words in said
    peers.write_text(peers.read_text().replace("[4, 2, 1, 1]", "[1, 1]"))
    refused = typed("plan", run, "--peers", peers)
    assert (refused.code, "4 numbers, one for each kind of text" in refused.err) == (EXIT_USAGE, True)
    peers.write_text(GPU.replace("count = 3", "count = 5"))
    few = typed("plan", run, "--peers", peers)
    assert (few.code, "5 stage hosts, one for each variant of each stage, and a trainer" in few.err) == (
        EXIT_ERROR,
        True,
    )


def test_plan_of_stages_that_share_says_what_a_step_takes_before_and_after_they_part(
    tmp_path: Path, peers: Path, typed: Typed
) -> None:
    run = tmp_path / "shared.toml"
    run.write_text(SHARED)
    document = typed("plan", run, "--peers", peers, "--json").json
    assert len(set(document["manifest"]["split"]["layers_per_stage"])) == 1
    assert document["shared"]["until_step"] == 40
    said = typed("plan", run, "--peers", peers).out
    for words in (
        "until step 40 any host serves every stage",
        "1 at least before that step",
        "with stages that have parted",
    ):
        assert words in said
    run.write_text(SHARED.replace("delink_at = 40", ""))
    always = typed("plan", run, "--peers", peers, "--json").json
    assert [one["part"].partition("-")[0] for one in always["parts"]] == ["shared", "trainers"]
    assert always["bytes_over_plain"] >= 1.0
    assert always["shared"] is None


def test_plan_is_an_error_where_a_run_file_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[model]\nlayer = 3\n")
    with pytest.raises(ConfigError, match=r"model\.layer"):
        manifest_named(str(tmp_path))


class Record:
    """As much of a close record as a plan reads."""

    def __init__(self, members: list, links: dict, paces: dict) -> None:
        self.step, self.links, self.paces = 7, links, paces
        self.members = type("Members", (), {"members": tuple(members)})


def member(peer: str, role: str, part: str | None) -> object:
    return type("Member", (), {"peer": peer, "role": role, "part": part})()


def test_members_of_a_run_are_grouped_by_speed_and_link() -> None:
    manifest = manifest_named("tiny")
    members = [
        member("a", "stage", "stage-0"), member("b", "stage", "stage-1"), member("c", "stage", "stage-1"),
        member("t", "trainer", "ends"), member("x", "bootstrap", None),
    ]  # fmt: skip
    links = dict.fromkeys("abc", (10_000, 25_000_000))
    record = Record(members, links, {"a": 20_000, "b": 20_500, "c": 200_000})
    found = live_run(manifest, record, {}, 4 * 2**30)
    assert sum(one.count for one in found.classes) == 4, "the bootstrap computes nothing"
    fast, slow, trainer = sorted(found.classes, key=lambda one: (one.round_trip_s, -one.flops))
    assert (fast.count, slow.count, trainer.count) == (2, 1, 1)
    needs = 3 * workload_of(manifest).part(2, 0, 2).flops * 8 * 128
    assert slow.flops == pytest.approx(needs / 0.2)
    assert (fast.down, fast.round_trip_s) == (25e6, 0.02)
    assert trainer.down == 12_500_000
    assert "4 GiB" in found.assumed


def test_a_run_in_which_nothing_was_computed_gives_no_plan() -> None:
    with pytest.raises(CommandError, match="computed"):
        live_run(manifest_named("tiny"), Record([member("a", "stage", "stage-0")], {}, {}), {}, 2**30)
