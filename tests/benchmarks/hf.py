"""Are models of ``transformers`` the same cut, and trained in a swarm whose peers die, as whole and alone?

Three questions. Do small models of each family give the same bits cut as whole, and are those refused that cannot be
cut? What does it cost to build a large model without its weights? Does a swarm of processes in which replicas are
killed train the very weights of one process, and does transformers load the export with the same logits?
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.benchmarks.runner import ROOT, Cell, Result, Size

if TYPE_CHECKING:
    from tests.benchmarks._hf_run import FineTuned

KEYS = (
    "families_equal", "families_tried", "families_packed", "families_refused_with_reason", "build_8b_s", "build_8b_mb",
    "build_671b_s", "build_671b_mb", "swarms_bit_equal", "swarms", "replicas_killed", "exports_differing",
)  # fmt: skip
COLUMNS = ("what", "of", "figure", "value")
TRAINED = ("llama", "qwen3", "qwen3_moe")
PACKED = "qwen3"
"""Of these the one whose rows hold whole documents."""
BILLIONS = {
    "8b": {
        "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    },
    "671b": {
        "model_type": "deepseek_v3", "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8, "max_position_embeddings": 4096,
    },
}  # fmt: skip
"""The published sizes of two models."""
_BUILD = """
import json, resource, sys, time
began = time.perf_counter()
from tests.benchmarks.hf import build
model = build(json.loads(sys.argv[1]))
seconds = time.perf_counter() - began
kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": round(seconds, 2), "mb": round(kilobytes / 1024), "parameters": model}))
"""


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is tried."""

    families: tuple[str, ...]
    built: tuple[str, ...]
    trained: tuple[str, ...]
    steps: int


def run(size: Size) -> Result:
    """Try families, builds and swarms."""
    from tests.harness.rigs.foreign import ALL, LEAKING, SMALL

    extent = {
        Size.SMOKE: Extent(("llama",), (), ("llama",), 3),
        Size.DEFAULT: Extent(tuple(SMALL), ("8b", "671b"), TRAINED, 5),
        Size.FULL: Extent((*ALL, *LEAKING), ("8b", "671b"), TRAINED, 20),
    }[size]
    rows: list[list[Cell]] = []
    summary: dict[str, Any] = _families(extent.families, rows) | _builds(extent.built, rows)
    with tempfile.TemporaryDirectory(prefix="hf-") as scratch:
        summary |= _swarms(extent, Path(scratch), rows)
    return Result(columns=COLUMNS, rows=rows, summary=summary, notes=_notes(summary))


def _families(names: tuple[str, ...], rows: list[list[Cell]]) -> dict[str, Any]:
    from swarm.errors import ConfigError
    from swarm.models.hf.selftest import self_test
    from tests.harness.rigs.foreign import REFUSED, foreign_model

    equal = packed = refused = 0
    for name in names:
        found = self_test(foreign_model(name))
        equal, packed = equal + (found.equal and found.causal), packed + found.packs
        rows.append(["family", name, "largest difference", found.plain])
        rows.append(["family", name, "leak between packed documents", found.leaks])
    for name in REFUSED:
        try:
            foreign_model(name)
        except ConfigError as error:
            refused += bool(error.why)
            rows.append(["family", name, "refused", error.why])
    return {
        "families_equal": equal,
        "families_tried": len(names),
        "families_packed": packed,
        "families_refused_with_reason": refused,
    }


def _builds(names: tuple[str, ...], rows: list[list[Cell]]) -> dict[str, Any]:
    found: dict[str, Any] = {f"build_{name}_{unit}": None for name in BILLIONS for unit in ("s", "mb")}
    for name in names:
        command = [sys.executable, "-c", _BUILD, json.dumps(BILLIONS[name])]
        said = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
        rows.append(["build", name, "parameters", said["parameters"]])
        found |= {f"build_{name}_s": said["seconds"], f"build_{name}_mb": said["mb"]}
    return found


def build(config: dict[str, Any]) -> int:
    """Build all parts of a model without weights, imports included, as a founder does; returns the parameters."""
    from peers.foreign_model import ForeignModel
    from swarm.models.hf.hf_config import canonical
    from swarm.models.hf.hf_family import HfFamily
    from swarm.models.spec import SplitConfig

    found = ForeignModel(directory=Path(), source="large", revision="", config=canonical(config))
    family = HfFamily(found.model())
    parts = [family.build(spec) for spec in family.parts(SplitConfig(stages=4))]
    return sum(parameter.numel() for part in parts for parameter in part.parameters())


def _swarms(extent: Extent, root: Path, rows: list[list[Cell]]) -> dict[str, Any]:
    from tests.benchmarks._hf_run import fine_tune

    runs: list[FineTuned] = []
    for name in extent.trained:
        print(f"a swarm trains {name}, and replicas are killed …", file=sys.stderr, flush=True)
        one = fine_tune(root / name, name, steps=extent.steps, packing="documents" if name == PACKED else "stream")
        runs.append(one)
        rows += [["swarm", name, figure, value] for figure, value in one.figures().items()]
    return {
        "swarms_bit_equal": sum(one.equal for one in runs),
        "swarms": len(runs),
        "replicas_killed": sum(len(one.killed) for one in runs),
        "exports_differing": sum(one.export_difference != 0.0 for one in runs),
    }


def _notes(summary: dict[str, Any]) -> list[str]:
    notes = [
        "families: two stages and ends against the whole, random weights, float32, plain and packed; all logits and "
        "all gradients",
        "builds: a process of its own, imports included, all parts of four stages without weights",
        f"swarms: files of random weights, reproducible, {PACKED} with packed documents; after steps 1 and 2 one "
        "replica of each stage is killed; the weights after the last step, and the digests of all parts after all "
        "steps, against one process; the export's logits in transformers against ours",
    ]
    if summary["swarms_bit_equal"] != summary["swarms"] or summary["exports_differing"]:
        notes.append("MISSED: a swarm's weights or an export differ")
    return notes
