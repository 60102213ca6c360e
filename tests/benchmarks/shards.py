"""What making, opening and reading a trainer's shard costs."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tests.benchmarks.runner import ROOT, Cell, Result, Size

BUILD_RATIO_TARGET, RESTART_TARGET_S, MEMORY_GROWTH_TARGET = 0.9, 1.0, 0.1
CONTEXT = 1024
VOCABULARY = 8192
KEYS = (
    "build_ratio", "restart_s", "memory_growth", "build_ratio_target", "restart_s_target", "memory_growth_target",
    "build_ratio_wall", "build_speedup", "first_open_s", "read_tokens_s",
)  # fmt: skip
VARIANTS = {"stream": ("text", "stream"), "documents": ("text", "documents"), "stream, masked": ("chats", "stream")}


@dataclass(frozen=True, slots=True)
class Scale:
    """Megabytes of text that are built, rounds, megabytes of the two builds whose memory is compared, and tokens of the
    shard that is opened."""

    text_mb: int
    rounds: int
    memory_mb: tuple[int, int]
    tokens: int


SCALES = {
    Size.SMOKE: Scale(2, 1, (2, 3), 10**7),
    Size.DEFAULT: Scale(50, 3, (50, 200), 10**9),
    Size.FULL: Scale(100, 5, (50, 400), 10**9),
}


def run(size: Size) -> Result:
    """Rate of building a shard beside plain tokenizers, seconds to open one of 10⁹ tokens, memory of a large build."""
    scale = SCALES[size]
    with tempfile.TemporaryDirectory(prefix="shards-") as scratch:
        root = Path(scratch)
        _write_inputs(root, scale)
        cores = len(os.sched_getaffinity(0))
        rates = _rates(root, scale, cores)
        read = {packing: _case("read", root / "built", packing, CONTEXT) for packing in ("stream", "documents")}
        memory = _memory(root, scale, cores)
        opened = _opened(root, scale)
    return to_result(scale, cores, {"rates": rates, "read": read, "memory": memory, "opened": opened})


def _case(*arguments: object) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.benchmarks._shards_case", *map(str, arguments)]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(ended.stdout)
    print(f"{arguments[0]} {' '.join(map(str, arguments[3:]))}: {found}", file=sys.stderr, flush=True)
    return found


def _write_inputs(root: Path, scale: Scale) -> None:
    """Prose of some hundred words a document: paragraphs of Python's documentation, drawn in any order."""
    from data_shards.tokenize import train_tokenizer
    from peers.data.text import built_in_corpus

    paragraphs = [text for document in built_in_corpus().documents for text in document.split("\n\n")]
    (root / "tokenizer.json").write_bytes(train_tokenizer(paragraphs, VOCABULARY))
    for megabytes in {scale.text_mb, *scale.memory_mb}:
        draw, written = random.Random(0), 0
        with (root / f"{megabytes}.jsonl").open("w", encoding="utf-8") as file:
            while written < megabytes * 10**6:
                text = "\n\n".join(draw.choices(paragraphs, k=draw.randrange(1, 12)))
                written += file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def _rates(root: Path, scale: Scale, cores: int) -> dict[str, list[tuple[float, float]]]:
    """Megabytes of text a second, and a second of CPU, in turns."""
    text, tokenizer = root / f"{scale.text_mb}.jsonl", root / "tokenizer.json"
    megabytes = text.stat().st_size / 1e6
    found: dict[str, list[tuple[float, float]]] = {"plain": [], "one process": [], "all cores": []}
    for number in range(scale.rounds):
        took = _case("plain", tokenizer, text)
        found["plain"].append((megabytes / took["s"], megabytes / took["cpu_s"]))
        for name, processes in (("one process", 1), ("all cores", cores)):
            out = root / ("built" if (name, number) == ("one process", 0) else f"{processes}-{number}")
            took = _case("build", tokenizer, text, out, processes)
            found[name].append((megabytes / took["s"], megabytes / took["cpu_s"]))
    return found


def _memory(root: Path, scale: Scale, cores: int) -> dict[int, float]:
    """Peak megabytes of the processes of a build, by megabytes of text."""
    return {
        megabytes: _case("build", root / "tokenizer.json", root / f"{megabytes}.jsonl", root / f"m-{megabytes}", cores)[
            "peak_mb"
        ]
        for megabytes in scale.memory_mb
    }


