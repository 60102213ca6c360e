from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_shards import tokenize
from data_shards.build import build_shard, document_text, split_documents
from data_shards.draft import Documents
from data_shards.shard import Shard
from data_shards.tokenize import Passage, Tokenizer, train_tokenizer
from swarm.errors import ConfigError

TEXTS = st.lists(st.text("abcdefgh", min_size=1, max_size=30), min_size=8, max_size=60, unique=True)


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.integers(1, 5), st.integers(-5, 5))
def test_split_any_documents_is_disjoint_and_complete(texts: list[str], shards: int, seed: int) -> None:
    split = split_documents(texts, shards, 0.2, seed)
    parts = [*split.shards, split.held_out]
    together = [document_text(text) for part in parts for text in part]
    assert set(together) == set(texts)
    assert len(together) == len(texts)
    assert all(split.shards)
    assert split.held_out
    assert split == split_documents(texts, shards, 0.2, seed)


def test_split_equal_documents_never_lie_on_both_sides() -> None:
    texts = [f"text {n % 10}" for n in range(100)]
    split = split_documents(texts, 2, 0.3, 0)
    trained = {text for shard in split.shards for text in shard}
    assert not trained & set(split.held_out)


def test_split_text_that_is_too_large_is_cut_into_spans_and_equal_ones_go_together(tokenizer_json: bytes) -> None:
    lines = "".join(f"line {number} of a long text\n" for number in range(2000))
    split = split_documents([lines, "a short one"], 3, 0.05, 0)
    parts = sorted(split.held_out + sum(split.shards, ()), key=lambda part: getattr(part, "begin", -1))
    assert parts[0] == "a short one"
    assert "".join(str(document_text(part)) for part in parts[1:]) == lines, "disjoint, and nothing is lost"
    assert all(str(document_text(part)).endswith("\n") for part in parts[1:])
    sizes = [sum(len(document_text(part)) for part in shard) for shard in split.shards]
    assert max(sizes) < 1.3 * min(sizes)
    tokenizer = Tokenizer(tokenizer_json)
    found = np.concatenate([tokens for tokens, _ in tokenizer.encode_documents(parts[1:])])
    assert found.tolist() == [*tokenizer.encode(lines), tokenizer.end_of_text], "as the whole, and one end"
    twice = split_documents(["01234567" * 512] * 2 + ["something else", "or another"], 2, 0.1, 0)
    places = [
        place for place, part in enumerate((*twice.shards, twice.held_out)) for one in part if isinstance(one, Passage)
    ]
    assert len(places) == 4, "all of what is equal is kept"
    assert len(set(places)) == 1


@pytest.fixture(scope="module")
def of_runs() -> bytes:
    """A tokenizer whose tokens of a long run depend on where that begins."""
    return train_tokenizer(["-" * 64, "abcdefgh " * 8], 300)


def test_span_within_a_long_run_has_no_tokens_of_its_own_and_its_shard_opens(of_runs: bytes, tmp_path: Path) -> None:
    draw = random.Random(0)
    words = [" ".join("".join(draw.choices("abcdefgh", k=5)) for _ in range(1700)) + "\n" for _ in range(2)]
    text = words[0] + 9000 * "-" + "\n" + words[1]
    split, tokenizer = split_documents([text], 8, 0.05, 1), Tokenizer(of_runs)
    parts = sorted(split.held_out + sum(split.shards, ()), key=lambda part: getattr(part, "begin", -1))
    arrays = [tokens for tokens, _ in tokenizer.encode_documents(parts)]
    assert min(map(len, arrays)) == 0, "one lies within the run"
    assert np.concatenate(arrays).tolist() == [*tokenizer.encode(text), tokenizer.end_of_text]
    for number, shard in enumerate((*split.shards, split.held_out)):
        build_shard(tmp_path / str(number), shard, of_runs)
        Shard.open(tmp_path / str(number))


def test_text_that_cannot_be_joined_is_refused_in_words(
    of_runs: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "_LARGEST_WHOLE", 40_000)
    monkeypatch.setattr(tokenize, "_CHARACTERS_AT_ONCE", 7000)
    with pytest.raises(ConfigError, match="goes on for too long"):
        build_shard(tmp_path / "shard", ["a" + 60_000 * "-"], of_runs)
    assert not (tmp_path / "shard").exists()


def test_split_encoded_documents_come_back_with_their_masks() -> None:
    tokens = np.arange(60, dtype=np.uint32) + 70_000
    documents = Documents(tokens, [0, 10, 30], tokens % 3 == 0)
    split = split_documents(list(documents.apart()) * 2, 2, 0.1, 0)
    found = [Documents.of(one) for one in (*split.shards[0], *split.shards[1], *split.held_out)]
    assert sorted(one.tokens.tolist() for one in found) == [list(tokens[:10]), list(tokens[10:30]), list(tokens[30:])]
    assert all((one.counted == (one.tokens % 3 == 0)).all() for one in found)
    spans = split_documents(list(Documents(np.arange(6000, dtype=np.uint32)).apart()), 2, 0.1, 0)
    found = [Documents.of(one) for one in (*spans.shards[0], *spans.shards[1], *spans.held_out)]
    assert sorted(token for one in found for token in one.tokens.tolist()) == list(range(6000))
    assert len(found) == 10
    (whole,) = Documents(tokens).apart()
    assert np.asarray(Documents.of(whole).counted).all()


def test_split_fraction_is_reached_and_hardly_exceeded(documents: list[str]) -> None:
    held = sum(map(len, split_documents(documents, 2, 0.1, 0).held_out))
    total = sum(map(len, documents))
    assert 0.1 * total <= held <= 0.1 * total + max(map(len, documents))


@pytest.mark.parametrize(
    ("shards", "fraction", "key"), [(0, 0.1, "shards"), (1, 1.0, "held_out_fraction"), (9, 0.1, "documents")]
)
def test_split_impossible_request_names_the_key(shards: int, fraction: float, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_documents(["one", "two", "three", " "], shards, fraction, 0)
    assert caught.value.key == key


def test_split_printed_shows_no_text(documents: list[str]) -> None:
    assert "owl" not in repr(split_documents(documents, 2, 0.1, 0))
