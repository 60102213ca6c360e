"""Inflict the faults that are done alike to processes and containers: starts, storms of joiners, networks left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from peers.chaos import faults
from peers.chaos.cast import JOINER, STRANGERS
from peers.chaos.company import BaseWorld
from peers.chaos.faults import CannotInflict, Fault
from peers.chaos.strangers.findings import PROGRAM, StrangerOrders
from peers.chaos.world import PeerSpec
from peers.invites.invite import PREFIX, parse_invite


def _bulk_kill(world: BaseWorld[Any], fault: faults.BulkKill) -> Iterable[str]:
    """The first in the order of names: real time has no seed."""
    alive = sorted(name for name in world.peers if name.startswith(fault.among) and world.alive(name))
    return world.inflict(faults.Kill(tuple(alive[: fault.count])))


def _disconnect(world: BaseWorld[Any], fault: faults.Disconnect) -> Iterable[str]:
    off = _absences(world, fault.peers, fault.network)
    world.networks.disconnect(fault.peers, fault.network)
    world.lasting(world.absences, off, fault.seconds, partial(_come_back, world))
    return fault.peers


def _absences(world: BaseWorld[Any], names: Iterable[str], network: str) -> list[tuple[str, str]]:
    return [(name, one) for name in names for one in sorted(world.networks.meant(name, network))]


def _come_back(world: BaseWorld[Any], free: Iterable[tuple[str, str]]) -> None:
    for name, network in free:
        world.networks.reconnect((name,), network)


def _reconnect(world: BaseWorld[Any], fault: faults.Reconnect) -> Iterable[str]:
    world.absences.forget(_absences(world, fault.peers, fault.network))
    world.networks.reconnect(fault.peers, fault.network)
    return fault.peers


def _start(world: BaseWorld[Any], fault: faults.Start) -> Iterable[str]:
    if fault.peer not in world.specs.expected:
        raise CannotInflict(f"no peer {fault.peer} is kept for later: {sorted(world.specs.expected)}")
    world.start(world.specs.expected.pop(fault.peer))
    return (fault.peer,)


def _joiner_storm(world: BaseWorld[Any], fault: faults.JoinerStorm) -> Iterable[str]:
    if world.specs.joiner is None:
        raise CannotInflict("no stage host was started yet: nothing says how joiners are started")
    joiner = world.specs.joiner
    first = sum(name.startswith(JOINER) for name in world.peers) + 1
    names = [f"{JOINER}{number}" for number in range(first, first + fault.count)]
    for name in names:
        world.start(replace(joiner, name=name, arguments=_as_joiner(joiner.arguments, name)))
    return names


def _as_joiner(arguments: tuple[str, ...], name: str) -> tuple[str, ...]:
    """A stage host's, for another that takes the stage which needs it most."""
    left = list(arguments)
    for option in ("--stage", "--name"):
        if option in left:
            at = left.index(option)
            del left[at : at + 2]
    return (*left, "--name", name)


def _strangers(world: BaseWorld[Any], fault: faults.Strangers) -> Iterable[str]:
    """They know what an invite says, or no more than the addresses in it. Their process is named last."""
    if world.specs.joiner is None:
        raise CannotInflict("no stage host was started yet: nobody has an invite by which strangers could find the run")
    invite = parse_invite(next(one for one in world.specs.joiner.arguments if one.startswith(PREFIX)))
    names = world.living(fault)
    number = 1 + sum(name.startswith(STRANGERS) for name in world.peers)
    orders = StrangerOrders(
        at=invite.at,
        run=invite.run if fault.knows == "run" else None,
        targets=tuple(world.identity(name) for name in names),
        attacks=fault.attacks,
        identities=fault.count,
        seconds=fault.seconds,
        seed=fault.seed,
    )
    spec = PeerSpec(name=f"{STRANGERS}{number}", role="stranger", arguments=orders.arguments(), program=PROGRAM)
    world.start(spec)
    return (*names, spec.name)


COMMON: Mapping[type[Fault], Callable[[Any, Any], Iterable[str]]] = {
    faults.BulkKill: _bulk_kill,
    faults.Disconnect: _disconnect,
    faults.Reconnect: _reconnect,
    faults.Start: _start,
    faults.JoinerStorm: _joiner_storm,
    faults.Strangers: _strangers,
}
