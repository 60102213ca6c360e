"""What may end a peer from outside, watched from its start to its end: its daemon, its signals, a notice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from peers.orders import ForcedExit, Orders
from peers.preemption.watcher import PreemptionWatcher
from peers.settings import PeerSettings
from peers.sharing.conditions import LOOK_S, PauseConditions, Steadily
from swarm.clock import Clock
from swarm.errors import Ending, RunEnded
from swarm.events import EventSink, Paused, PauseWatch
from swarm.health.watch import HealthWatch
from swarm.ids import PeerId
from swarm.network.endpoint import LibP2PEndpoint

SECURE_SHARE = 0.9
"""Of what is left: what is to be told must be told before the time is up."""


async def watch_daemon(endpoint: LibP2PEndpoint, name: str) -> None:
    """Return when the endpoint is closed. Raises RunEnded when its daemon is gone for good."""
    reason = await endpoint.wait_daemon()
    if not reason:
        return
    raise RunEnded(
        f"{name}: {reason}",
        Ending.UNREACHABLE,
        check="is memory left (free -h), and may p2pd, a program of the package hivemind, run here?",
        remedy="Then start this peer again, with the command that started it.",
    )


async def watch_signals(orders: Orders, watch: HealthWatch, me: PeerId, name: str) -> None:
    """Raises ForcedExit when the peer is to end at once; the others are told first."""
    reason, exit_code = await orders.forced()
    await watch.tell_all(me, reason)
    raise ForcedExit(f"{name} {reason}", exit_code)


async def watch_last_moments(orders: Orders, secure: Callable[[float], Awaitable[str]]) -> None:
    """Have a peer that nobody lets go see to what only it has, as ``secure(within_s)`` does, before its time is up; it
    ends at once where that says that it may. Where it is told meanwhile to be gone sooner, that is begun again."""
    left_s = await orders.last_moments()
    while (reason := await orders.unless_sooner(secure(SECURE_SHARE * left_s))) is None:
        left_s = orders.left_s or 0.0
    if reason:
        orders.let_go(reason)


async def watch_preemption(settings: PeerSettings, clock: Clock, events: EventSink, orders: Orders) -> None:
    """Have the peer leave when its machine is taken back, until cancelled."""
    watcher = PreemptionWatcher(clock, events, orders.by_notice)
    await watcher.run(settings.options.preemption, settings.options.preemption_url)


async def watch_pauses(settings: PeerSettings, clock: Clock, events: EventSink, orders: Orders) -> None:
    """Have the peer leave when a condition for a pause holds at two looks in a row; returns then, or at once when there
    is none, or nobody who would start this peer again."""
    if not settings.options.pause_when or settings.back is None:
        return
    conditions, steadily = PauseConditions(settings.options.pause_when, clock), Steadily(LOOK_S)
    while True:
        reason = await conditions.look()
        for condition, problem in conditions.news.items():
            events.emit(PauseWatch(condition=condition, problem=problem))
        if steadily.seen(bool(reason), clock.monotonic()):
            break
        await clock.sleep(LOOK_S)
    events.emit(Paused(reason=reason))
    orders.by_notice(f"pause: {reason}", None, Ending.PAUSED)
