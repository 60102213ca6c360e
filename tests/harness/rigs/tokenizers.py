"""Tiny tokenizers of each family, and texts on which they differ."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from data_shards.tokenize import train_tokenizer

END, BEGIN, UNKNOWN = "</s>", "<s>", "<unk>"
SPECIAL = [UNKNOWN, BEGIN, END]
_SAMPLE = [
    "the quick brown fox jumps over the lazy dog, and the owl sees 1234 mice in 56.78 seconds.",
    "def value(self) -> int:\n    return self._value  # of it\n\n\nclass Owl:\n    pass\n",
] * 4
_LLAMA = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_bpe() -> bytes:
    """Byte-level BPE as ours."""
    return train_tokenizer(_SAMPLE, 400)


def single_bytes() -> bytes:
    """A token a byte."""
    return train_tokenizer([""], 257)


def llama() -> bytes:
    """Byte-level BPE that puts digits together by three, from the left."""
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_LLAMA), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return _trained(backend, sorted(pre_tokenizers.ByteLevel.alphabet()))


def metaspace() -> bytes:
    """As SentencePiece: a space before the first word."""
    backend = Tokenizer(models.BPE(unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return _trained(backend)


def prepend() -> bytes:
    """As SentencePiece with a normalizer and without words: a text is one."""
    document = json.loads(metaspace())
    space = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    document |= {
        "pre_tokenizer": None,
        "normalizer": json.loads(space.__getstate__()),
        "decoder": json.loads(decoders.Sequence(back).__getstate__()),
    }
    model = document["model"]
    model |= {"byte_fallback": True, "fuse_unk": True}
    for byte in range(256):
        model["vocab"].setdefault(f"<0x{byte:02X}>", len(model["vocab"]))
    return json.dumps(document).encode()


def word_piece() -> bytes:
    """WordPiece: letters become small, spaces and what it does not know are gone."""
    backend = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(_SAMPLE, trainer)
    return backend.to_str().encode()


def _trained(backend: Tokenizer, alphabet: list[str] | None = None) -> bytes:
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet or [], show_progress=False
    )
    backend.train_from_iterator(_SAMPLE, trainer)
    return backend.to_str().encode()


FAMILIES: dict[str, Callable[[], bytes]] = {
    made.__name__: cache(made) for made in (byte_bpe, single_bytes, llama, metaspace, prepend, word_piece)
}


def wrapped(document: bytes, template: str) -> bytes:
    """The same with a post-processor as models have it: ``"<s> $A </s>"``."""
    backend = Tokenizer.from_str(document.decode())
    special = [(name, backend.token_to_id(name)) for name in SPECIAL if name in template]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return backend.to_str().encode()


def texts(size: int) -> dict[str, str]:
    """Texts of about so many characters each, of every kind that a tokenizer or a reader could cut at another place."""
    draw = random.Random(0)
    odd = ["a b", "\n" * 30, " " * 50, "word", "\t\t", "é漢字🦉", "e\u0301", "\r", "0123456789", "\ufeff", "--" * 30]
    made = {
        "code": _SAMPLE[1],
        "table": "1,22,333\t0004444  x\n98765,43210,-.5\n",
        "poem": "Roses are red,\u2028\tviolets\x0care blue\x85\r\n\r\n\r\n",
        "line": "the quick brown fox, ",
    }
    found = {name: text * (size // len(text) + 1) for name, text in made.items()}
    return found | {"mixed": "".join(draw.choice(odd) for _ in range(size // 8))}
