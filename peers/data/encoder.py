"""Blocks of text to tokens, in processes of their own: one a core.

A child gets blocks on its standard input and answers each on its standard output. It ends when its input does, so that
none outlives its parent. Nothing is pickled: a message is a line of JSON and the bytes whose sizes it lists.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from data_shards.chat import ChatEncoder, encode_completion
from data_shards.draft import Documents
from data_shards.messages import UnusableRecord
from data_shards.privacy import Private
from data_shards.template import ChatTemplate, RenderingFailed, TemplateSource
from data_shards.tokenize import NoSeam, Passage, Tokenizer
from peers.data.blocks import TextBlock
from peers.data.flaws import Flaw, FlawCount
from peers.data.foreign_tokenizer import CPU_S, MEMORY_BYTES, bound_memory
from peers.data.keys import KeyCount
from peers.data.records import Completion, Conversation, chat_without_template, documents_in
from swarm.errors import ConfigError, StateError

_PARTS = ("before", "body", "after")
"""What of a block is bytes."""
_FEW_BYTES = 1 << 20
"""What is encoded by this process: starting another would take longer."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """How blocks become tokens: with which tokenizer and chat template, and which key or column of records. ``key`` is
    what errors call the option that named the files, ``end_token`` and ``special_in_text`` as for
    :class:`Tokenizer`."""

    tokenizer: bytes
    key: str
    field: str | None = None
    end_token: str | None = None
    template: TemplateSource | None = None
    special_in_text: bool = False

    def make_tokenizer(self) -> Tokenizer:
        """Load it. Raises ConfigError."""
        return Tokenizer(self.tokenizer, self.end_token, special_in_text=self.special_in_text)

    def shown(self) -> dict[str, Any]:
        """All but the tokenizer, as plain data."""
        template = None if self.template is None else [self.template.text, dict(self.template.tokens)]
        said = {"key": self.key, "field": self.field, "end_token": self.end_token}
        return said | {"template": template, "special_in_text": self.special_in_text, "cpu_s": CPU_S}

    @classmethod
    def of(cls, shown: Mapping[str, Any], tokenizer: bytes) -> Encoding:
        """The reverse of :meth:`shown`."""
        template = shown["template"]
        return cls(
            tokenizer=tokenizer,
            key=shown["key"],
            field=shown["field"],
            end_token=shown["end_token"],
            template=None if template is None else TemplateSource(*template),
            special_in_text=shown["special_in_text"],
        )


@dataclass(frozen=True, slots=True, repr=False)
class Encoded(Private):
    """What a block became: its documents, their size as text in bytes, how many of them are another text when they are
    decoded, what cannot be used, and what is in no document."""

    documents: Documents
    text_bytes: int
    altered: int
    flaws: FlawCount
    keys: KeyCount

    def private_size(self) -> str:
        """See :class:`Private`."""
        return self.documents.private_size()


class BlockEncoder:
    """Encodes blocks in this process. With a template this must be a child: memory becomes bounded, and what the
    template takes longer for than ``cpu_s`` ends the process."""

    def __init__(self, encoding: Encoding, cpu_s: float = CPU_S) -> None:
        self._encoding = encoding
        self._tokenizer = encoding.make_tokenizer()
        self._chat: ChatEncoder | None = None
        if encoding.template is not None:
            import jinja2.sandbox  # noqa: F401 - before memory is bounded

            bound_memory()
            try:
                self._chat = ChatEncoder(self._tokenizer, ChatTemplate(encoding.template, lambda: _bounded(cpu_s)))
            except MemoryError:
                raise _too_much(f"{MEMORY_BYTES >> 20} MiB", "its first line") from None

    def encode(self, block: TextBlock) -> Encoded:
        """Raises ConfigError for a file or a template that cannot be used at all."""
        flaws = FlawCount(block.records, block.size)
        arrays: list[npt.NDArray[np.uint32]] = []
        masks: list[npt.NDArray[np.bool_]] = []
        texts: list[str | Passage] = []
        size = altered = 0
        keys = KeyCount()

        def take() -> None:
            nonlocal altered
            for tokens, exact in self._tokenized(texts, block, flaws):
                arrays.append(tokens)
                altered += not exact
            texts.clear()

        for found in documents_in(block, self._encoding.field, keys):
            if isinstance(found, (str, Passage)):
                texts.append(found)
                self._look_for_special(found, keys)
                text = found if isinstance(found, str) else found.text[found.begin : found.end]
                size += len(text) if text.isascii() else len(text.encode())
                continue
            if isinstance(found, (Conversation, Completion)):
                take()
                masks += [np.ones(len(array), np.bool_) for array in arrays[len(masks) :]]
                try:
                    tokens, counted, exact = self._masked(block, found, keys)
                except UnusableRecord as unusable:
                    keys.refuse(unusable)
                    if not unusable.meant:
                        flaws.note(Flaw(found.line, str(unusable), found.text_bytes))
                    continue
                arrays.append(tokens)
                masks.append(counted)
                altered += not exact
                size += found.text_bytes
            else:
                flaws.note(found)
        take()
        if masks:
            masks += [np.ones(len(array), np.bool_) for array in arrays[len(masks) :]]
        starts = np.cumsum([0, *map(len, arrays)])[:-1].tolist()
        documents = Documents(
            np.concatenate(arrays) if arrays else np.empty(0, np.uint32),
            starts[1:] if block.before else starts,
            np.concatenate(masks) if masks else None,
        )
        return Encoded(documents, size, altered, flaws, keys)

    def question(self, messages: Sequence[Mapping[str, str]]) -> npt.NDArray[np.uint32]:
        """As :meth:`ChatEncoder.question`. Raises ConfigError."""
        if self._chat is None:
            raise chat_without_template(self._encoding.key, "the prompt")
        try:
            return self._chat.question([dict(message) for message in messages])
        except RenderingFailed as error:
            remedy = "Say it otherwise, or have the text continued: --raw."
            raise ConfigError("--prompt", None, "what the chat template writes", remedy, why=str(error)) from None
        except MemoryError:
            raise _too_much(f"{MEMORY_BYTES >> 20} MiB", "the prompt") from None

    def _tokenized(
        self, texts: Sequence[str | Passage], block: TextBlock, flaws: FlawCount
    ) -> list[tuple[npt.NDArray[np.uint32], bool]]:
        """The documents as tokens, without those of records that can be encoded neither at once nor in parts."""
        try:
            return list(self._tokenizer.encode_documents(texts))
        except NoSeam as error:
            where = f"what begins at line {block.line}"
            if block.kind == "text":
                raise error.refusal(self._encoding.key, block.file, where) from None
            if len(texts) > 1:
                return [found for text in texts for found in self._tokenized([text], block, flaws)]
            size = sum(len(text.encode()) for text in texts if isinstance(text, str))
            refusal = error.refusal(self._encoding.key, block.file, where)
            flaws.note(Flaw(block.line, f"a record from here on is left out: {refusal.why}", size))
            return []

    def _look_for_special(self, document: str | Passage, keys: KeyCount) -> None:
        if not self._encoding.special_in_text:
            keys.look_for_special(document, self._tokenizer.special_text)

    def _masked(
        self, block: TextBlock, found: Conversation | Completion, keys: KeyCount
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_], bool]:
        """A document's tokens, which of them are learnt, and whether a text is the same when they are decoded."""
        if isinstance(found, Completion):
            self._look_for_special(found.prompt + found.completion, keys)
            return encode_completion(self._tokenizer, found.prompt, found.completion)
        place = f"{block.file}:{found.line}"
        if self._chat is None:
            raise chat_without_template(self._encoding.key, place)
        try:
            tokens, counted, unused = self._chat.encode(found.chat)
        except ConfigError as error:
            why = f"{error.why}; " if error.why else ""
            raise ConfigError(error.key, error.value, error.allowed, error.remedy, why=f"{why}at {place}") from None
        except MemoryError:
            raise _too_much(f"{MEMORY_BYTES >> 20} MiB", place) from None
        for key in sorted(unused):
            keys.note(key)
        return tokens, counted, True


