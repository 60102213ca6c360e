"""Rows of whole documents: nothing is lost, nothing sees another, and the plan is kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import data_shards.documents
from data_shards.documents import DocumentRows, pack, rows_of
from data_shards.draft import Documents, ShardDraft
from data_shards.packing import StreamRows
from data_shards.shard import Shard
from data_shards.shard_source import BatchShape, ShardSource
from data_shards.stats import packing_of, stats_of
from swarm.errors import ConfigError, StateError
from swarm.ids import PeerId

CONTEXT = 16


def make(path: Path, lengths: Sequence[int], counted: Sequence[bool] | None = None) -> Shard:
    """A shard whose tokens are their own places."""
    path.mkdir(exist_ok=True)
    draft = ShardDraft(path, tokenizer="0" * 64, vocab_size=100_000)
    mask = None if counted is None else np.array(counted)
    draft.add(Documents(np.arange(sum(lengths), dtype=np.uint32), np.cumsum([0, *lengths])[:-1].tolist(), mask))
    draft.finish()
    return Shard.open(path)


def targets_of(shard: Shard) -> list[int]:
    """What must be learnt of it: all but the first token of each document, where it counts."""
    firsts = set(shard.starts.tolist())
    bits = None if shard.counted is None else np.unpackbits(shard.counted, bitorder="little")
    return [n for n in range(shard.manifest.tokens) if n not in firsts and (bits is None or bits[n])]


def check_rows(shard: Shard, rows: DocumentRows) -> None:
    """Every row is whole pieces of single documents, then padding."""
    starts = set(shard.starts.tolist())
    for number in range(rows.count):
        read = rows.read([number])
        assert read.positions is not None
        inputs, targets, positions = read.inputs[0], read.targets[0], read.positions[0]
        padded = int(np.flatnonzero(targets >= 0)[-1]) + 1
        for place in range(CONTEXT):
            if positions[place]:
                assert positions[place] == positions[place - 1] + 1
                if place < padded:
                    assert inputs[place] == inputs[place - 1] + 1
                    assert inputs[place] not in starts
            if targets[place] >= 0:
                assert targets[place] == inputs[place] + 1
        assert positions[0] == 0
        assert targets.max() >= 0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=300), st.booleans(), st.randoms(use_true_random=False))
def test_rows_have_every_target_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], masked: bool, draw: object
) -> None:
    counted = [draw.random() < 0.2 for _ in range(sum(lengths))] if masked else None  # type: ignore[attr-defined]
    shard = make(tmp_path_factory.mktemp("shard"), lengths, counted)
    rows = DocumentRows(shard, CONTEXT)
    check_rows(shard, rows)
    found = [rows.read([number]).targets[0] for number in range(rows.count)]
    learnt = sorted(int(target) for row in found for target in row if target >= 0)
    assert learnt == targets_of(shard)
    assert rows.targets == len(learnt)


def test_positions_begin_at_each_document_and_at_the_padding(tmp_path: Path) -> None:
    shard = make(tmp_path, [5, 9, 3])
    read = DocumentRows(shard, CONTEXT).read([0])
    assert read.positions is not None
    assert read.positions[0].tolist() == [*range(4), *range(8), *range(2), *range(2)]
    assert read.inputs[0].tolist() == [*range(4), *range(5, 13), 14, 15, 0, 0]
    assert read.targets[0].tolist() == [1, 2, 3, 4, *range(6, 14), 15, 16, -1, -1]


def test_long_document_is_cut_and_begins_anew(tmp_path: Path) -> None:
    rows = DocumentRows(make(tmp_path, [40]), CONTEXT)
    read = rows.read([0, 1, 2])
    assert read.positions is not None
    assert read.positions.tolist() == [[*range(16)], [*range(16)], [*range(7), *range(9)]]
    assert read.targets[1].tolist() == [*range(17, 33)]


def test_best_fit_fills_rows_and_is_the_same_each_time() -> None:
    draw = np.random.default_rng(0)
    lengths = np.minimum(1024, draw.lognormal(5.5, 1.0, 20_000).astype(int) + 1).tolist()
    pieces = [(start, length) for start, length in zip(np.cumsum([0, *lengths]).tolist(), lengths, strict=False)]
    plan, again = pack(iter(pieces), 1024), pack(iter(pieces), 1024)
    filled = sum(lengths) / (1024 * (len(plan.first) - 1))
    assert filled > 0.97
    assert np.array_equal(plan.begin, again.begin)
    assert sorted(plan.begin.tolist()) == [start for start, _ in pieces]


def test_plan_is_kept_and_made_anew_where_it_is_another_or_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    really = data_shards.documents.pack

    def count(pieces: object, context: int) -> object:
        made.append(context)
        return really(pieces, context)  # type: ignore[arg-type]

    monkeypatch.setattr(data_shards.documents, "pack", count)
    shard = make(tmp_path / "shard", [5, 9, 3, 20])
    read = DocumentRows(shard, CONTEXT).read([1, 0])
    again = DocumentRows(shard, CONTEXT).read([1, 0])
    assert made == [CONTEXT]
    assert np.array_equal(read.inputs, again.inputs)
    DocumentRows(shard, 8)
    assert made == [CONTEXT, 8]
    kept = shard.path / f"rows-{CONTEXT}.bin"
    assert kept.stat().st_mode & 0o777 == 0o600
    data = kept.read_bytes()
    for corrupt in (b"", data[:-4], b"{" + data, data.replace(b'"context": 16', b'"context": 15')):
        kept.write_bytes(corrupt)
        assert np.array_equal(DocumentRows(shard, CONTEXT).read([1, 0]).inputs, read.inputs)
    assert made == [CONTEXT, 8] + [CONTEXT] * 4
    (make(tmp_path / "other", [5, 9, 3, 21]).path / kept.name).write_bytes(data)
    DocumentRows(Shard.open(tmp_path / "other"), CONTEXT)
    assert made[6:] == [CONTEXT]


def test_plan_that_names_other_tokens_is_refused(tmp_path: Path) -> None:
    shard = make(tmp_path, [5, 9])
    DocumentRows(shard, CONTEXT)
    kept = shard.path / f"rows-{CONTEXT}.bin"
    data = bytearray(kept.read_bytes())
    data[-4:] = (5000).to_bytes(4, "little")
    kept.write_bytes(data)
    with pytest.raises(StateError, match="delete it"):
        DocumentRows(shard, CONTEXT).read([0])


def test_source_packed_by_documents_gives_positions(tmp_path: Path) -> None:
    make(tmp_path, [5, 9, 3] * 20)
    stream, documents = (
        ShardSource(tmp_path, trainer=PeerId("T"), shape=BatchShape(4, CONTEXT, packing))
        for packing in ("stream", "documents")
    )
    assert stream.take().positions is None
    batch = documents.take()
    assert batch.positions is not None
    assert batch.positions.dtype == torch.int64
    assert batch.positions.shape == batch.inputs.shape == (4, CONTEXT)
    assert documents.microbatches_per_epoch == 4
    with pytest.raises(ConfigError, match="fill at least 40 rows of 16"):
        ShardSource(tmp_path, trainer=PeerId("T"), shape=BatchShape(40, CONTEXT, "documents"))


def test_stats_of_a_shard_with_a_mask(tmp_path: Path) -> None:
    lengths = [5, 9, 3, 40]
    shard = make(tmp_path, lengths, [number % 4 == 0 for number in range(57)])
    found = stats_of(shard)
    assert (found.tokens, found.documents, found.lengths) == (57, 4, (3, 3, 5, 9, 40, 57 / 4))
    assert found.counted == 15 / 57
    stream, documents = (packing_of(shard, CONTEXT, packing) for packing in ("stream", "documents"))
    assert (stream.rows, stream.filled, stream.targets) == (3, 1.0, 12 / 15)
    assert documents.rows == rows_of(shard, CONTEXT, "documents").count
    assert documents.targets == len(targets_of(shard)) / 15
    assert isinstance(rows_of(shard, CONTEXT), StreamRows)
