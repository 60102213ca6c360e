"""The benchmark ``device`` on a stage so small that it takes no time: its checks hold on a CPU, its sums are right."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.benchmarks import _stage_costs
from tests.benchmarks._stage import Size
from tests.benchmarks._stage_checks import check
from tests.benchmarks._stage_costs import MICROBATCH_PHASES, STEP_PHASES, Candidate
from tests.benchmarks.runner import ROOT

TINY = Size(name="tiny", dim=16, heads=2, blocks=1, sequence=8, microbatch=2)
CPU = torch.device("cpu")


def test_check_of_the_cpu_itself_finds_every_promise_kept() -> None:
    found = check(CPU, TINY)
    assert [found[f"{compute}_distance"] for compute in ("float32", "bfloat16")] == [0, 0]
    assert [name for name, kept in found.items() if not name.endswith("_distance") and kept is not True] == []


def test_candidate_after_a_round_has_a_time_for_every_phase() -> None:
    candidate = Candidate(TINY, "bfloat16", CPU)
    candidate.round(2)
    assert all(candidate.milliseconds(phase) > 0 for phase in (*MICROBATCH_PHASES, *STEP_PHASES))
    assert candidate.name == "cpu_tiny_bfloat16"
    assert candidate.wire_tokens_per_second < candidate.tokens_per_second


def test_candidate_rates_follow_from_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = Candidate(TINY, "float32", CPU)
    monkeypatch.setattr(candidate, "milliseconds", lambda phase: 2.0)
    monkeypatch.setattr(_stage_costs, "training_flops_per_token", lambda *_: 1e9)
    assert candidate.tokens_per_second == pytest.approx(16 / 0.006)
    assert candidate.wire_tokens_per_second == pytest.approx(16 / 0.014)
    assert candidate.teraflops == pytest.approx(4.0)


def test_device_benchmark_is_found_and_loads_without_the_network() -> None:
    """It must run on a bare machine: torch, numpy, pydantic, safetensors."""
    missing = ("hivemind", "uvloop", "msgpack", "multiaddr", "psutil", "cryptography", "tokenizers", "rich")
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({missing!r}))\n"
        "from tests.benchmarks.runner import discover\n"
        "assert 'device' in discover()\n"
        "import tests.benchmarks._stage_checks, tests.benchmarks._stage_costs\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
