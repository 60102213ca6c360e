from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_shards.draft import Documents, ShardDraft
from data_shards.histogram import FEWEST_DOCUMENTS, MOST_GROUPS, TokenHistogram, histogram_of, pieces_of, read_histogram
from data_shards.router import Points, Router, described, evened, learn
from data_shards.shard import Shard
from swarm.errors import ConfigError

KINDS = (range(0, 40), range(50, 90), range(200, 240))


def _shard(path: Path, documents: list[range], each: int = 40) -> Shard:
    draft = ShardDraft(path, tokenizer="0" * 64, vocab_size=300)
    tokens = [token for number, kind in enumerate(documents) for token in np.roll(kind, number)[:each]]
    draft.add(Documents(np.array(tokens, np.uint32), tuple(range(0, len(tokens), each)), None))
    draft.finish()
    return Shard.open(path)


def test_histogram_has_the_kinds_of_a_shard_and_no_group_of_few_documents(tmp_path: Path) -> None:
    found = histogram_of(_shard(tmp_path, [*[KINDS[0]] * 200, *[KINDS[1]] * 100, *[KINDS[2]] * 5]), 40)
    assert sum(one.documents for one in found.groups) == 305
    assert min(one.documents for one in found.groups) >= FEWEST_DOCUMENTS
    router = Router(learn(found.points(), 2, seed=0))
    assert [router.choice_of(list(kind)) for kind in KINDS[:2]] == [0, 1]


def test_histogram_of_a_few_documents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 32 documents"):
        histogram_of(_shard(tmp_path, [KINDS[0]] * 31), 40)


def test_a_long_document_adds_no_more_than_a_few_pieces() -> None:
    pieces, owners = pieces_of([np.arange(1000), np.arange(3), np.arange(25)], 10, most=4)
    assert owners.tolist() == [0, 0, 0, 0, 1, 2, 2]
    assert np.array_equal(pieces[4], described(np.arange(3)[None])[0])


def test_histogram_comes_back_from_its_file(tmp_path: Path) -> None:
    found = histogram_of(_shard(tmp_path, [KINDS[0]] * 40), 40)
    assert read_histogram(found.model_dump_json().encode(), "a file") == found


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"groups": []}, "groups"),
        ({"format": 2}, "format"),
        ({"text": "a secret"}, "text"),
        ({"documents": FEWEST_DOCUMENTS - 1}, "groups.0.documents"),
        ({"pieces": 1 << 40}, "groups.0.pieces"),
        ({"pieces": 0}, "groups.0.pieces"),
        ({"shares": [0] * 255}, "groups.0.shares"),
        ({"shares": [4097] * 256}, "groups.0.shares.0"),
        ({"shares": [-1] * 256}, "groups.0.shares.0"),
        ({"shares": [4096, 1, *[0] * 254]}, "groups.0"),
        ({"shares": [0] * 256}, "groups.0"),
        ({"pieces": 31}, "groups.0"),
        ({"pieces": 4 * 32 + 1}, "groups.0"),
        ({"groups": [{"documents": 1 << 14, "pieces": 1 << 16, "shares": [256] * 256}] * 2}, "the document"),
    ],
)
def test_histogram_of_a_stranger_is_checked(changes: dict[str, Any], where: str) -> None:
    group = {"documents": 32, "pieces": 32, "shares": [256] * 256}
    whole = {"format": 1, "tokenizer": "0" * 64, "groups": [group | changes]}
    if not changes.keys() <= group.keys():
        whole = whole | {"groups": [group]} | changes
    with pytest.raises(ConfigError) as caught:
        read_histogram(json.dumps(whole).encode(), "a file")
    assert str(caught.value.why).startswith(f"{where}: ")


def test_histogram_of_one_alone_decides_no_kinds_of_many() -> None:
    kinds = [described(np.array([list(kind)])) for kind in KINDS]
    mine = Points(np.concatenate(kinds[:2]), np.array([40, 30]))
    loud = Points(kinds[2], np.array([1 << 16]))
    points = evened([mine, mine, loud])
    assert points.weights.tolist() == [40 << 10, 30 << 10] * 2 + [70 << 10]
    assert evened([mine, mine]).weights.tolist() == [40, 30] * 2
    assert evened([mine, loud]).weights.tolist() == [40 << 10, 30 << 10, 70 << 10]


def test_what_is_no_histogram_and_more_groups_than_there_may_be_are_refused() -> None:
    group = {"documents": 32, "pieces": 32, "shares": [256] * 256}
    for data in (b"", b"{", b"[]", b"\xff"):
        with pytest.raises(ConfigError, match="swarm data histogram"):
            read_histogram(data, "a file")
    many = {"tokenizer": "0" * 64, "groups": [group] * (MOST_GROUPS + 1)}
    with pytest.raises(ConfigError):
        read_histogram(json.dumps(many).encode(), "a file")
    assert len(TokenHistogram.model_validate(many | {"groups": (group | {"shares": (256,) * 256},)}).points().at) == 1
