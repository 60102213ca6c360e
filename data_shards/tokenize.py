"""Byte-level BPE trained on one's own text: any UTF-8 text round-trips, and no vocabulary is downloaded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from data_shards.privacy import withhold
from swarm.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
END_TOKENS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<｜end▁of▁sentence｜>", "<|im_end|>", "<|eot_id|>")
"""What families of models call it. Of a tokenizer that nobody names one for, the first that it has ends documents."""
BYTE_SYMBOLS = 256

_ENCODE_AT_ONCE, _CHARACTERS_AT_ONCE = 64, 1 << 18
"""Documents and characters that are encoded together: a character takes 150 bytes of memory meanwhile."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """The JSON of a tokenizer trained on ``texts``: 256 byte symbols, one end-of-text token, and merges.

    Deterministic: the same texts in the same order give the same bytes. The vocabulary is smaller than asked when the
    texts do not hold enough pairs to merge. Source: Sennrich et al., arXiv 1508.07909, on bytes as in GPT-2.
    Cost: about 0.7 s per megabyte on one core; the call cannot be interrupted, so pass a sample of large corpora.
    Raises ConfigError for a vocabulary that cannot hold the bytes.
    """
    if vocab_size <= BYTE_SYMBOLS:
        raise ConfigError(
            "vocab_size", vocab_size, f"at least {BYTE_SYMBOLS + 1}", "Bytes and end-of-text need that many."
        )
    backend = BackendTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with withhold("training the tokenizer"):
        backend.train_from_iterator(texts, trainer)
        return backend.to_str().encode()


def tokenizer_digest(document: bytes) -> str:
    """Hex sha256 of a tokenizer's JSON: what a run manifest and every shard name it by."""
    return hashlib.sha256(document).hexdigest()


class Tokenizer:
    """A tokenizer loaded from its JSON.

    Args:
        document: The contents of its ``tokenizer.json``.
        end_token: What ends a document; None: the first of :data:`END_TOKENS` that it has.

    Raises:
        ConfigError: That JSON is none, or has no end token.
    """

    def __init__(self, document: bytes, end_token: str | None = None) -> None:
        self.digest = tokenizer_digest(document)
        remedy = "Use the tokenizer.json that the run was made with."
        try:
            self._backend = BackendTokenizer.from_str(document.decode())
            self._backend.no_padding()  # a file may ask for any length: rows are cut here, by the run's
            self._backend.no_truncation()
        except Exception as error:
            raise ConfigError("tokenizer", self.digest[:16], "a tokenizer.json", remedy) from error
        ends = (self._backend.token_to_id(name) for name in ((end_token,) if end_token else END_TOKENS))
        end = next((token for token in ends if token is not None), None)
        if end is None:
            allowed = f"one with the token {end_token}" if end_token else f"one with a token of {', '.join(END_TOKENS)}"
            remedy = "Give it with the tokenizer_config.json beside it, whose eos_token says what ends a text."
            raise ConfigError("tokenizer", self.digest[:16], allowed, remedy, why="it has no token that ends a text")
        self.end_of_text: int = end
        self.end_token = str(self._backend.id_to_token(end))
        added = self._backend.get_added_tokens_decoder()
        self.special_tokens = {token.content: number for number, token in added.items() if token.special}
        self.special_ids = frozenset(self.special_tokens.values())
        # A document that happens to contain the marker must not end there: it is encoded as ordinary bytes.
        self._backend.encode_special_tokens = True

    @property
    def vocab_size(self) -> int:
        """Number of token ids, the end-of-text token included."""
        return self._backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Token ids of one text, without an end-of-text token."""
        with withhold("encoding a text"):
            return self._backend.encode(text, add_special_tokens=False).ids

    def encode_ordinary(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a text in which nothing is a special token, and where each is in it."""
        with withhold("encoding a text"):
            encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def encode_with_special(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The same of a text whose special tokens are meant: for what a chat template has written."""
        self._backend.encode_special_tokens = False
        try:
            return self.encode_ordinary(text)
        finally:
            self._backend.encode_special_tokens = True

    def encode_documents(self, documents: Iterable[str]) -> Iterator[npt.NDArray[np.uint32]]:
        """One array per document, its end-of-text token last. Cost: about 0.3 s per megabyte on one core."""
        batch: list[str] = []
        size = 0
        for document in documents:
            if len(document) > _CHARACTERS_AT_ONCE:
                yield from self._encode_batch(batch)
                yield self._encode_long(document)
                batch, size = [], 0
                continue
            batch.append(document)
            size += len(document)
            if len(batch) >= _ENCODE_AT_ONCE or size > _CHARACTERS_AT_ONCE:
                yield from self._encode_batch(batch)
                batch, size = [], 0
        yield from self._encode_batch(batch)

    def _encode_batch(self, batch: list[str]) -> Iterator[npt.NDArray[np.uint32]]:
        with withhold("encoding documents"):
            encodings = self._backend.encode_batch_fast(batch, add_special_tokens=False)
        for encoding in encodings:
            ids = encoding.ids
            ids.append(self.end_of_text)
            yield np.array(ids, dtype=np.uint32)

    def _encode_long(self, document: str) -> npt.NDArray[np.uint32]:
        """Encode a document in pieces of whole lines, else words: all at once it would take gigabytes."""
        parts: list[npt.NDArray[np.uint32]] = []
        begin = 0
        while begin < len(document):
            end = begin + _CHARACTERS_AT_ONCE
            if end < len(document):
                cut = max(document.rfind("\n", begin + 1, end), document.rfind(" ", begin + 1, end))
                end = cut if cut > begin else end
            parts.append(np.array(self.encode(document[begin:end]), dtype=np.uint32))
            begin = end
        return np.concatenate([*parts, np.array([self.end_of_text], dtype=np.uint32)])

    def decode_all(self, tokens: Sequence[int]) -> str:
        """The text of token ids with that of special tokens: for people to look at."""
        with withhold("decoding tokens"):
            return self._backend.decode(list(tokens), skip_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids; end-of-text is left out and bytes that are no UTF-8 become U+FFFD."""
        with withhold("decoding tokens"):
            return self._backend.decode(list(tokens), skip_special_tokens=True)
