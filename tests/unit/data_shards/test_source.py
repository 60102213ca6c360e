from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_shards.draft import Documents, ShardDraft
from data_shards.manifest import TOKENS_FILE
from data_shards.router import Router, described
from data_shards.shard import Shard
from data_shards.shard_source import BatchShape, ShardSource
from swarm.errors import ConfigError, StateError
from swarm.ids import MicrobatchId, PeerId
from swarm.pipeline.batch import BatchSource

ME = PeerId("12D3KooWtrainer")


def _source(path: Path, *, microbatch_size: int = 4, context: int = 16, **more: Any) -> ShardSource:
    return ShardSource(path, trainer=ME, shape=BatchShape(microbatch_size, context), **more)


def test_source_satisfies_the_pipelines_protocol(shard_path: Path) -> None:
    source: BatchSource = _source(shard_path)  # type: ignore[assignment]
    batch = source.take()
    assert batch.inputs.shape == batch.targets.shape == (4, 16)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert batch.id == MicrobatchId(ME, Shard.open(shard_path).manifest.digest[:16], 0, 0)


def test_source_seek_back_gives_the_very_same_microbatch(shard_path: Path) -> None:
    source = _source(shard_path)
    taken = [source.take() for _ in range(5)]
    again = _source(shard_path)
    again.seek((0, 3))
    batch = again.take()
    assert batch.id == taken[3].id
    assert torch.equal(batch.inputs, taken[3].inputs)
    assert again.cursor == (0, 4)


@pytest.mark.parametrize("change", [b"", b"\xff" * 64], ids=["cut short", "written over"])
def test_source_whose_shard_changes_while_it_is_read_says_so(shard_path: Path, change: bytes) -> None:
    source, tokens = _source(shard_path), shard_path / TOKENS_FILE
    source.take()
    size, before = tokens.stat().st_size, source.cursor
    with tokens.open("r+b") as file:
        file.write(change or b"\0")
        file.truncate(size if change else size // 2)
    os.utime(tokens, ns=(0, 1))  # whatever a file system takes for now
    with pytest.raises(StateError, match="changed since it was opened"):
        source.take()
    assert source.cursor == before


@pytest.mark.parametrize(("counting", "rows"), [(9, 10), (8, 5)])
def test_source_leaves_out_what_does_not_count_and_rows_without_a_target(
    tmp_path: Path, counting: int, rows: int
) -> None:
    draft = ShardDraft(tmp_path, tokenizer="0" * 64, vocab_size=200)
    draft.add(Documents(np.arange(161, dtype=np.uint32), (0,), (np.arange(161) - 1) % 32 < counting * 2))
    draft.finish()
    source = _source(tmp_path, microbatch_size=1)
    batches = [source.take() for _ in range(source.microbatches_per_epoch)]
    targets = torch.cat([batch.targets[0] for batch in batches])
    assert len(batches) == rows
    assert sorted(targets[targets >= 0].tolist()) == [n for n in range(1, 161) if (n - 1) % 32 < counting * 2]
    assert all(batch.targets.max() >= 0 for batch in batches)


def test_source_end_of_epoch_continues_with_the_next(shard_path: Path) -> None:
    source = _source(shard_path)
    last = source.microbatches_per_epoch - 1
    source.seek((0, last))
    source.take()
    assert source.cursor == (1, 0)
    assert source.take().id.epoch == 1


def test_source_routed_by_text_gives_microbatches_of_rows_that_are_nearest_to_one_centre(shard_path: Path) -> None:
    plain = _source(shard_path, microbatch_size=1)
    rows = [plain.take() for _ in range(plain.microbatches_per_epoch)]
    router = Router(described(torch.cat([rows[0].inputs, rows[-1].inputs, rows[9].inputs]).numpy()).tolist())
    expected = [router.choice_of(row.inputs[0].tolist()) for row in rows]
    source = _source(shard_path, by=router)
    taken = [source.take() for _ in range(2 * source.microbatches_per_epoch)]
    assert {batch.choice for batch in taken} == set(expected) == {0, 1, 2}
    for batch in taken:
        assert {router.choice_of(row) for row in batch.inputs.tolist()} == {batch.choice}
    again = _source(shard_path, by=router)
    again.seek(taken[7].id[2:])
    batch = again.take()
    assert (batch.id, batch.choice) == (taken[7].id, taken[7].choice)
    assert torch.equal(batch.inputs, taken[7].inputs)


def test_source_of_one_choice_reads_as_without_any(shard_path: Path) -> None:
    plain, chosen = _source(shard_path), _source(shard_path, by=3)
    for _ in range(5):
        one, other = plain.take(), chosen.take()
        assert (one.id, one.choice, other.choice) == (other.id, 0, 3)
        assert torch.equal(one.inputs, other.inputs)


def test_source_seek_outside_stays_where_it_was(shard_path: Path) -> None:
    source = _source(shard_path)
    source.take()
    with pytest.raises(ConfigError, match="cursor"):
        source.seek((0, source.microbatches_per_epoch + 1))
    assert source.cursor == (0, 1)


def test_source_shard_too_short_says_what_it_takes(shard_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 40001 tokens"):
        _source(shard_path, context=10_000)


def test_source_other_tokenizer_is_refused(shard_path: Path) -> None:
    with pytest.raises(ConfigError, match="the run's tokenizer"):
        _source(shard_path, tokenizer="0" * 64)


def test_source_and_batch_printed_show_no_tokens(shard_path: Path) -> None:
    source = _source(shard_path)
    batch = source.take()
    assert str(batch.inputs[0, 0].item()) not in repr(batch).replace(str(batch.id), "").replace("(4, 16)", "")
    assert "tensor" not in repr(batch)
    assert "tensor" not in repr(source)


def test_batch_tensors_are_its_own(shard_path: Path) -> None:
    source = _source(shard_path)
    batch = source.take()
    batch.inputs.fill_(0)
    source.seek((0, 0))
    assert source.take().inputs.any()
