"""Tokenizers that come from peers: those of known families are loaded, hostile ones are refused by name; and templates
that a model comes with, which a child writes with within its limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from peers.data import foreign_tokenizer
from peers.data.building import build_from_files
from peers.data.foreign_tokenizer import backtracks, check_foreign_tokenizer, problems
from peers.data.tokenizer_files import read_encoding
from swarm.errors import ConfigError
from tests.harness.rigs.chat import CHAT, write_model

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
POSSESSIVE = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s"
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
)
HAN = r"[一-龥\u3040-ゟ゠-ヿ]+"


def tokenizer(normalizer: Any = None, pre_tokenizer: Any = None, decoder: Any = None) -> Tokenizer:
    made = Tokenizer(models.BPE({"a": 0, "<|endoftext|>": 1}, []))
    made.normalizer, made.pre_tokenizer, made.decoder = normalizer, pre_tokenizer, decoder
    return made


def split(regex: str) -> Any:
    return pre_tokenizers.Split(Regex(regex), "isolated")


FAMILIES = {
    "gpt2, opt, phi": tokenizer(None, pre_tokenizers.ByteLevel(), decoders.ByteLevel()),
    "llama, mistral": tokenizer(
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        None,
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    ),
    "llama 3, qwen, smollm": tokenizer(
        normalizers.NFC(),
        pre_tokenizers.Sequence([split(LLAMA3), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
    ),
    "gpt_oss": tokenizer(None, split(GPT4O)),
    "deepseek": tokenizer(None, pre_tokenizers.Sequence([split(r"\p{N}{1,3}"), split(HAN), split(DEEPSEEK)])),
    "bloom": tokenizer(None, split(BLOOM)),
    "falcon, starcoder": tokenizer(
        None,
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Punctuation(),
                pre_tokenizers.ByteLevel(),
                pre_tokenizers.Digits(),
                split("[0-9][0-9][0-9]"),
            ]
        ),
    ),
    "gemma": tokenizer(normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")),
    "xglm": tokenizer(
        normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]),
        pre_tokenizers.Metaspace(),
    ),
    "bert": tokenizer(normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()),
}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_tokenizer_of_a_known_family_has_no_problem(name: str) -> None:
    assert list(problems(FAMILIES[name])) == []


@pytest.mark.parametrize("regex", [GPT2, LLAMA3, GPT4O, POSSESSIVE, BLOOM, DEEPSEEK, HAN, r"\s{2,}", r"a(?:b|c)?d"])
def test_pattern_of_a_known_family_does_not_backtrack(regex: str) -> None:
    assert backtracks(regex) == ""


@pytest.mark.parametrize(
    ("regex", "why"),
    [
        (r"(a+)+$", "repeats what repeats without bound"),
        (r"((?:[a-z]+\d?)*)x", "repeats what repeats without bound"),
        (r"(a|a)*b", "repeats a choice without bound"),
        (r"(a|ab){2,}c", "repeats a choice without bound"),
        (r"(a+)\1", "refers to what it has matched"),
        (r"\s*\s*\s*\s*x", "in a row"),
        (r"(", "cannot be understood"),
        (r"(?#[)(([b-z]a?)+ ?)+[\x01\x02](?#])", "has a group of a kind that is not known"),
        ("(?x)#[\n(z+)+q\n#]\n", "has a group of a kind that is not known"),
        (r"(?:[b-z]{1,200} ?){1,200}[\x01\x02]", "repeats what repeats without bound"),
    ],
)
def test_pattern_that_may_take_for_ever_is_found(regex: str, why: str) -> None:
    assert why in backtracks(regex)


@pytest.mark.parametrize(
    ("hostile", "why"),
    [
        (tokenizer(normalizers.Sequence([normalizers.Replace("a", "a" * 100)] * 4)), "100000000 times as long"),
        (tokenizer(normalizers.Replace(Regex(""), "b" * 80)), "81 times as long"),
        (tokenizer(normalizers.Prepend("x" * 1000)), "puts 1000 characters in"),
        (tokenizer(None, split("(a+)+$")), r"'(a+)+$' of its pre_tokenizer repeats"),
        (tokenizer(None, split("a" * 5000)), "a regular expression of 5000 characters"),
    ],
)
def test_hostile_rule_is_refused_by_name(hostile: Tokenizer, why: str) -> None:
    assert why in next(problems(hostile))


def test_foreign_tokenizer_is_looked_at_in_a_child() -> None:
    check_foreign_tokenizer(FAMILIES["gemma"].to_str().encode())
    with pytest.raises(ConfigError, match=r"safe to load.*Do not train with it") as refused:
        check_foreign_tokenizer(tokenizer(None, split("(a+)+$")).to_str().encode())
    assert "(a+)+$" in refused.value.why
    with pytest.raises(ConfigError) as refused:
        check_foreign_tokenizer(b'{"model": 1}')
    assert "no tokenizer.json" in refused.value.why


def test_child_that_is_ended_by_its_limits_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_tokenizer.sys, "executable", "/bin/false")
    with pytest.raises(ConfigError) as refused:
        check_foreign_tokenizer(b"{}")
    assert "more than 2 s, or 512 MiB" in refused.value.why


def test_tokenizer_that_adds_too_much_to_a_text_is_refused() -> None:
    adding = tokenizer()
    adding.post_processor = processors.TemplateProcessing(single="a " * 17 + "$A", special_tokens=[("a", 0)])
    assert list(problems(adding)) == ["its post_processor puts more than 16 tokens around a text"]


@pytest.mark.parametrize(
    ("hostile", "why", "limit_s"),
    [
        ("{% for a in range(99999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "takes more than 0.25 s",
         0.25),
        ("{% set ns = namespace(a='x' * 1000) %}{% for a in range(40) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
         "takes more than 512 MiB", 60.0),
        ("{{ 'x' * 2000000 }}", "writes at most", 60.0),
        ("{{ ''.__class__.__mro__ }}", "the sandbox forbids", 60.0),
    ],
)  # fmt: skip
def test_hostile_template_is_ended_by_its_limits(
    tmp_path: Path, hostile: str, why: str, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peers.data.encoder.CPU_S", limit_s)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}))
    encoding = read_encoding(write_model(tmp_path / "model", template=hostile), key="TEXT")
    with pytest.raises(ConfigError, match=why) as caught:
        build_from_files([tmp_path / "chats.jsonl"], tmp_path / "shard", encoding)
    assert caught.value.key == "the chat template"
    assert not list(tmp_path.glob(".shard*"))
