from __future__ import annotations

import subprocess
import sys

import pytest
from tokenizers import Tokenizer as BackendTokenizer

from data_shards.chat import encode_completion
from data_shards.tokenize import END_OF_TEXT, Passage, Tokenizer, tokenizer_digest, train_tokenizer
from swarm.errors import ConfigError, StateError
from tests.harness.rigs.data_shards import SECRET
from tests.harness.rigs.tokenizers import BEGIN, END, FAMILIES, wrapped

AWKWARD = ["", "plain", " leading and trailing ", "tabs\tand\nnewlines\r\n", "Grüße, 東京 🦉", "\x00\x01", END_OF_TEXT]


@pytest.mark.parametrize("text", AWKWARD)
def test_tokenizer_any_text_round_trips(tokenizer_json: bytes, text: str) -> None:
    tokenizer = Tokenizer(tokenizer_json)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_marker_inside_a_document_is_ordinary_text(tokenizer_json: bytes) -> None:
    tokenizer = Tokenizer(tokenizer_json)
    assert tokenizer.end_of_text not in tokenizer.encode(f"a {END_OF_TEXT} b")


def test_train_tokenizer_same_texts_in_another_process_gives_same_bytes(
    documents: list[str], tokenizer_json: bytes
) -> None:
    program = (
        "import sys, json; from data_shards.tokenize import train_tokenizer, tokenizer_digest;"
        "print(tokenizer_digest(train_tokenizer(json.load(sys.stdin), 400)))"
    )
    import json

    result = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(documents), capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == tokenizer_digest(tokenizer_json)


def test_train_tokenizer_vocabulary_below_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 257"):
        train_tokenizer(["text"], 256)


@pytest.mark.parametrize("document", [b"", b"{}", b"\xff\xfe", b'{"version": "1.0"}'])
def test_tokenizer_foreign_json_is_refused(document: bytes) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer(document)


def test_encode_failing_on_private_text_withholds_it(tokenizer_json: bytes) -> None:
    lone_surrogate = f"{SECRET} \ud800"
    with pytest.raises(StateError) as caught:
        Tokenizer(tokenizer_json).encode(lone_surrogate)
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__


def test_tokenizer_neither_pads_nor_cuts_whatever_its_file_asks_for(tokenizer_json: bytes) -> None:
    backend = BackendTokenizer.from_str(tokenizer_json.decode())
    backend.enable_padding(length=5000)
    backend.enable_truncation(2)
    text = "one text that is longer than two tokens"
    tokens = Tokenizer(backend.to_str().encode()).encode(text)
    assert tokens == Tokenizer(tokenizer_json).encode(text)


@pytest.mark.parametrize(
    ("template", "begins", "ends"),
    [
        ("$A", [], [END]),
        ("<s> $A", [BEGIN], [END]),
        ("<s> $A </s>", [BEGIN], [END]),
        ("</s> $A", [END], [END]),
        ("<s> $A </s> <s>", [BEGIN], [BEGIN, END]),
    ],
)
def test_what_a_tokenizer_adds_is_around_every_document_and_one_end(
    monkeypatch: pytest.MonkeyPatch, template: str, begins: list[str], ends: list[str]
) -> None:
    monkeypatch.setattr("data_shards.tokenize._CHARACTERS_AT_ONCE", 8000)
    tokenizer = Tokenizer(wrapped(FAMILIES["metaspace"](), template), END)
    first, last = ([tokenizer.special_tokens[name] for name in names] for names in (begins, ends))
    text = "the quick brown fox " * 2000
    spans = [Passage(text, 0, 20_000), Passage(text, 20_000, 30_000), Passage(text, 30_000, 40_000)]
    for documents in ([text], spans):
        found = [token for tokens, _ in tokenizer.encode_documents(documents) for token in tokens.tolist()]
        assert found == [*first, *tokenizer.encode(text), *last]
    ((short, _),) = tokenizer.encode_documents(["the fox"])
    assert short.tolist() == [*first, *tokenizer.encode("the fox"), *last]
    assert tokenizer.opening == (first or [tokenizer.end_of_text])
    assert tokenizer.frame == " ".join((*begins, "…", *ends))


@pytest.mark.parametrize("text", ["<s>the fox</s>", "the fox</s>", "<s>the fox", "the fox", "</s>"])
def test_what_a_text_with_special_tokens_has_around_it_is_not_put_there_again(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    tokenizer = Tokenizer(wrapped(FAMILIES["metaspace"](), "<s> $A </s>"), END, special_in_text=True)
    begin, end = (tokenizer.special_tokens[name] for name in (BEGIN, END))
    ids = tokenizer.encode(text)
    expected = [begin] * (ids[0] != begin) + ids + [end] * (ids[-1] != end)
    assert (expected.count(begin), expected.count(end)) == (1, 1)
    ((short, _),) = tokenizer.encode_documents([text])
    pair, counted, _ = encode_completion(tokenizer, text[:1], text[1:])
    assert short.tolist() == pair.tolist() == expected
    assert counted[0] == (ids[0] == begin), "what is put before a prompt is not learnt"
    assert counted[-1]
    monkeypatch.setattr("data_shards.tokenize._CHARACTERS_AT_ONCE", 2)
    ((parts, _),) = tokenizer.encode_documents([text])
    assert parts.tolist() == expected


@pytest.mark.parametrize("template", ["<s> " * 20 + "$A", "$A </s> $A"])
def test_tokenizer_that_adds_too_much_to_a_text_or_within_it_is_refused(template: str) -> None:
    document = wrapped(FAMILIES["metaspace"](), template)
    with pytest.raises(ConfigError, match="at most 16 tokens that it has around a text"):
        Tokenizer(document)
