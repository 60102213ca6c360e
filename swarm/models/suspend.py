"""Leave a computation in the middle to ask others, whatever code is in the middle: foreign forwards are no generators.

It runs in a thread of its own. Whoever drives it (:func:`suspended`) waits while it computes and holds it while others
are asked: one of the two runs, never both, so what is on a device's thread stays one piece of work after the other. No
thread that computes for others waits for an answer.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from swarm.errors import BugError

T = TypeVar("T")


class _Left(BaseException):
    """Nobody wants what this thread computes any more."""


@dataclass(frozen=True, slots=True)
class _Question:
    asked: Any


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Of a computation, or of asking others: a value, or what was raised."""

    value: Any = None
    error: BaseException | None = None

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class _Baton:
    """What the two hand each other, one thing at a time."""

    def __init__(self) -> None:
        self.said, self.answered = SimpleQueue[_Question | _Outcome](), SimpleQueue[_Outcome]()
        self.left = False

    def leave(self) -> None:
        """Have the computation end where it asks, or asks next."""
        self.left = True
        self.answered.put(_Outcome(error=_Left()))


_held: ContextVar[_Baton | None] = ContextVar("baton", default=None)


def ask(question: object) -> Any:
    """Return what the driver of this thread's computation is sent for a question. Raises what is thrown into it, and
    BugError where nobody drives it."""
    baton = _held.get()
    if baton is None:
        raise BugError("a computation that asks others was not driven by steps")
    if baton.left:
        raise _Left
    baton.said.put(_Question(question))
    return baton.answered.get().get()


def suspended(compute: Callable[[], T]) -> Generator[Any, Any, T]:
    """Return the steps of ``compute``: they yield what it asks, are sent the answers, and return what it returns.

    It sees the context variables that are set here and now, whoever drives it then, and computes with as many threads
    and on the stream of the driver of its first step. What is thrown into a step is raised where it asked; closed, it
    ends there. Cost: a thread, and two switches for each question.
    """
    return _driven(compute, copy_context())


def _driven(compute: Callable[[], T], context: Context) -> Generator[Any, Any, T]:
    baton = _Baton()
    args = (_run, baton, compute, torch.get_num_threads(), _stream())
    thread = threading.Thread(target=context.run, args=args, name="suspended", daemon=True)
    thread.start()
    try:
        while isinstance(said := baton.said.get(), _Question):
            try:
                answer = _Outcome((yield said.asked))
            except GeneratorExit:
                raise
            except BaseException as error:  # noqa: BLE001 - it is raised where it was asked
                answer = _Outcome(error=error)
            baton.answered.put(answer)
    finally:
        baton.leave()
        thread.join()
    value: T = said.get()
    return value


def _run(baton: _Baton, compute: Callable[[], Any], threads: int, stream: Any) -> None:
    _held.set(baton)
    try:
        torch.set_num_threads(threads)
        torch.get_num_threads()  # a thread that was not asked once would take the number that another sets last
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            outcome = _Outcome(compute())
    except BaseException as error:  # noqa: BLE001 - it is the driver's to raise
        outcome = _Outcome(error=error)
    baton.said.put(outcome)


def _stream() -> Any:
    """Return on what this thread has a GPU compute; None where it has none compute."""
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
