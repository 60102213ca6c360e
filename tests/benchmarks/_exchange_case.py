"""One case of the benchmark ``allreduce``: the two teams, and their rounds in turns."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks._exchange_load import Case
from tests.benchmarks._worker import Worker

ROUNDS = 5
OURS, HIVEMIND, HIVEMIND_TOLD = "ours", "hivemind", "hivemind told the size"
FIGURES = ("exchange_s", "round_s", "wire_bytes", "extra_memory", "extra_daemon", "cpu_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one candidate did in one case: each figure's median over the rounds that succeeded, none without any.

    Seconds are the slowest member's, bytes and memory the largest member's, CPU is that of all members. ``error`` is
    the distance to the exact mean (:func:`error_of`), ``identical`` whether all members held the same bits each time.
    """

    case: Case
    candidate: str
    figures: Mapping[str, float]
    rounds: int
    failed: int
    identical: bool
    error: float

    def per(self, name: str, other: float | None = 1.0) -> float | None:
        """A figure, or how many times ``other`` it is; None where either is not there."""
        return self.figures[name] / other if self.figures and other else None


@dataclass(frozen=True, slots=True)
class Turn:
    """What is measured in turns: a team, and what its orders to average say beside the round's number."""

    candidate: str
    members: tuple[Worker, ...]
    order: Mapping[str, Any]

    async def round(self, number: int) -> list[dict[str, Any]]:
        """Everybody's answers. Raises RuntimeError when a member ends, as it does when its round fails."""
        order = {"round": number, **self.order}
        return list(await asyncio.gather(*(member.ask(order) for member in self.members)))


async def measure(case: Case, rounds: int = ROUNDS, warm_up: int = 1) -> list[Found]:
    """All candidates, in turns; the first ``warm_up`` rounds of each are not counted."""
    with tempfile.TemporaryDirectory(prefix="ar-") as scratch:
        async with _ours(case, Path(scratch)) as ours, _hivemind(case, Path(scratch)) as theirs:
            turns = (
                Turn(OURS, ours, {"members": [member.hello["peer"] for member in ours]}),
                Turn(HIVEMIND, theirs, {"size": None}),
                Turn(HIVEMIND_TOLD, theirs, {"size": case.peers}),
            )
            heard: dict[str, list[list[dict[str, Any]]]] = {turn.candidate: [] for turn in turns}
            for number in range(warm_up + rounds):
                for turn in turns:
                    answers = await turn.round(number)
                    heard[turn.candidate].append(answers)
                    line = f"{case.name}, round {number}, {turn.candidate}: {_short(answers)}"
                    print(line, file=sys.stderr, flush=True)
            errors = {members: await _error(members[0], case) for members in (ours, theirs)}
            return [
                found(case, turn.candidate, heard[turn.candidate][warm_up:], errors[turn.members]) for turn in turns
            ]


def found(case: Case, candidate: str, heard: Sequence[Sequence[Mapping[str, Any]]], error: float) -> Found:
    """The medians. A round of hivemind in which not all took part counts as failed."""
    whole = [answers for answers in heard if all(answer.get("members", case.peers) == case.peers for answer in answers)]
    folded = [_folded(answers) for answers in whole]
    return Found(
        case=case,
        candidate=candidate,
        figures={name: median(each[name] for each in folded) for name in FIGURES} if folded else {},
        rounds=len(whole),
        failed=len(heard) - len(whole),
        identical=bool(whole) and all(len({answer["digest"] for answer in answers}) == 1 for answers in whole),
        error=error,
    )


def _folded(answers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {name: (sum if name == "cpu_s" else max)(answer[name] for answer in answers) for name in FIGURES}


async def _error(member: Worker, case: Case) -> float:
    answer = await member.ask({"error": case.peers})
    return float(answer["error"])


def _short(answers: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in _folded(answers).items())


@contextlib.asynccontextmanager
async def _ours(case: Case, scratch: Path) -> AsyncIterator[tuple[Worker, ...]]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(slot: int) -> Worker:
            arguments = (_home(scratch), str(slot), case.codec, str(case.elements))
            member = await Worker.start("tests.benchmarks._exchange_ours", *arguments)
            stack.push_async_callback(member.stop)
            return member

        members = await asyncio.gather(*map(start, range(case.peers)))
        addresses = {member.hello["peer"]: member.hello["addresses"] for member in members}
        for member in members:
            await member.ask({"meet": addresses})
        yield tuple(members)


@contextlib.asynccontextmanager
async def _hivemind(case: Case, scratch: Path) -> AsyncIterator[tuple[Worker, ...]]:
    async with contextlib.AsyncExitStack() as stack:
        members: list[Worker] = []
        for slot in range(case.peers):
            known = [address for member in members for address in member.hello["addresses"]]
            arguments = (_home(scratch), str(slot), case.codec, str(case.elements), str(case.peers), *known)
            members.append(await Worker.start("tests.benchmarks._exchange_hivemind", *arguments))
            stack.push_async_callback(members[-1].stop)
        yield tuple(members)


def _home(scratch: Path) -> str:
    """A member's own; short, since sockets' paths are limited."""
    return tempfile.mkdtemp(prefix="", dir=scratch)
