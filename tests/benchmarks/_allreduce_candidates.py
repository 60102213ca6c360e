"""The two candidates of the benchmark ``allreduce-kill``: how each plays a round, and what is found afterwards."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tests.benchmarks._allreduce_load import (
    Kill,
    Vector,
    agreed_by_all,
    differing_share,
    exact_mean,
    vector_of,
)
from tests.benchmarks._allreduce_team import Answers, Member, Team, opened

MAX_ATTEMPTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What was played: ``kind`` is that of the numbers, ``fired`` what the victim said last (empty without a kill)."""

    number: int
    kind: str
    kill: Kill | None
    fired: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One round of one candidate, as its survivors have it in the end.

    ``failed`` counts survivors whose first attempt ended with an error.
    ``false_successes`` counts survivors that report success with numbers that are not the mean of the contributors
    they list. ``differing`` is a share of coordinates (``differing_successes``: of the survivors without an error).
    ``answered_s`` is when the last survivor had its first answer, ``settled_s``
    all attempts together.
    """

    candidate: str
    played: Round
    survivors: int
    failed: int
    false_successes: int
    differing: float
    differing_successes: float
    answered_s: float
    attempts: int = 1
    settled_s: float
    inputs_kept: bool = False

    @property
    def event(self) -> str:
        """What the victim was killed at."""
        return self.played.kill.event if self.played.kill else f"none, {self.played.kind}"

    @property
    def void(self) -> bool:
        """Whether the first attempt failed for all survivors."""
        return self.failed == self.survivors

    @property
    def split(self) -> bool:
        """Whether the first attempt ended well for some survivors and not for others."""
        return 0 < self.failed < self.survivors


class Candidate(Protocol):
    """What is measured in turns."""

    @property
    def team(self) -> Team:
        """Its members. Those missing are started before a round."""

    async def round(self, number: int, kill: Kill | None, kind: str) -> Outcome:
        """One round, with a kill or without."""


@dataclass(frozen=True, slots=True)
class Ours:
    """:class:`~swarm.averaging.allreduce.allreduce_service.AllReduce` over libp2p, and the rule of the close record: a
    result is applied when all live members report the same digest, else the round is repeated without the dead."""

    team: Team
    scratch: Path

    async def round(self, number: int, kill: Kill | None, kind: str) -> Outcome:
        """See :class:`Candidate`. Raises RuntimeError when the living do not come to agree."""
        await self.team.tell({"begin": number, "kind": kind})
        first, fired = await _attempt(self.team, {"step": number, "attempt": 0}, kill)
        attempts = [first]
        while not agreed_by_all({slot: answer["digest"] for slot, answer in attempts[-1].items()}):
            if len(attempts) == MAX_ATTEMPTS:
                raise RuntimeError(f"no agreement among the living in {MAX_ATTEMPTS} attempts: {attempts[-1]}")
            again, _ = await _attempt(self.team, {"step": number, "attempt": len(attempts)}, None)
            attempts.append(again)
        await self.team.tell({"apply": True})
        held = await self.team.saved(self.scratch)
        return Outcome(
            **judged("ours", Round(number=number, kind=kind, kill=kill, fired=fired), first, held, attempts[-1]),
            attempts=len(attempts),
            settled_s=sum(_slowest(answers) for answers in attempts),
            inputs_kept=all(answer["kept"] for answers in attempts for answer in answers.values()),
        )


@dataclass(frozen=True, slots=True)
class Hivemind:
    """``DecentralizedAverager`` from the moment its group is known. Its tensors are updated in place: what they hold
    when it answers is what is applied."""

    team: Team
    scratch: Path

    async def round(self, number: int, kill: Kill | None, kind: str) -> Outcome:
        """See :class:`Candidate`."""
        await self.team.tell({"begin": number, "kind": kind})
        answers, fired = await _attempt(self.team, {"step": number}, kill)
        held = await self.team.saved(self.scratch)
        played = Round(number=number, kind=kind, kill=kill, fired=fired)
        return Outcome(**judged("hivemind", played, answers, held, answers), settled_s=_slowest(answers))


async def _attempt(team: Team, order: Mapping[str, Any], kill: Kill | None) -> tuple[Answers, dict[str, Any]]:
    """Everybody's, by slot; ``contributors`` become slots."""
    slots = sorted(team.members)
    peers = [team.members[slot].peer for slot in slots]
    answers, fired = await team.attempt({**order, "members": peers}, asdict(kill) if kill else None)
    for answer in answers.values():
        answer["contributors"] = [slots[peers.index(peer)] for peer in answer["contributors"]]
    return answers, fired


@contextlib.asynccontextmanager
async def opened_ours(scratch: Path, members: int, elements: int) -> AsyncIterator[Ours]:
    async def start(slot: int, others: Mapping[int, Member]) -> Member:
        member = await Member.begin("tests.benchmarks._allreduce_ours", _home(scratch), str(slot), str(elements))
        everybody = [*others.values(), member]
        addresses = {each.peer: each.hello["addresses"] for each in everybody}
        for each in everybody:
            await each.ask({"meet": addresses})
        return member

    async with opened(start, members) as team:
        yield Ours(team, scratch)


@contextlib.asynccontextmanager
async def opened_hivemind(scratch: Path, members: int, elements: int) -> AsyncIterator[Hivemind]:
    async def start(slot: int, others: Mapping[int, Member]) -> Member:
        known = [address for other in others.values() for address in other.hello["addresses"]]
        arguments = (_home(scratch), str(slot), str(elements), *known)
        return await Member.begin("tests.benchmarks._allreduce_hivemind", *arguments)

    async with opened(start, members) as team:
        yield Hivemind(team, scratch)


def _home(scratch: Path) -> str:
    """A member's own; short, since sockets' paths are limited."""
    return tempfile.mkdtemp(prefix="", dir=scratch)


def judged(candidate: str, played: Round, first: Answers, held: Mapping[int, Vector], last: Answers) -> dict[str, Any]:
    """What a round's answers and vectors say: the fields of :class:`Outcome` that both candidates have."""
    elements = len(next(iter(held.values())))
    inputs = {slot: vector_of(played.number, slot, played.kind, elements) for slot in {*first, *held, *_dead(played)}}
    content = [held[slot] for slot in sorted(held) if not last[slot]["error"]]
    failed = [answer for answer in first.values() if answer["error"]]
    return {
        "candidate": candidate,
        "played": played,
        "survivors": len(first),
        "failed": len(failed),
        "false_successes": _false_successes(last, held, inputs) if played.kind == "whole" else 0,
        "differing": differing_share([held[slot] for slot in sorted(held)]),
        "differing_successes": differing_share(content),
        "answered_s": _slowest(first),
    }


def _dead(played: Round) -> set[int]:
    return {played.kill.slot} if played.kill else set()


def _false_successes(answers: Answers, held: Mapping[int, Vector], inputs: Mapping[int, Vector]) -> int:
    reported = {slot: tuple(answer["contributors"]) for slot, answer in answers.items() if not answer["error"]}
    means = {slots: exact_mean(inputs, slots) for slots in set(reported.values())}
    return sum(not np.array_equal(held[slot], means[slots]) for slot, slots in reported.items())


def _slowest(answers: Answers) -> float:
    return max(float(answer["seconds"]) for answer in answers.values())
