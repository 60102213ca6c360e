"""Documents to token ids and back; and byte-level BPE trained on one's own text, so that no vocabulary is downloaded.

**The tokens of a document are those of the whole of it**, however long it is. One that is too long to be encoded at
once is encoded in parts, each with some of what is around it, which are joined where the tokens do not depend on how
much that is: see :class:`Seam`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from data_shards.privacy import Private, withhold
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as BackendTokenizer

END_OF_TEXT = "<|endoftext|>"
END_TOKENS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<｜end▁of▁sentence｜>", "<|im_end|>", "<|eot_id|>")
"""What families of models call it. Of a tokenizer that nobody names one for, the first that it has ends documents."""
BYTE_SYMBOLS = 256

_ENCODE_AT_ONCE, _CHARACTERS_AT_ONCE = 64, 1 << 17
"""Documents and characters that are encoded together: a character takes 150 bytes of memory meanwhile."""
_LARGEST_WHOLE = 1 << 20
"""Characters of a document that is encoded at once where its parts cannot be joined."""
_REACHES = ((509, 1030), (4093, 8192), (8179, 16370))
"""How far to both sides of a cut two looks at a text go, in characters. They differ by primes: rules that count, as
those that put digits together by three, would hardly give both the same tokens if these depended on where it begins."""
AROUND = _REACHES[-1][-1]
"""Characters around a passage on which its tokens may depend."""
MOST_ADDED = 16
"""Tokens that a tokenizer may add to a document."""
_ALIKE = 16
"""Tokens on both sides of a seam on which two looks agree."""


@dataclass(frozen=True, slots=True, repr=False)
class Passage(Private):
    """A part of a document, from ``begin`` up to ``end`` of a text that has what is around it, at least
    :data:`AROUND` characters: where these are 0 and the text's length, the document begins and ends there."""

    text: str
    begin: int
    end: int

    @classmethod
    def of(cls, document: str | Passage) -> Passage:
        """Return the passage that a document is: all of it, unless it is one."""
        return document if isinstance(document, Passage) else cls(document, 0, len(document))

    def private_size(self) -> str:
        """See :class:`Private`."""
        return f"{self.end - self.begin} characters"


@dataclass(frozen=True, slots=True, repr=False)
class Seam(Private):
    """Where a text can be encoded in two parts that give the tokens of the whole.

    Two looks at the text around, which begin and end at different places, have the same tokens at the same places
    there, and words that begin at the same places. So do those of both parts, or there is an error: nothing is joined
    that does not fit. It depends on the text around alone, so that anyone who encodes either part finds the same.
    """

    at: int
    """The character."""
    begin: int
    end: int
    """Of the smaller look."""
    before: list[int]
    after: list[int]
    """Token ids of that look, up to the character and from it on."""

    def private_size(self) -> str:
        """See :class:`Private`."""
        return f"{len(self.before)} and {len(self.after)} tokens"


