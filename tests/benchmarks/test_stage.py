"""The benchmark ``device`` on a stage so small that it takes no time: its checks hold on a CPU, its sums are right."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from swarm.compression.codec import EncodeContext
from swarm.compression.dense import BFLOAT16, FLOAT32, DenseCodec
from swarm.compression.names import NAMED
from tests.benchmarks import _stage_checks, _stage_codecs, _stage_lanes
from tests.benchmarks._gpu_check import broken_by_two, verdict
from tests.benchmarks._stage import Size
from tests.benchmarks._stage_checks import TOLERANCE, Check, check, largest_distance
from tests.benchmarks._stage_codecs import codec_checks, same_bytes
from tests.benchmarks._stage_lanes import DEFERRED, LANES, TWO_STEPS, lane_checks
from tests.benchmarks._stage_step import Memory, WholeStep
from tests.benchmarks.device import Attempts, checked, failures, step_figures
from tests.benchmarks.runner import ROOT

TINY = Size(name="tiny", dim=16, heads=2, blocks=1, sequence=8, microbatch=2)
CPU = torch.device("cpu")


def test_check_of_the_cpu_itself_finds_every_promise_kept() -> None:
    found = check(CPU, TINY)
    assert {answer for name, answer in found.items() if name.endswith("_distance")} == {0}
    assert {f"{name}_{compute}_parity" for name in ("hf_stage", "ends") for compute in TOLERANCE} <= found.keys()
    assert [name for name, kept in found.items() if not name.endswith("_distance") and kept is not True] == []


def test_lanes_give_what_one_piece_of_work_at_a_time_gives() -> None:
    found = {name: answer for one in lane_checks(CPU, TINY) for name, answer in one.work().items()}
    assert found == dict.fromkeys((*LANES, *DEFERRED, *TWO_STEPS), True)


def test_distance_of_another_result_is_beyond_the_bound_and_of_what_is_not_finite_infinite() -> None:
    expected = [torch.ones(8), torch.ones(8)]
    assert largest_distance([torch.ones(8), torch.full((8,), 1.5)], expected) == pytest.approx(0.5)
    assert largest_distance([torch.ones(8), torch.full((8,), math.nan)], expected) == math.inf


def test_codec_checks_name_every_codec_and_hold_on_the_cpu() -> None:
    found = {name: answer for one in codec_checks(CPU) for name, answer in one.work().items()}
    assert set(found.values()) == {True}
    assert {one.name for one in NAMED} == {name.split("_")[1] for name in found}


def test_same_bytes_tells_a_codec_whose_bytes_depend_on_where_the_tensor_is() -> None:
    class Odd(DenseCodec):
        def encode(self, tensor: Tensor, context: EncodeContext) -> memoryview:
            self.calls.append(0)
            return memoryview(bytes(self.calls))

        calls: list[int] = []

    assert same_bytes(FLOAT32, torch.ones(3), CPU)
    assert not same_bytes(Odd("odd", torch.float32), torch.ones(3), CPU)


def test_whole_step_after_two_rounds_has_a_ratio_of_each() -> None:
    step = WholeStep(TINY, "bfloat16", BFLOAT16, CPU)
    step.round(2)
    step.round(1)
    assert step.name == "cpu_tiny_bfloat16_bfloat16_payloads"
    assert step.memory is None
    assert len(step.ratios()) == 2
    assert min(step.ratios()) > 0
    assert step.closing_s > 0


def test_whole_step_figures_follow_from_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    step = WholeStep(TINY, "float32", FLOAT32, CPU)
    step.rounds = [(0.9, 1.0), (0.8, 1.0), (1.0, 1.0)]
    monkeypatch.setattr(step, "closing_s", 8.0)
    monkeypatch.setattr(step, "memory", Memory(at_rest=16.0, in_step=30.123, closing=32.0))
    assert step_figures(step) == {
        "step_over_bare": 0.9,
        "step_over_bare_least": 0.8,
        "step_over_bare_most": 1.0,
        "step_with_closing_over_bare": 0.6,
        "tokens_s": 16.0,
        "at_rest_bytes_per_parameter": 16.0,
        "in_step_bytes_per_parameter": 30.12,
        "closing_bytes_per_parameter": 32.0,
    }


def test_failures_are_broken_promises_and_errors_and_not_what_is_only_reported() -> None:
    answers = {
        "cuda_float32_parity": False,
        "cuda_float32_distance": 0.5,
        "cuda_float32_repeats": False,
        "cuda_bfloat16_parity": True,
        "cuda_hf_stage_float32_parity": None,
        "cpu_codec_int8_from_float32": False,
    }
    assert failures(answers, {"cuda_large_float32": "RuntimeError: no"}) == [
        "cpu_codec_int8_from_float32",
        "cuda_float32_parity",
        "cuda_large_float32",
    ]


def test_check_that_raises_fails_its_promises_and_the_others_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> dict[str, float | bool]:
        raise RuntimeError("the kernel is not there")

    tried = [
        Check(("ends_float32_distance", "ends_float32_parity"), fail),
        Check(("prepare_repeats",), lambda: {"prepare_repeats": True}),
    ]
    monkeypatch.setattr(_stage_checks, "checks", lambda device: tried)
    monkeypatch.setattr(_stage_codecs, "codec_checks", lambda device: [])
    monkeypatch.setattr(_stage_lanes, "lane_checks", lambda device, size: [])
    attempts = Attempts(go_on=True)
    assert checked(CPU, attempts) == {"cpu_ends_float32_parity": False, "cpu_prepare_repeats": True}
    assert list(attempts.errors) == ["cpu_ends_float32_parity"]


def test_gpu_check_without_a_gpu_says_what_to_do_in_one_line() -> None:
    # As in a shell: make that runs the tests would have it speak as a make within.
    outer = {name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS")}
    environment = outer | {"CUDA_VISIBLE_DEVICES": ""}
    command = ["make", "--no-print-directory", "gpu-check", f"GPU_PYTHON={sys.executable}"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert ended.stdout == ""
    first, *rest = ended.stderr.splitlines()
    assert "sees no GPU" in first
    assert "GPU_PYTHON=python3" in first
    assert all(line.startswith("make:") for line in rest)


def test_gpu_check_judges_two_gpus_by_their_bits_and_pace() -> None:
    kept = {"failed": [], "device": "two"}
    two = {"degrees_equal": 1, "max_abs_diff": 1e-6, "max_abs_diff_bar": 1.2e-6, "two_gpus_over_one": 1.7,
           "two_gpus_over_one_bar": 1.6}  # fmt: skip
    assert verdict(kept, broken_by_two(two))[0] == 0
    for name, value in (("degrees_equal", 0), ("max_abs_diff", 2e-6), ("two_gpus_over_one", 1.5)):
        assert verdict(kept, broken_by_two(two | {name: value})) == (
            1, f"gpu-check: 1 failed on two: tensor: {name} {value}",
        )  # fmt: skip


def test_device_benchmark_is_found_and_loads_without_the_network() -> None:
    """It must run on a bare machine: torch, numpy, pydantic, safetensors."""
    missing = (
        "hivemind",
        "uvloop",
        "msgpack",
        "multiaddr",
        "psutil",
        "cryptography",
        "tokenizers",
        "rich",
        "transformers",
    )
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({missing!r}))\n"
        "from tests.benchmarks.runner import discover\n"
        "assert 'device' in discover()\n"
        "import tests.benchmarks._gpu_check, tests.benchmarks._stage_codecs\n"
        "import torch, tests.benchmarks._stage_checks as checks, tests.benchmarks._stage_step\n"
        "assert not [one for one in checks.checks(torch.device('cpu')) if 'hf' in one.names[0]]\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
