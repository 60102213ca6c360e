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
from tests.benchmarks._pipeline_worker import Worker

FIGURES = ("exchange_s", "round_s", "wire_bytes", "extra_memory", "extra_daemon", "cpu_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one candidate did in one case: each figure's median over the rounds that succeeded.

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

    @property
    def bytes_ratio(self) -> float:
        """Bytes on the wire ÷ what must be sent."""
        return self.figures["wire_bytes"] / self.case.least_bytes


@dataclass(slots=True)
class Team:
    """The members of one candidate."""

    candidate: str
    members: list[Worker]

    async def round(self, number: int) -> list[dict[str, Any]]:
        """Everybody's answers. Raises RuntimeError when a member ends, as it does when its round fails."""
        order: dict[str, Any] = {"round": number}
        if self.candidate == "ours":
            order["members"] = [member.hello["peer"] for member in self.members]
        else:
            await asyncio.gather(*(member.ask({"fill": True}) for member in self.members))
        return list(await asyncio.gather(*(member.ask(order) for member in self.members)))


async def measure(case: Case, rounds: int) -> list[Found]:
    """Both candidates, in turns; the first round of each warms up and is not counted."""
    with tempfile.TemporaryDirectory(prefix="ar-") as scratch:
        async with contextlib.AsyncExitStack() as stack:
            opened = (_ours(case, Path(scratch)), _hivemind(case, Path(scratch)))
            teams = [await stack.enter_async_context(team) for team in opened]
            heard: dict[str, list[list[dict[str, Any]]]] = {team.candidate: [] for team in teams}
            for number in range(rounds + 1):
                for team in teams:
                    heard[team.candidate].append(await team.round(number))
                    print(f"{case.name}, round {number}, {team.candidate}: {_short(heard[team.candidate][-1])}",
                          file=sys.stderr, flush=True)  # fmt: skip
            return [found(case, team.candidate, heard[team.candidate][1:], await _error(team, case)) for team in teams]


def found(case: Case, candidate: str, heard: Sequence[Sequence[Mapping[str, Any]]], error: float) -> Found:
    """The medians. A round of hivemind in which not all took part counts as failed."""
    whole = [answers for answers in heard if all(answer.get("members", case.peers) == case.peers for answer in answers)]
    folded = [_folded(answers) for answers in whole]
    return Found(
        case=case,
        candidate=candidate,
        figures={name: median(each[name] for each in folded) for name in FIGURES},
        rounds=len(whole),
        failed=len(heard) - len(whole),
        identical=all(len({answer["digest"] for answer in answers}) == 1 for answers in whole),
        error=error,
    )


def _folded(answers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {name: (sum if name == "cpu_s" else max)(answer[name] for answer in answers) for name in FIGURES}


async def _error(team: Team, case: Case) -> float:
    answer = await team.members[0].ask({"error": case.peers})
    return float(answer["error"])


def _short(answers: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in _folded(answers).items())


@contextlib.asynccontextmanager
async def _ours(case: Case, scratch: Path) -> AsyncIterator[Team]:
    async with contextlib.AsyncExitStack() as stack:
        members = []
        for slot in range(case.peers):
            arguments = (_home(scratch), str(slot), case.codec)
            members.append(await Worker.start("tests.benchmarks._exchange_ours", *arguments))
            stack.push_async_callback(members[-1].stop)
        addresses = {member.hello["peer"]: member.hello["addresses"] for member in members}
        for member in members:
            await member.ask({"meet": addresses})
        yield Team("ours", members)


@contextlib.asynccontextmanager
async def _hivemind(case: Case, scratch: Path) -> AsyncIterator[Team]:
    async with contextlib.AsyncExitStack() as stack:
        members: list[Worker] = []
        for slot in range(case.peers):
            known = [address for member in members for address in member.hello["addresses"]]
            arguments = (_home(scratch), str(slot), case.codec, str(case.peers), *known)
            members.append(await Worker.start("tests.benchmarks._exchange_hivemind", *arguments))
            stack.push_async_callback(members[-1].stop)
        yield Team("hivemind", members)


def _home(scratch: Path) -> str:
    """A member's own; short, since sockets' paths are limited."""
    return tempfile.mkdtemp(prefix="", dir=scratch)
