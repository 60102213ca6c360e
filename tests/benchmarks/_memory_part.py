"""One part in a process of its own, for ``memory``: prints its bytes a parameter as JSON."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path

import torch

from swarm.ids import MicrobatchId, PeerId, StepWork
from swarm.membership.rules import optimizer_of
from swarm.models.gpt_config import GptConfig
from swarm.models.lora import LoraFamily
from swarm.models.lora_config import BaseDType, LoraConfig
from swarm.models.registry import family_of
from swarm.optim.part import TrainedPart
from swarm.optim.schedules import OptimizerConfig
from swarm.optim.update import Update
from swarm.planning.costs import held_bytes
from swarm.state.snapshot import Snapshot
from tests.benchmarks._stage import stage_spec

SETTINGS = {
    "full_fp32": ("float32", "adamw"),
    "full_bf16": ("bfloat16", "adamw"),
    "sgd_fp32": ("float32", "sgd"),
    "muon_fp32": ("float32", "muon"),
}


FROZEN: dict[str, BaseDType] = {"lora_bf16": "bfloat16", "lora_nf4": "nf4"}
RANK = 8


def main() -> None:
    """Measure a mode."""
    mode, width = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    if mode in FROZEN:
        _adapted(64, FROZEN[mode])
        print(json.dumps(_adapted(width, FROZEN[mode])))
        return
    compute, name = SETTINGS[mode]
    update = optimizer_of(OptimizerConfig.model_validate({"name": name}))
    _part(64, compute, update)  # what is loaded and kept by the first use of everything
    before = _resident()
    print(json.dumps(_part(width, compute, update, before)))


def _part(width: int, compute: str, update: Update, before: int = 0) -> dict[str, float]:
    model = GptConfig.model_validate({"vocab_size": 257, "dim": width, "heads": 8, "layers": 4, "compute": compute})
    part = TrainedPart(stage_spec(model), model, update)
    part.install(Snapshot.blank(part.spec.name, 0, part.layout))
    mean = torch.zeros(part.layout.elements).normal_(generator=torch.Generator().manual_seed(0))
    largest: dict[str, int] = {}
    for number in range(2):
        _reset()
        _microbatch(part, model, number)
        largest["backward"] = _peak()
        _trim()
        largest["holds"] = _resident()
        _reset()
        part.prepare(mean, lr=1e-3, clip=1.0, step=part.step + 1)
        part.swap()
        largest["closing"] = _peak()
    own = 4 * mean.numel()
    return {
        **{kind: round((value - before - own) / mean.numel(), 2) for kind, value in largest.items()},
        "predicted": held_bytes(model, vectors=len(update.vectors)),
        "parameters": mean.numel(),
    }


def _adapted(width: int, base: BaseDType) -> dict[str, float]:
    """Of a part with adapters, computed in bfloat16: bytes a frozen weight. ``base`` are those of the frozen weights
    alone, once nothing else is there."""
    lora = LoraConfig(rank=RANK, base=base)
    model = GptConfig.model_validate({"vocab_size": 257, "dim": width, "heads": 8, "layers": 4, "compute": "bfloat16"})
    model, spec = model.model_copy(update={"lora": lora}), stage_spec(model)
    family = family_of(model)
    assert isinstance(family, LoraFamily)
    layout = family.base(spec)
    vector = layout.pack(family.base_weights(0, spec, None)).numpy().tobytes()  # as if it came from a file
    frozen = family.cost(spec, 8).frozen
    update = optimizer_of(OptimizerConfig())
    part = TrainedPart(spec, model, update)
    _trim()
    before = _resident()
    string = torch.frombuffer(bytearray(vector), dtype=torch.float32)
    part.install_base(layout.views(string))
    del string
    _trim()
    held = _resident() - before
    part.install(Snapshot.blank(spec.name, 0, part.layout))
    mean, largest = torch.zeros(part.layout.elements), {}
    for number in range(2):
        _reset()
        _microbatch(part, model, number)
        largest["backward"] = _peak()
        _trim()
        largest["holds"] = _resident()
        _reset()
        part.prepare(mean, lr=1e-3, clip=1.0, step=part.step + 1)
        part.swap()
        largest["closing"] = _peak()
    return {
        **{kind: round((value - before) / frozen, 3) for kind, value in largest.items()},
        "base": round(held / frozen, 3),
        "predicted": round(layout.bytes / frozen, 3),
        "parameters": frozen,
    }


def _trim() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is freed is the kernel's again


def _microbatch(part: TrainedPart, model: GptConfig, number: int) -> None:
    x = torch.ones((1, 8, model.dim))
    _, graph = part.forward(x, seed=None)
    _, gradients = part.backward(graph, x)
    microbatch = MicrobatchId(PeerId("trainer"), "00" * 8, 0, number)
    part.accumulate(StepWork(part.step + 1, microbatch), gradients)


def _reset() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # proc(5): the peak begins anew


def _resident() -> int:
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {name} in /proc/self/status")


if __name__ == "__main__":
    main()
