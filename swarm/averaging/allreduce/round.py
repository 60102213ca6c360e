"""The story of a part's averaging, top to bottom: groups, plans, one exchange after the other, event, result."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from swarm.averaging.allreduce.allreduce_service import ABORT_S, AllReduce
from swarm.averaging.allreduce.meter import heard_in_all
from swarm.averaging.allreduce.partition import chunk_elements_of
from swarm.averaging.allreduce.plan import Gives, RoundKey, RoundPlan, RoundResult, WireType
from swarm.averaging.schedules import ScheduleName
from swarm.averaging.schedules.auto import ScheduleInputs, UnavailableSchedule, choose
from swarm.averaging.schedules.costs import LinkCost, Vector
from swarm.averaging.strategies import STRATEGIES, Group, Strategy
from swarm.compression.names import AveragingCodec
from swarm.errors import BugError, RoundFailed
from swarm.events import EventSink, RoundDone, RoundVoid
from swarm.ids import PeerId

HEAD_START_S = 2 * ABORT_S
"""How much earlier than the next a round ends, where several follow each other: so who waits in the next one for those
that wait here hears on whom it broke before its own deadline, and blames nobody who was only waiting. Members of the
round are told first, which takes ABORT_S where one of them does not listen, then those of the next."""

REASON_CHARS = 400
"""How much of what a member says of a failure is written down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCall:
    """The inputs of a part's averaging, which every replica reads from the ledger and the roster when a step closes.

    ``replicas`` is the part's slice of the roster, ``weights`` the tokens the ledger assigns to each of them (absent:
    0), ``seed`` is the run's. ``timeout_s`` is for all rounds together. ``links`` are what the last record says of the
    replicas, ``dial_only`` those that others reach through relays alone. Each ``turn`` gives a group's members other
    duties, so that what breaks a round shows to somebody else. ``guarded``: see :mod:`swarm.averaging.allreduce.guard`.
    ``checked`` is the share of chunks of :mod:`swarm.averaging.allreduce.check`; ``divide_by``: see :class:`RoundPlan`.
    """

    key: RoundKey
    replicas: Sequence[PeerId]
    weights: Mapping[PeerId, int]
    elements: int
    timeout_s: float
    dtype: WireType = "float32"
    codec: AveragingCodec = "float32"
    seed: int = 0
    schedule: ScheduleName | Literal["auto"] = "direct"
    links: Mapping[PeerId, LinkCost] = field(default_factory=dict)
    dial_only: Collection[PeerId] = ()
    turn: int = 0
    guarded: bool = False
    checked: float = 0.0
    divide_by: int = 0


def group_of(peer: PeerId, groups: Sequence[Group]) -> Group:
    """The group that ``peer`` is in. Raises BugError when it is in none: it was not in the roster."""
    for group in groups:
        if peer in group.members:
            return group
    raise BugError(f"{peer} is in none of {len(groups)} groups")


def plan_rounds(call: RoundCall, strategy: Strategy, peer: PeerId) -> tuple[RoundPlan, ...]:
    """The rounds with which ``peer`` comes to the exact mean of all replicas, in order; each is the same at all of its
    group's members. Pure.

    Every round but the last gives sums, which the next adds up: who holds what is in them is the weight that is carried
    along. Where the strategy is not exact for so many replicas, one round of all is. Raises RoundFailed where it makes
    no groups of these.
    """
    rounds = strategy.exact_after(len(call.replicas))
    if rounds is None:
        strategy, rounds = STRATEGIES["everyone"], 1
    weights = {replica: call.weights.get(replica, 0) for replica in call.replicas}
    plans: list[RoundPlan] = []
    for number in range(rounds):
        groups = strategy.groups(call.replicas, call.key.step, number, call.seed)
        last = number == rounds - 1
        group = group_of(peer, groups)
        said = {member: 0 if member in group.silent else weights[member] for member in group.members}
        if last or (len(said) > 1 and any(said.values())):
            one = replace(group, members=_by_site(call, group.members)) if rounds == 1 else group
            plans.append(_plan(call, number, one, said, "mean" if last else "sum", aligned=rounds > 1))
        weights = _carried(groups, weights)
    return tuple(plans)


def _plan(
    call: RoundCall, number: int, group: Group, weights: Mapping[PeerId, int], gives: Gives, *, aligned: bool
) -> RoundPlan:
    plan = RoundPlan(
        key=call.key._replace(round=number),
        members=group.members,
        weights=weights,
        shares=dict.fromkeys(group.reducers, 1),
        elements=call.elements,
        dtype=call.dtype,
        codec=call.codec,
        timeout_s=call.timeout_s,
        gives=gives,
        aligned=aligned,
        chunk_elements=chunk_elements_of(call.elements),
        outgoing=group.outgoing,
        guarded=call.guarded,
        divide_by=call.divide_by if gives == "mean" else 0,
    )
    if group.reducers or not plan.contributors:
        return plan
    choice = choose(_situation(call, plan), _wanted(call, plan))
    # Who compares all results of the last round anyway need not wait until members have done so: unless they add up
    # what others passed on, or some have been told which of them reduce, because rounds broke or one serves all.
    plan = replace(plan, schedule=choice.schedule, shares=choice.shares, reason=choice.reason)
    checked = call.checked if plan.can_be_checked and not aligned else 0.0
    return replace(plan, signed=aligned or checked > 0 or choice.schedule != "direct", checked=checked)


