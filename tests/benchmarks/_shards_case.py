"""One measurement of the benchmark ``shards``, in a process of its own: prints one JSON object.

``plain TOKENIZER TEXT``, ``build TOKENIZER TEXT OUT PROCESSES``, ``open SHARD PACKING CONTEXT``,
``read SHARD PACKING CONTEXT``.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_shards.documents import Packing

AT_ONCE = 64
MICROBATCH, BATCHES = 8, 200


def plain(tokenizer: str, text: str) -> dict[str, float]:
    """Encode the texts of a JSONL file with tokenizers alone: neither reading, parsing nor writing counts."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(tokenizer)
    with open(text, encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    started, tokens, before = time.perf_counter(), 0, _cpu_s()
    for first in range(0, len(texts), AT_ONCE):
        for encoding in backend.encode_batch_fast(texts[first : first + AT_ONCE], add_special_tokens=False):
            tokens += len(encoding.ids)
    return {"s": time.perf_counter() - started, "cpu_s": _cpu_s() - before, "tokens": tokens}


def build(tokenizer: str, text: str, out: str, processes: str) -> dict[str, float]:
    """Build a shard of it, from the file to the disk, and start what tokenises."""
    from peers.data.building import build_from_files
    from peers.data.tokenizer_files import read_encoding

    encoding = read_encoding(Path(tokenizer), key="TEXT")
    started, before = time.perf_counter(), _cpu_s()
    report = build_from_files([Path(text)], Path(out), encoding, processes=int(processes))
    took = time.perf_counter() - started
    own, child = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    peak = own + int(processes) * child  # of all children the largest is known
    return {"s": took, "cpu_s": _cpu_s() - before, "tokens": report.shard.tokens, "peak_mb": peak / 1e3}


def _cpu_s() -> float:
    """Of this process and of its children that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def restart(shard: str, packing: Packing, context: str) -> dict[str, float]:
    """Open a shard as a trainer does that starts again, up to its first microbatch."""
    import data_shards.source  # noqa: F401 - torch comes with it, whose import is not the shard's affair

    started = time.perf_counter()
    _source(shard, packing, context).take()
    return {"s": time.perf_counter() - started}


def read(shard: str, packing: Packing, context: str) -> dict[str, float]:
    """Take microbatches."""
    source = _source(shard, packing, context)
    started = time.perf_counter()
    for _ in range(BATCHES):
        source.take()
    return {"s": time.perf_counter() - started, "tokens": BATCHES * MICROBATCH * int(context)}


def _source(shard: str, packing: Packing, context: str) -> Any:
    from data_shards.source import ShardSource
    from swarm.ids import PeerId

    return ShardSource(
        Path(shard),
        trainer=PeerId("T"),
        microbatch_size=MICROBATCH,
        context=int(context),
        packing=packing,
    )


CASES: dict[str, Callable[..., dict[str, float]]] = {"plain": plain, "build": build, "open": restart, "read": read}

if __name__ == "__main__":
    print(json.dumps(CASES[sys.argv[1]](*sys.argv[2:])))
