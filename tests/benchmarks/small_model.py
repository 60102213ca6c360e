"""Does a swarm train a language model that is worth something? It must foretell held-out text better than ``xz -9``.

A Llama of four million parameters begins with random weights and reads the Python sources that this machine has, in a
swarm of processes on this machine (on its GPU, where there is one); two packages are kept out of what it reads. All
through the commands that users type: ``swarm quickstart``, ``eval``, ``sample``.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

from tests.benchmarks.runner import Cell, Result, Size

KEYS = (
    "parameters", "tokens", "tokens_per_s", "minutes", "loss_last", "bits_per_byte", "xz_bits_per_byte",
    "bits_over_xz", "bits_over_xz_bar", "xz_with_training_text_bits_per_byte", "read_mb", "held_out_mb", "device",
)  # fmt: skip
COLUMNS = ("steps", "tokens", "nats a token")
HELD_OUT = ("anyio", "jinja2")
"""Packages that every set-up has, and nothing of which is read."""
LARGEST_FILE = 200_000
"""Bytes; longer files are tables."""
PROMPT = "class Reader:\n    def read("
CURVE = 12
"""Rows of the curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much is trained on and judged by: steps, megabytes of text; and the model: its width, layers, token ids, and
    tokens in a row."""

    steps: int
    read_mb: float
    held_out_mb: float
    wide: int
    layers: int
    vocabulary: int
    context: int


EXTENTS = {
    Size.SMOKE: Extent(steps=2, read_mb=0.3, held_out_mb=0.01, wide=32, layers=2, vocabulary=400, context=32),
    Size.DEFAULT: Extent(steps=25, read_mb=5.0, held_out_mb=0.1, wide=192, layers=6, vocabulary=4096, context=256),
    Size.FULL: Extent(steps=770, read_mb=60.0, held_out_mb=1.0, wide=192, layers=6, vocabulary=4096, context=256),
}


def run(size: Size) -> Result:
    """Bits a byte on held-out text of a small Llama that a swarm trained from nothing, beside those of ``xz -9``."""
    import torch

    extent, device = EXTENTS[size], "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory(prefix="small-model-") as made:
        root = Path(made)
        read, held_out = _texts(extent)
        _write_model(root / "model", extent, read)
        text = root / "train.jsonl"
        text.write_text("".join(json.dumps({"text": document}) + "\n" for document in read), encoding="utf-8")
        judged = root / "held-out.txt"
        judged.write_text("".join(held_out), encoding="utf-8")
        report = _swarm(
            *(
                "quickstart",
                "--model",
                str(root / "model"),
                "--from-scratch",
                "--context",
                str(extent.context),
                "--rows",
                "8",
            ),
            *("--text", str(text), "--steps", str(extent.steps), "--peers", "2", "--trainers", "1"),
            *("--device", device, "--out", str(root / "run")),
        )
        judgement = _swarm("eval", "--run", str(root / "run"), "--device", device, str(judged))
        sample = _swarm("sample", str(root / "run"), "--prompt", PROMPT, "--tokens", "150")
        ours, plain = float(judgement["bits_per_byte"]), _xz_bits(held_out)
        summary = {
            "parameters": report["parameters"],
            "tokens": report["tokens"],
            "tokens_per_s": round(report["tokens_per_s"]) if report["tokens_per_s"] else None,
            "minutes": round(report["seconds"] / 60, 1),
            "loss_last": round(report["loss_last"], 3),
            "bits_per_byte": round(ours, 3),
            "xz_bits_per_byte": round(plain, 3),
            "bits_over_xz": round(ours / plain, 3),
            "bits_over_xz_bar": 1.0,
            "xz_with_training_text_bits_per_byte": round(_xz_bits(held_out, after=read), 3),
            "read_mb": round(sum(map(_size, read)) / 1e6, 1),
            "held_out_mb": round(sum(map(_size, held_out)) / 1e6, 2),
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        }
        return Result(columns=COLUMNS, rows=_curve(report), summary=summary, notes=_notes(sample))


def _texts(extent: Extent) -> tuple[list[str], list[str]]:
    """What is read, and what is held out: whole sources, in an order that is drawn by their paths."""
    read: dict[bytes, Path] = {}
    held_out: dict[bytes, Path] = {}
    beside = [Path(spec.origin).parents[1] for name in HELD_OUT if (spec := find_spec(name)) and spec.origin]
    for library in {*beside, *(Path(sysconfig.get_paths()[name]) for name in ("purelib", "stdlib"))}:
        for path in library.rglob("*.py"):
            name = path.relative_to(library)
            into = held_out if any(part in HELD_OUT for part in name.parts) else read
            if "site-packages" not in name.parts and 0 < path.stat().st_size <= LARGEST_FILE:
                into[hashlib.sha256(str(name).encode()).digest()] = path
    return list(_some(read, extent.read_mb)), list(_some(held_out, extent.held_out_mb))


def _some(paths: dict[bytes, Path], megabytes: float) -> Iterator[str]:
    left = megabytes * 1e6
    for key in sorted(paths):
        text = paths[key].read_text(encoding="utf-8", errors="replace")
        yield text
        left -= _size(text)
        if left <= 0:
            return


def _size(text: str) -> int:
    return len(text.encode())


def _write_model(directory: Path, extent: Extent, texts: Sequence[str]) -> None:
    """Write what a person brings: config.json and a tokenizer of his text."""
    from data_shards.tokenize import train_tokenizer

    directory.mkdir()
    config: dict[str, Any] = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": extent.vocabulary,
        "hidden_size": extent.wide, "intermediate_size": extent.wide * 8 // 3 // 16 * 16,
        "num_hidden_layers": extent.layers, "num_attention_heads": extent.wide // 32,
        "num_key_value_heads": extent.wide // 32, "max_position_embeddings": extent.context,
        "eos_token_id": 0, "bos_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    few = [text for _, text in zip(range(1000), texts, strict=False)]
    (directory / "tokenizer.json").write_bytes(train_tokenizer(few, extent.vocabulary))


def _swarm(*arguments: str) -> dict[str, Any]:
    """Return what a command of ours says in JSON. Here, because torch and transformers take seconds to import. Raises
    RuntimeError with the end of its words where it fails."""
    from peers.cli.app import run as swarm

    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = swarm([*arguments, "--json"])
    if code:
        raise RuntimeError(f"swarm {arguments[0]} ended with {code}: {(err.getvalue() or out.getvalue())[-2000:]}")
    answer: dict[str, Any] = json.loads(out.getvalue().splitlines()[-1])
    return answer


def _xz_bits(texts: Sequence[str], after: Sequence[str] = ()) -> float:
    """Bits a byte of ``xz -9``; ``after``: what it has read before, as the model has."""
    before, whole = "".join(after).encode(), "".join(texts).encode()
    known = len(lzma.compress(before, preset=9)) if before else 0
    return 8 * (len(lzma.compress(before + whole, preset=9)) - known) / len(whole)


def _curve(report: dict[str, Any]) -> list[tuple[Cell, ...]]:
    """The mean training loss of each twelfth of the run."""
    losses, tokens = report["losses"], report["tokens"] / max(1, len(report["losses"]))
    piece = max(1, -(-len(losses) // CURVE))
    return [
        (min(at + piece, len(losses)), round(min(at + piece, len(losses)) * tokens), round(sum(some) / len(some), 3))
        for at in range(0, len(losses), piece)
        if (some := losses[at : at + piece])
    ]


def _notes(sample: dict[str, Any]) -> tuple[str, ...]:
    return (
        "read: Python sources of the standard library and of the packages beside it, each a document; held out: all of "
        f"{' and '.join(HELD_OUT)}",
        "xz_with_training_text: what the held-out text adds to the archive of the training text (64 MiB window)",
        f"its sample: {json.dumps(sample['prompt'] + sample['text'], ensure_ascii=False)}",
    )
