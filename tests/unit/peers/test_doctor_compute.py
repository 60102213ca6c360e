"""What ``swarm doctor`` measures with torch: devices, which parts fit, and the speed of a stage of any family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from peers.doctor import compute
from peers.doctor.compute import DeviceBench, try_device
from swarm.config import Manifest, parse_manifest
from swarm.errors import ConfigError
from swarm.ids import PartName
from swarm.models.registry import family_of
from tests.harness.rigs.clocks import FakeClock

GPT = {"vocab_size": 300, "dim": 32, "layers": 4, "heads": 2, "context": 16}
STAGE = PartName("stage-0")


class Steady(FakeClock):
    """A second goes by from one look to the next."""

    def monotonic(self) -> float:
        self.now += 1
        return self.now


def manifest(ends: str = "private", **model: Any) -> Manifest:
    """A run of this model in two stages, eight rows in a microbatch."""
    document = {
        "run": {"name": "mine", "start_when": {"stage_hosts": 2, "trainers": 1}},
        "model": GPT | model,
        "split": {"stages": 2, "ends": ends},
        "tokenizer": {"digest": "ab" * 32},
    }
    return parse_manifest(document, "this test")


def test_try_device_computes_on_the_cpu_and_refuses_what_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = try_device("cpu")
    assert (seen.device, seen.title, seen.free > 0) == ("cpu", "the CPU", True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError):
        try_device("cuda:3")


@pytest.mark.parametrize(
    ("ends", "model"),
    [
        ("private", {}),
        ("hosted", {"compute": "bfloat16"}),
        ("private", {"lora": {"rank": 2, "base": "bfloat16"}}),
        ("private", {"lora": {"rank": 2, "base": "nf4"}}),
    ],
)
def test_bench_measures_a_stage_and_reckons_the_whole(ends: str, model: dict[str, Any]) -> None:
    run = manifest(ends, **model)
    bench = DeviceBench(run, "cpu", 1, Steady())
    assert [(one.part, one.lacking) for one in bench.parts()] == [
        (spec.name, "") for spec in family_of(run.model).parts(run.split)
    ]
    speed = bench.speed(STAGE, within_s=100)
    assert speed.measured == "2 layers, 8 of 8 rows, best of 3"
    family = family_of(run.model)
    bare, whole = (
        family.cost(spec, run.model.context).forward_flops
        for spec in (compute.replace(family.parts(run.split)[0], embedding=False, head=False), family.whole)
    )
    assert speed.whole_s == pytest.approx(whole / bare, rel=1e-9), "a pass took one second"
    assert speed.whole_s > 2 * (speed.stage_s if ends == "private" else 1)


def test_bench_measures_one_layer_of_a_large_stage_and_few_rows_where_time_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compute, "LARGE_PARAMETERS", 1)
    bench = DeviceBench(manifest(), "cpu", 1, Steady())
    assert bench.speed(STAGE, within_s=100).measured == "1 layer, 8 of 8 rows, best of 3"
    short = DeviceBench(manifest(), "cpu", 1, Steady()).speed(STAGE, within_s=12)
    assert short.measured == "1 layer, 2 of 8 rows, best of 3"
    assert short.stage_s == pytest.approx(2 * 8 / 2), "two layers and all rows take as much longer"


def test_bench_says_of_each_part_what_is_in_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.device.free_memory", lambda device=None: 100_000)
    parts = DeviceBench(manifest(), "cpu", 1, FakeClock()).parts()
    assert all("100 kB of memory are free here" in one.lacking for one in parts)