def _too_much(limit: str, place: str) -> ConfigError:
    return ConfigError(
        "the chat template",
        None,
        f"one that takes at most {CPU_S:g} s and {MEMORY_BYTES >> 20} MiB to write a conversation",
        "Do not use it; ask the one who gave it to you where it comes from.",
        why=f"it takes more than {limit}, at {place}",
    )


def encoded_in_order(
    blocks: Iterable[TextBlock], encoding: Encoding, *, processes: int | None = None
) -> Generator[tuple[TextBlock, Encoded]]:
    """Encode blocks, several at once, and yield them in their order.

    Args:
        blocks: Read one by one, a few ahead.
        encoding: How.
        processes: At most so many; None: one a core that this process may use.

    Raises:
        ConfigError: A file cannot be used at all.
        StateError: A process ended, as where memory is short.
    """
    rest = iter(blocks)
    few: list[TextBlock] = []
    size = 0
    for block in rest if encoding.template is None else ():
        few.append(block)
        size += len(block.body)
        if size > _FEW_BYTES:
            break
    else:
        if encoding.template is None:
            encoder = BlockEncoder(encoding)
            yield from ((block, encoder.encode(block)) for block in few)
            return
    most = processes or len(os.sched_getaffinity(0))
    waiting: deque[tuple[TextBlock, Future[Encoded]]] = deque()
    with _Children(most, encoding) as children, ThreadPoolExecutor(most) as threads:
        try:
            for block in _chained(few, rest):
                waiting.append((block, threads.submit(children.encode, block)))
                if len(waiting) > 2 * most:
                    block, future = waiting.popleft()
                    yield block, future.result()
            while waiting:
                block, future = waiting.popleft()
                yield block, future.result()
        except BaseException:
            for _, future in waiting:
                future.cancel()
            children.end()
            raise


