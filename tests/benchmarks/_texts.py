"""Text of three kinds for benchmarks that train: prose, code, and tables that are drawn."""

from __future__ import annotations

import itertools
import random
import re
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_shards.build import build_shard
from data_shards.documents import rows_of
from data_shards.shard import Shard
from peers.data.text import built_in_corpus
from swarm.models.merging import TextRows

TEST_ROWS = 256
_FIELDS: Mapping[str, Any] = {
    "name": lambda rng: rng.choice(("Ann", "Bob", "Cleo", "Dan", "Eve", "Finn")),
    "city": lambda rng: rng.choice(("Rome", "Oslo", "Lima", "Cairo", "Quito")),
    "year": lambda rng: str(rng.randint(1950, 2020)),
    "weight": lambda rng: f"{rng.gauss(70, 9):.1f}",
    "height": lambda rng: f"{rng.gauss(1.7, 0.1):.2f}",
    "price": lambda rng: f"{rng.expovariate(0.05):.2f}",
    "count": lambda rng: str(rng.randint(0, 99)),
    "code": lambda rng: f"{rng.choice('ABC')}{rng.randint(100, 999)}",
}


@dataclass(frozen=True)
class Texts:
    """Documents of a kind: to train on, to calibrate with, and to measure with."""

    train: list[str]
    calibrate: list[str]
    test: list[str]


def texts_of(rng: random.Random) -> dict[str, Texts]:
    found = {"prose": list(built_in_corpus().documents), "code": _code(), "tables": _tables(rng)}
    dealt = {}
    for kind, documents in found.items():
        rng.shuffle(documents)
        most, rest = len(documents) * 8 // 10, len(documents) * 9 // 10
        dealt[kind] = Texts(documents[:most], documents[most:rest], documents[rest:])
    return dealt


def _code() -> list[str]:
    """Modules of the standard library, without docstrings and comments."""
    sources = itertools.islice(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")), 120)
    texts = (re.sub(r'"""(.*?)"""', "", path.read_text(errors="ignore"), flags=re.DOTALL) for path in sources)
    return [found for text in texts if (found := re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))]


def _tables(rng: random.Random) -> list[str]:
    """Drawn rows under drawn columns."""
    tables = []
    for _ in range(400):
        columns = rng.sample(list(_FIELDS), 4)
        rows = (";".join(_FIELDS[column](rng) for column in columns) for _ in range(40))
        tables.append("\n".join([";".join(columns), *rows]))
    return tables


def test_rows(path: Path, documents: list[str], tokenizer: bytes, context: int) -> TextRows:
    """Rows all over a text."""
    build_shard(path, documents, tokenizer)
    rows = rows_of(Shard.open(path), context)
    some = torch.linspace(0, rows.count - 1, min(rows.count, TEST_ROWS)).long().tolist()
    read = rows.read(some)
    tokens: tuple[Tensor, Tensor] = torch.from_numpy(read.inputs), torch.from_numpy(read.targets)
    return TextRows(*tokens)