def _by_site(call: RoundCall, members: Sequence[PeerId]) -> tuple[PeerId, ...]:
    """Those of one site side by side, else in the group's order; then as many of the first go last as the turn says."""
    sites = {peer: call.links[peer].site if peer in call.links else "" for peer in members}
    first = {site: place for place, site in reversed([*enumerate(sites.values())])}
    beside = sorted(members, key=lambda peer: first[sites[peer]])
    turn = call.turn % len(beside)
    return (*beside[turn:], *beside[:turn])


def _situation(call: RoundCall, plan: RoundPlan) -> ScheduleInputs:
    vector = Vector(
        elements=plan.elements,
        item_bytes=plan.item_bytes,
        result_bytes=np.dtype(plan.result_dtype).itemsize,
        chunk_elements=plan.chunk_elements,
    )
    return ScheduleInputs(
        members=plan.members,
        weights=plan.weights,
        vector=vector,
        links=call.links,
        dial_only=call.dial_only,
        turn=plan.key.step,
    )


def _wanted(call: RoundCall, plan: RoundPlan) -> UnavailableSchedule | None:
    """Trees add in another order for other shares, and groups that swap must all add alike; and what is rounded to 8
    bits is rounded once."""
    if plan.aligned:
        return UnavailableSchedule("direct", "the groups swap")
    if not plan.sums.exact:
        return UnavailableSchedule("direct", f"{plan.codec} is rounded once")
    return None if call.schedule == "auto" else UnavailableSchedule(call.schedule, "the manifest says so")


def _carried(groups: Sequence[Group], weights: Mapping[PeerId, int]) -> dict[PeerId, int]:
    """The weight of what each holds after a round."""
    after: dict[PeerId, int] = {}
    for group in groups:
        total = sum(weights[member] for member in group.members if member not in group.silent)
        after |= dict.fromkeys(group.members, total)
    return after


async def average(
    allreduce: AllReduce, plans: Sequence[RoundPlan], vector: torch.Tensor | None, events: EventSink
) -> RoundResult:
    """Carry the plans out, one after the other, and say so. Raises RoundFailed, after which nothing of the result
    exists: the caller repeats all as a new attempt once the ledger has a new contributor set. ``vector`` is only read.
    Anyone who is done with a round before others is let in and waits for them; where one fails, those that wait for us
    in a later one are told. See :meth:`AllReduce.reduce`."""
    for plan in plans:
        if plan.contributors:
            allreduce.expect(plan)
    results: list[RoundResult] = []
    try:
        for plan in plans:
            time_s = _ends_at_s(plan, plans) - sum(result.seconds for result in results)
            results.append(await _round(allreduce, plan, vector, time_s))
            events.emit(_done(plan, results[-1]))
            vector = results[-1].tensor
    except RoundFailed as failed:
        events.emit(_void(plans[len(results)], failed))
        await asyncio.gather(*(allreduce.give_up(plan, failed) for plan in plans[len(results) + 1 :]))
        raise
    finally:
        for plan in plans[len(results) :]:
            allreduce.forget(plan, RoundFailed(f"round {plan.key} was given up at {allreduce.peer}"))
    return replace(
        results[-1],
        bytes_sent=sum(result.bytes_sent for result in results),
        seconds=sum(result.seconds for result in results),
        heard=heard_in_all(result.heard for result in results),
        waited={} if plans[0].key.round else results[0].waited,  # in later ones for who waited for others itself
    )


def _ends_at_s(plan: RoundPlan, plans: Sequence[RoundPlan]) -> float:
    """Return the deadline of a round, in seconds from the start of the first: the last one at the deadline of all."""
    last = plans[-1].key.round
    head_start_s = min(HEAD_START_S, plan.timeout_s / (2 * (last + 1)))
    return plan.timeout_s - (last - plan.key.round) * head_start_s


async def _round(allreduce: AllReduce, plan: RoundPlan, vector: torch.Tensor | None, time_s: float) -> RoundResult:
    if time_s <= 0:
        raise RoundFailed(f"round {plan.key} had no time left: those before it took too long")
    if not plan.contributors:
        return _unfed(plan, vector)
    return await allreduce.reduce(replace(plan, timeout_s=time_s), vector)


def _unfed(plan: RoundPlan, vector: torch.Tensor | None) -> RoundResult:
    """What a round gives that nobody fed: all members know that, and nobody is asked. What was owed still is."""
    return RoundResult(
        tensor=torch.zeros(plan.elements, dtype=getattr(torch, plan.result_dtype)),
        squared_norm=0.0,
        digest=hashlib.sha256().hexdigest(),
        contributors=(),
        bytes_sent=0,
        seconds=0.0,
        left=vector if plan.feeds_back else None,
    )


def _done(plan: RoundPlan, result: RoundResult) -> RoundDone:
    return RoundDone(
        step=plan.key.step,
        part=plan.key.part,
        round=plan.key.round,
        members=len(plan.members),
        participating=len(result.contributors),
        bytes_sent=result.bytes_sent,
        seconds=result.seconds,
        formed_s=result.formed_s,
        schedule=plan.schedule,
        reason=plan.reason,
    )


def _void(plan: RoundPlan, failed: RoundFailed) -> RoundVoid:
    return RoundVoid(
        step=plan.key.step,
        part=plan.key.part,
        round=plan.key.round,
        attempt=plan.key.attempt,
        members=len(plan.members),
        culprit=PeerId(failed.peer) if failed.peer else None,
        reason=failed.reason[:REASON_CHARS],
    )