def _opened(root: Path, scale: Scale) -> dict[str, tuple[float, float]]:
    """Seconds to the first microbatch of a shard that is not known yet, and of one that is."""
    found = {}
    for kind in ("text", "chats"):
        _write_large(root / kind, scale.tokens, masked=kind == "chats")
    for name, (kind, packing) in VARIANTS.items():
        first = _case("open", root / kind, packing, CONTEXT)["s"]
        while not (root / kind / "verified.json").exists():  # what was written just before is not remembered
            _case("open", root / kind, packing, CONTEXT)
        again = [_case("open", root / kind, packing, CONTEXT)["s"] for _ in range(scale.rounds)]
        found[name] = (first, median(again))
    return found


def _write_large(path: Path, tokens: int, *, masked: bool) -> None:
    """A shard of token 0 alone, which takes no place on the disk, in documents of 20 to 2,000 tokens."""
    from data_shards.manifest import ShardManifest, TokenFile, file_digest

    path.mkdir()
    with (path / "tokens.bin").open("wb") as file:
        file.truncate(2 * tokens)
    lengths = np.random.default_rng(0).integers(20, 2000, tokens // 1000, dtype=np.uint64)
    starts = np.concatenate([np.zeros(1, np.uint64), np.cumsum(lengths)])
    starts[starts < tokens].astype("<u8").tofile(path / "starts.bin")
    if masked:
        (path / "counted.bin").write_bytes(np.random.default_rng(0).bytes(-(-tokens // 8)))
    files: dict[str, Any] = {name: file_digest(path / f"{name}.bin") for name in ("tokens", "starts")}
    manifest = ShardManifest(
        file=TokenFile(**files["tokens"].model_dump()),
        starts=files["starts"],
        counted=file_digest(path / "counted.bin") if masked else None,
        dtype="uint16",
        tokens=tokens,
        documents=files["starts"].bytes // 8,
        tokenizer="0" * 64,
        vocab_size=VOCABULARY,
    )
    (path / "shard.json").write_text(manifest.render(), encoding="utf-8")


def to_result(scale: Scale, cores: int, found: dict[str, Any]) -> Result:
    """The medians beside their targets."""
    rows: list[list[Cell]] = []
    for name, values in found["rates"].items():
        wall, cpu = (round(median(each), 2) for each in zip(*values, strict=True))
        rows += [[f"build, {name}", "MB/s", wall], [f"build, {name}", "MB/s of CPU", cpu]]
    speed = {packing: one["tokens"] / one["s"] for packing, one in found["read"].items()}
    rows += [[f"read, {packing}", "tokens/s", round(value)] for packing, value in speed.items()]
    rows += [[f"build of {megabytes} MB", "peak MB", round(peak)] for megabytes, peak in found["memory"].items()]
    for name, (first, again) in found["opened"].items():
        rows += [[f"first open, {name}", "s", round(first, 3)], [f"open again, {name}", "s", round(again, 3)]]
    small, large = found["memory"].values()
    plain, single, every = (found["rates"][name] for name in ("plain", "one process", "all cores"))
    summary = {
        "build_ratio": round(median(a[1] / b[1] for a, b in zip(every, plain, strict=True)), 3),
        "restart_s": round(max(again for _, again in found["opened"].values()), 3),
        "memory_growth": round(large / small - 1, 3),
        "build_ratio_target": BUILD_RATIO_TARGET,
        "restart_s_target": RESTART_TARGET_S,
        "memory_growth_target": MEMORY_GROWTH_TARGET,
        "build_ratio_wall": round(median(a[0] / b[0] for a, b in zip(every, plain, strict=True)) / cores, 3),
        "build_speedup": round(median(a[0] / b[0] for a, b in zip(every, single, strict=True)), 3),
        "first_open_s": round(found["opened"]["stream"][0], 3),
        "read_tokens_s": round(speed["stream"]),
    }
    notes = (
        f"build_ratio: MB a second of CPU of a build with {cores} processes ÷ plain tokenizers in one process that "
        f"has the texts in memory and keeps nothing; median over {scale.rounds} rounds in turns, {scale.text_mb} MB; "
        f"build_ratio_wall: the same of seconds, ÷ {cores}; build_speedup: {cores} processes ÷ one; both suffer from "
        "what else the machine does",
        f"restart_s: the worst of {', '.join(found['opened'])}: a process with all imports done, {scale.tokens:,} "
        "tokens of a sparse file, up to its first microbatch; first open: verified, and the packing planned",
        "peak MB: resident pages of the parent and, for each process, of the largest child; each counts its libraries",
    )
    return Result(columns=("what", "unit", "value"), rows=rows, summary=summary, notes=notes)
