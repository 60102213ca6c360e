"""The tokens of a document are those of the whole of it, wherever it is cut to bound memory."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer

from data_shards import tokenize
from data_shards.tokenize import AROUND, NoSeam, Passage, Tokenizer
from tests.harness.rigs import tokenizers as rig

TEXTS = rig.texts(22_000)
pytestmark = pytest.mark.parametrize("family", rig.FAMILIES)


def whole(document: bytes, text: str) -> list[int]:
    """What the library makes of it at once."""
    ids: list[int] = BackendTokenizer.from_str(document.decode()).encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("name", TEXTS)
def test_long_document_has_the_tokens_of_the_whole(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "_CHARACTERS_AT_ONCE", 7000)
    document, text = rig.FAMILIES[family](), TEXTS[name]
    tokenizer, expected = Tokenizer(document), whole(document, text)
    ((tokens, exact),) = tokenizer.encode_documents([text])
    assert tokens.tolist() == [*expected, tokenizer.end_of_text]
    assert tokenizer.encode(text) == expected
    assert exact == (tokenizer.decode_all(expected) == text)
    if family in ("byte_bpe", "single_bytes", "llama"):
        assert exact


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(sorted(TEXTS)), st.lists(st.integers(1, 21_999), max_size=3), st.data())
def test_passages_together_have_the_tokens_of_the_whole(
    family: str, name: str, cuts: list[int], data: st.DataObject
) -> None:
    document, text = rig.FAMILIES[family](), TEXTS[name]
    tokenizer = Tokenizer(document)
    found = together(tokenizer, text, [0, *sorted(cuts), len(text)], data)
    assert found == [*whole(document, text), tokenizer.end_of_text]


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 99), st.floats(0, 1)), max_size=3), st.data())
def test_passages_that_begin_within_the_text_of_special_tokens_have_them_whole(
    family: str, cuts: list[tuple[int, float]], data: st.DataObject
) -> None:
    document = rig.FAMILIES[family]()
    tokenizer = Tokenizer(document, special_in_text=True)
    special, draw = list(tokenizer.special_tokens), random.Random(0)
    pieces = [*special, *(one[:-1] for one in special), *special[:1] * 2, " ", "\n", "the fox, ", "12345", "é🦉"]
    text = "".join(draw.choice(pieces) for _ in range(5000)) + tokenizer.end_token
    places = [match.span() for match in tokenizer.special_text.finditer(text)]
    spans = [places[len(places) * percent // 100] for percent, _ in cuts]
    bounds = sorted(round(first + (last - first) * part) for (first, last), (_, part) in zip(spans, cuts, strict=True))
    expected = whole(document, text)
    assert expected[-1] == tokenizer.end_of_text
    assert together(tokenizer, text, [0, *bounds, len(text)], data) == expected


def together(tokenizer: Tokenizer, text: str, bounds: list[int], data: st.DataObject) -> list[int]:
    """Return the tokens of the passages between these places, none of them empty, each with as much around it as is
    drawn."""
    parts = []
    for begin, end in pairwise(sorted(set(bounds))):
        more = data.draw(st.integers(0, 500))
        first = max(0, begin - AROUND - more)
        parts.append(Passage(text[first : end + AROUND + more], begin - first, end - first))
    return [token for tokens, _ in tokenizer.encode_documents(parts) for token in tokens.tolist()]


def test_long_special_token_is_cut_nowhere(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "_CHARACTERS_AT_ONCE", 7000)
    backend = BackendTokenizer.from_str(rig.FAMILIES[family]().decode())
    long = f"<{'the fox ' * 600}>"  # the cut is within it, and parts would not see where it begins or ends
    backend.add_special_tokens([long])
    document, text = backend.to_str().encode(), "the fox " * 600 + long + "the fox " * 600
    assert Tokenizer(document, special_in_text=True).encode(text) == whole(document, text)


def test_text_that_can_be_cut_nowhere_is_encoded_at_once_or_refused(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "_CHARACTERS_AT_ONCE", 7000)
    draw = random.Random(0)
    document, text = rig.FAMILIES[family](), "".join(draw.choice("0123456789") for _ in range(25_000))
    tokenizer = Tokenizer(document)
    assert tokenizer.encode(text) == whole(document, text)
    monkeypatch.setattr(tokenize, "_LARGEST_WHOLE", 20_000)
    if family in ("llama", "word_piece"):  # three digits from the left; a single word
        with pytest.raises(NoSeam):
            tokenizer.encode(text)
    else:
        assert tokenizer.encode(text) == whole(document, text)