def _chained(few: list[TextBlock], rest: Iterator[TextBlock]) -> Iterator[TextBlock]:
    yield from few
    yield from rest


class PromptWriter:
    """Writes conversations with a model's chat template, in a process that is bounded; ends it when it is left.

    ``encoding`` has the template.
    """

    def __init__(self, encoding: Encoding) -> None:
        self._children = _Children(1, encoding)

    def __enter__(self) -> PromptWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._children.end()

    def tokens(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a conversation so far, with what introduces an answer behind it. Blocking.

        Raises ConfigError where the template refuses it or takes too long, StateError where the process ended.
        """
        _, (tokens,) = self._children.ask({"messages": [dict(one) for one in messages]}, (), "the prompt")
        return [int(token) for token in np.frombuffer(tokens, np.uint32)]


class _Children:
    """Processes that encode, started when one is needed and none is free."""

    def __init__(self, most: int, encoding: Encoding) -> None:
        self._encoding = encoding
        self._free: queue.SimpleQueue[subprocess.Popen[bytes] | None] = queue.SimpleQueue()
        for _ in range(most):
            self._free.put(None)
        self._all: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> _Children:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """End them."""
        for child in self._all:
            child.kill()
        for child in self._all:
            child.wait()
            for pipe in (child.stdin, child.stdout):
                with contextlib.suppress(OSError):
                    cast(BinaryIO, pipe).close()

    def encode(self, block: TextBlock) -> Encoded:
        """As :meth:`BlockEncoder.encode`. Blocking; each thread has a process to itself meanwhile."""
        header = asdict(block) | dict.fromkeys(_PARTS)
        place = f"{block.file}, in the lines from {block.line} on"
        return _answered(*self.ask(header, [getattr(block, part) for part in _PARTS], place))

    def ask(self, header: dict[str, Any], parts: Sequence[bytes], place: str) -> tuple[dict[str, Any], list[bytes]]:
        """Return what a process answers. Raises ConfigError and StateError, which name the ``place``."""
        child = self._free.get()
        try:
            if child is None:
                child = self._start()
            _send(cast(BinaryIO, child.stdin), header, *parts)
            answer, parts = _receive(cast(BinaryIO, child.stdout))
        except (EOFError, OSError, ValueError):
            code = None if child is None else child.wait()
            if code == -signal.SIGPROF:
                raise _too_much(f"{CPU_S:g} s", place) from None
            raise StateError(
                f"{place}: the process that tokenised ended"
                f"{f' with code {code}' if code else ''}: is there memory left? Type the same command again to go on."
            ) from None
        finally:
            self._free.put(child)
        if "error" in answer:
            error = answer["error"]
            raise ConfigError(error["key"], error["value"], error["allowed"], error["remedy"], why=error["why"])
        if "failed" in answer:
            raise StateError(answer["failed"])
        return answer, parts

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "TOKENIZERS_PARALLELISM": "false",
            "RAYON_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "peers.data.encoder"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a library that panics shows what it was working on
            env=environment,
            process_group=0,  # Ctrl-C is for the parent, which ends them
        )
        self._all.append(child)
        _send(cast(BinaryIO, child.stdin), self._encoding.shown(), self._encoding.tokenizer)
        return child


def _answered(answer: dict[str, Any], parts: list[bytes]) -> Encoded:
    tokens, starts, counted = parts
    documents = Documents(
        np.frombuffer(tokens, np.uint32),
        np.frombuffer(starts, np.uint64).tolist(),
        np.frombuffer(counted, np.bool_) if answer["masked"] else None,
    )
    sums = answer["text_bytes"], answer["altered"]
    return Encoded(documents, *sums, FlawCount.of(answer["flaws"]), KeyCount(**answer["keys"]))


def _send(file: BinaryIO, header: dict[str, Any], *parts: bytes) -> None:
    file.write(json.dumps(header | {"parts": [len(part) for part in parts]}).encode() + b"\n")
    for part in parts:
        file.write(part)
    file.flush()


def _receive(file: BinaryIO) -> tuple[dict[str, Any], list[bytes]]:
    line = file.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    header = json.loads(line)
    parts = [file.read(size) for size in header.pop("parts")]
    return header, parts


# --- the child's side ------------------------------------------------------------------------------------------------


def main(came: BinaryIO, out: BinaryIO) -> None:
    """Answer blocks until there are no more."""
    header, (tokenizer,) = _receive(came)
    encoding, cpu_s = Encoding.of(header, tokenizer), header["cpu_s"]
    encoder: BlockEncoder | None = None
    while True:
        try:
            header, parts = _receive(came)
        except EOFError:
            return
        try:
            encoder = encoder or BlockEncoder(encoding, cpu_s)
            if "messages" in header:
                _send(out, {}, encoder.question(header["messages"]).tobytes())
            else:
                _answer(out, encoder.encode(_block_of(header, parts)))
        except ConfigError as error:
            said = {name: getattr(error, name) for name in ("key", "value", "allowed", "remedy", "why")}
            _send(out, {"error": said})
        except StateError as error:
            _send(out, {"failed": str(error)})


def _block_of(header: dict[str, Any], parts: Sequence[bytes]) -> TextBlock:
    flaws = tuple(Flaw(*one) for one in header["flaws"])
    lists = {"lines": tuple(header["lines"]), "flaws": flaws, "unread": tuple(header["unread"])}
    return TextBlock(**header | lists | dict(zip(_PARTS, parts, strict=True)))


@contextlib.contextmanager
def _bounded(cpu_s: float) -> Iterator[None]:
    """End this process by a signal that nothing in it handles where what is inside takes longer."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _answer(out: BinaryIO, encoded: Encoded) -> None:
    documents = encoded.documents
    _send(
        out,
        {
            "masked": documents.counted is not None,
            "text_bytes": encoded.text_bytes,
            "altered": encoded.altered,
            "flaws": encoded.flaws.shown(),
            "keys": asdict(encoded.keys),
        },
        documents.tokens.astype(np.uint32, copy=False).tobytes(),
        np.asarray(documents.starts, np.uint64).tobytes(),
        b"" if documents.counted is None else documents.counted.tobytes(),
    )


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
