"""The story of one group's round, top to bottom: group, plan, exchange, event, result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from swarm.averaging.allreduce import AllReduce
from swarm.averaging.plan import RoundKey, RoundPlan, RoundResult, WireType
from swarm.averaging.strategies import Group, Strategy
from swarm.errors import BugError
from swarm.events import EventSink, RoundDone
from swarm.ids import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCall:
    """What every replica of a part reads off the ledger and the roster when a step closes.

    ``replicas`` is the part's slice of the roster, ``weights`` the tokens the ledger assigns to each of them (absent:
    0), ``round`` counts the strategy's rounds within the step, ``seed`` is the run's.
    """

    key: RoundKey
    replicas: Sequence[PeerId]
    weights: Mapping[PeerId, int]
    elements: int
    timeout_s: float
    dtype: WireType = "float32"
    round: int = 0
    seed: int = 0


def group_of(peer: PeerId, groups: Sequence[Group]) -> Group:
    """The group that ``peer`` is in. Raises BugError when it is in none: it was not in the roster."""
    for group in groups:
        if peer in group:
            return group
    raise BugError(f"{peer} is in none of {len(groups)} groups")


def plan_round(call: RoundCall, strategy: Strategy, peer: PeerId) -> RoundPlan:
    """The plan of the group that ``peer`` is in; the same at all of the group's members. Pure."""
    groups = strategy.groups(call.replicas, call.key.step, call.round, call.seed)
    members = group_of(peer, groups)
    return RoundPlan(
        key=call.key,
        members=members,
        weights={member: call.weights.get(member, 0) for member in members},
        elements=call.elements,
        dtype=call.dtype,
        timeout_s=call.timeout_s,
    )


async def average(allreduce: AllReduce, plan: RoundPlan, vector: torch.Tensor | None, events: EventSink) -> RoundResult:
    """Carry the plan out and say so. Raises RoundFailed, after which nothing of the result exists: the caller repeats
    the round as a new attempt once the ledger has a new contributor set. See :meth:`AllReduce.reduce`."""
    result = await allreduce.reduce(plan, vector)
    events.emit(
        RoundDone(
            step=plan.key.step,
            part=plan.key.part,
            members=len(plan.members),
            participating=len(result.contributors),
            bytes_sent=result.bytes_sent,
            seconds=result.seconds,
        )
    )
    return result