class NoSeam(Exception):
    """A text that is too long to be encoded at once, and can be cut nowhere near a place where it must be."""

    def refusal(self, key: str, value: str, where: str) -> ConfigError:
        """Return the error for a text that cannot be left out; ``where`` says where in it."""
        return ConfigError(
            key,
            value,
            "text that the tokenizer can be joined in, where it is too long to be encoded at once",
            "Break its longest lines, leave that part out, or take another tokenizer.",
            why=f"in {where} a word, or a run of the same character, goes on for too long",
        )


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
    from tokenizers import Tokenizer as BackendTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

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
        special_in_text: Whether the text of a special token in a document stands for it.

    Raises:
        ConfigError: That JSON is none, or has no end token.
    """

    def __init__(self, document: bytes, end_token: str | None = None, *, special_in_text: bool = False) -> None:
        from tokenizers import Tokenizer as BackendTokenizer

        self.digest = tokenizer_digest(document)
        remedy = "Use the tokenizer.json that the run was made with."
        try:
            self._backend = BackendTokenizer.from_str(document.decode())
            self._backend.no_padding()  # a file may ask for any length: rows are cut here, by the run's
            self._backend.no_truncation()
            plain, framed = (self._backend.encode("a", add_special_tokens=whole) for whole in (False, True))
        except Exception as error:
            raise ConfigError("tokenizer", self.digest[:16], "a tokenizer.json", remedy) from error
        known = (self._backend.token_to_id(name) for name in ((end_token,) if end_token else END_TOKENS))
        end = next((token for token in known if token is not None), None)
        if end is None:
            allowed = f"one with the token {end_token}" if end_token else f"one with a token of {', '.join(END_TOKENS)}"
            remedy = "Give it with the tokenizer_config.json next to it, whose eos_token says what ends a text."
            raise ConfigError("tokenizer", self.digest[:16], allowed, remedy, why="it has no token that ends a text")
        self.end_of_text: int = end
        self.end_token = str(self._backend.id_to_token(end))
        added = self._backend.get_added_tokens_decoder()
        self.special_tokens = {token.content: number for number, token in added.items() if token.special}
        self.special_ids = frozenset(self.special_tokens.values())
        longest_first = sorted(filter(None, self.special_tokens), key=len, reverse=True)
        self.special_text = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        # A document that happens to contain the marker must not end there: it is encoded as ordinary bytes.
        self._backend.encode_special_tokens = not special_in_text
        self.exact = _is_exact(self._backend)
        self._special_in_text = special_in_text
        self._longest_added = max((len(token.content) for token in added.values()), default=0)
        self.begins, ends = self._added(plain.ids, framed)
        self.ends = [token for token in ends if token != end] + [end]

    def _added(self, plain: list[int], whole: Encoding) -> tuple[list[int], list[int]]:
        """Ids that the tokenizer's own post-processor puts before and after a text, of which both are given."""
        ids, mask = whole.ids, whole.special_tokens_mask
        first = next((place for place, added in enumerate(mask) if not added), len(ids))
        begins, ends = ids[:first], ids[first + len(plain) :]
        known = all(self._backend.id_to_token(token) is not None for token in (*begins, *ends))
        if ids != begins + plain + ends or not sum(mask) == len(begins + ends) <= MOST_ADDED or not known:
            allowed = f"a tokenizer.json that puts at most {MOST_ADDED} tokens that it has around a text"
            remedy = "Correct its post_processor, or take another tokenizer."
            raise ConfigError("tokenizer", self.digest[:16], allowed, remedy)
        return begins, ends

    @property
    def opening(self) -> list[int]:
        """Return what the first token of a text is foretold from: what the tokenizer puts before it, else the
        end-of-text token of the document before."""
        return self.begins or [self.end_of_text]

    @property
    def frame(self) -> str:
        """Return how a document of text is written, in words: ``<s> … </s>``."""
        before, after = ([str(self._backend.id_to_token(token)) for token in ids] for ids in (self.begins, self.ends))
        return " ".join((*before, "…", *after))

    @property
    def vocab_size(self) -> int:
        """Number of token ids, the end-of-text token included."""
        return self._backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Token ids of one text, without those that stand before and after a document. Raises :class:`NoSeam`."""
        tokens, _ = self._encoded(Passage.of(text))
        return list(map(int, tokens))

    def encode_with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of one text as of a document, without an end-of-text token, and where each is in it."""
        with withhold("encoding a text"):
            encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def encode_ordinary(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The same of a text in which nothing is a special token."""
        return self._encode_as(text, special=False)

    def encode_with_special(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The same of a text whose special tokens are meant: for what a chat template has written."""
        return self._encode_as(text, special=True)

    def _encode_as(self, text: str, *, special: bool) -> tuple[list[int], list[tuple[int, int]]]:
        before, self._backend.encode_special_tokens = self._backend.encode_special_tokens, not special
        try:
            return self.encode_with_places(text)
        finally:
            self._backend.encode_special_tokens = before

    def encode_documents(self, documents: Iterable[str | Passage]) -> Iterator[tuple[npt.NDArray[np.uint32], bool]]:
        """One array per document, with the tokens that the tokenizer itself puts around it and its end-of-text token
        last, and whether decoding it gives the text back. A passage is a part of a document: put together they have
        the tokens of all of it, and one end-of-text token.

        Cost: about 0.3 s per megabyte on one core. Raises :class:`NoSeam`.
        """
        batch: list[str] = []
        size = 0
        for document in documents:
            if isinstance(document, Passage) or len(document) > _CHARACTERS_AT_ONCE:
                yield from self._encode_batch(batch)
                passage = Passage.of(document)
                tokens, exact = self._encoded(passage)
                begins, ends = self.around(tokens)
                begins = begins if passage.begin == 0 else []
                ends = ends if passage.end == len(passage.text) else []
                yield np.concatenate([begins, tokens, ends]).astype(np.uint32), exact
                batch, size = [], 0
                continue
            batch.append(document)
            size += len(document)
            if len(batch) >= _ENCODE_AT_ONCE or size > _CHARACTERS_AT_ONCE:
                yield from self._encode_batch(batch)
                batch, size = [], 0
        yield from self._encode_batch(batch)

    def _encode_batch(self, batch: list[str]) -> Iterator[tuple[npt.NDArray[np.uint32], bool]]:
        with withhold("encoding documents"):
            encodings = self._backend.encode_batch_fast(batch, add_special_tokens=False)
        for text, encoding in zip(batch, encodings, strict=True):
            ids = encoding.ids
            begins, ends = self.around(ids)
            yield np.array([*begins, *ids, *ends], dtype=np.uint32), self.gives_back(ids, text)

    def around(self, ids: Sequence[int] | npt.NDArray[np.uint32]) -> tuple[list[int], list[int]]:
        """Return what is put before and behind these tokens of a text; of one with special tokens not what it has
        already."""
        begins, ends = self.begins, self.ends
        if not self._special_in_text:
            return begins, ends
        return [] if list(ids[: len(begins)]) == begins else begins, [] if list(ids[-1:]) == ends[-1:] else ends

    def gives_back(self, ids: Sequence[int], text: str) -> bool:
        """Return whether decoding the token ids of a text gives it back."""
        return self.exact or self.decode_all(ids) == text

    # --- long texts, in parts ---

    def _encoded(self, passage: Passage) -> tuple[npt.NDArray[np.uint32], bool]:
        """Token ids of a passage, and whether decoding gives it back."""
        text, begin, end = passage.text, passage.begin, passage.end
        pieces = max(1, round((end - begin) / _CHARACTERS_AT_ONCE))
        cuts = [begin + (end - begin) * piece // pieces for piece in range(pieces + 1)]
        try:
            seams = [self._seam(text, cut) if 0 < cut < len(text) else None for cut in cuts]
            found = [self._between(text, left, right) for left, right in pairwise(seams)]
        except NoSeam:
            if end - begin < len(text) or len(text) > _LARGEST_WHOLE:
                raise
            found = [self._between(text, None, None)]
        return np.concatenate([tokens for tokens, _ in found]), all(exact for _, exact in found)

    def _between(self, text: str, left: Seam | None, right: Seam | None) -> tuple[npt.NDArray[np.uint32], bool]:
        """Token ids from one seam to another; None: from the beginning, to the end."""
        if left is not None and right is not None and left.at >= right.at:
            if left.at > right.at:
                raise NoSeam
            return np.empty(0, np.uint32), True
        window = text[0 if left is None else left.begin : len(text) if right is None else right.end]
        with withhold("encoding a text"):
            ids: list[int] = self._backend.encode_batch_fast([window], add_special_tokens=False)[0].ids
        first = 0 if left is None else len(left.before)
        last = len(ids) if right is None else len(ids) - len(right.after)
        fits_left = left is None or ids[: first + _ALIKE] == left.before + left.after[:_ALIKE]
        fits_right = right is None or ids[max(0, last - _ALIKE) :] == right.before[-_ALIKE:] + right.after
        if not (fits_left and fits_right and first <= last):
            raise NoSeam
        exact = self.exact or _trimmed(self.decode_all(ids), left, right) == _trimmed(window, left, right)
        return np.array(ids[first:last], dtype=np.uint32), exact

    def _seam(self, text: str, cut: int) -> Seam:
        """The seam that is nearest to a cut. Raises :class:`NoSeam`."""
        for reach, further in _REACHES:
            if further - reach < self._longest_added:  # the text of one such token could reach over both looks
                continue
            with withhold("encoding a text"):
                near, far = (self._look(text, cut - wide, cut + wide) for wide in (reach, further))
            again = {token: place for place, token in reversed(list(enumerate(far)))}
            worded = any(token.word for token in (*near, *far) if abs(token.begin - cut) < reach)
            places = [place for place in range(1, len(near)) if near[place].word or not worded]
            for place in sorted(places, key=lambda place: abs(near[place].begin - cut)):
                token, previous = near[place], near[place - 1]
                there = again.get(token)
                if there is None or not previous.begin < token.begin or previous.end > token.begin:
                    continue
                before, after = near[max(0, place - _ALIKE) : place], near[place : place + _ALIKE]
                if (
                    (len(before) == _ALIKE or cut <= reach)
                    and (len(after) == _ALIKE or cut + reach >= len(text))
                    and before == far[max(0, there - len(before)) : there]
                    and after == far[there : there + len(after)]
                ):
                    ids = [one.id for one in near]
                    return Seam(token.begin, max(0, cut - reach), cut + reach, ids[:place], ids[place:])
        raise NoSeam

    def _look(self, text: str, begin: int, end: int) -> list[_Token]:
        """The tokens of a part of a text, and where each is in that."""
        begin = max(0, begin)
        encoding = self._backend.encode(text[begin:end], add_special_tokens=False)
        worded = (False, *(word != before for before, word in pairwise(encoding.word_ids)))
        return [
            _Token(token, begin + first, begin + last, word)
            for token, (first, last), word in zip(encoding.ids, encoding.offsets, worded, strict=False)
        ]

    def decode_all(self, tokens: Sequence[int]) -> str:
        """The text of token ids with that of special tokens: for people to look at."""
        with withhold("decoding tokens"):
            return self._backend.decode(list(tokens), skip_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids; end-of-text is left out and bytes that are no UTF-8 become U+FFFD."""
        with withhold("decoding tokens"):
            return self._backend.decode(list(tokens), skip_special_tokens=True)


class _Token(NamedTuple):
    """A token id, the characters that it is, and whether a word begins with it."""

    id: int
    begin: int
    end: int
    word: bool


def _trimmed(text: str, left: Seam | None, right: Seam | None) -> str:
    """The same without the spaces at ends that a document has not: those at its own a tokenizer may take away."""
    text = text if left is None else text.lstrip()
    return text if right is None else text.rstrip()


def _is_exact(backend: BackendTokenizer) -> bool:
    """Return whether it is known without a look that decoding gives any text back: its tokens are made of the text's
    bytes."""
    from tokenizers import decoders, models, pre_tokenizers

    steps = json.loads(backend.pre_tokenizer.__getstate__()) if backend.pre_tokenizer is not None else {}
    rules = steps.get("pretokenizers", [steps])
    removed = any(rule.get("behavior") == "Removed" or rule.get("add_prefix_space") for rule in rules)
    bytewise = any(rule.get("type") == "ByteLevel" for rule in rules)
    known = all(rule.get("type") in ("ByteLevel", "Split", "Digits") for rule in rules)
    model = backend.model
    plain = isinstance(model, models.BPE) and not (model.continuing_subword_prefix or model.end_of_word_suffix)
    added = backend.get_added_tokens_decoder()
    return (
        backend.normalizer is None
        and isinstance(backend.decoder, decoders.ByteLevel)
        and bytewise
        and known
        and not removed
        and plain
        and not any(token.lstrip or token.rstrip for token in added.values())
        and all(backend.decode([one], skip_special_tokens=False) == token.content for one, token in added.items())
        and all(backend.token_to_id(symbol) is not None for symbol in pre_tokenizers.ByteLevel.alphabet())
    )
