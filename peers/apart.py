"""A peer's mixing while its replicas train apart, as the manifest says it goes."""

from __future__ import annotations

from collections.abc import Callable

from peers.holding import Holding
from peers.roles import Surroundings
from peers.rules import reach_of
from peers.situation import Situation
from swarm.averaging.mixing import Held, Mix, Mixing, MixingContext, MixingRules, Taking
from swarm.averaging.pushing import Pushing
from swarm.averaging.strategies import STRATEGIES
from swarm.averaging.strategies.push_sum import PushSum
from swarm.averaging.versions import VersionDesk
from swarm.averaging.wait_avoiding import WaitAvoiding
from swarm.events import Event, EventSink, Mixed
from swarm.optimization.local_part import LocalPart
from swarm.optimization.roster import Roster


class _Counting:
    """Events, and among them how often this peer has mixed."""

    def __init__(self, events: EventSink, situation: Situation) -> None:
        self._events, self._situation = events, situation

    def emit(self, event: Event) -> None:
        """See :class:`~swarm.events.EventSink`."""
        if isinstance(event, Mixed):
            self._situation.has_mixed(event.averaged)
        self._events.emit(event)


class Apart:
    """Does nothing where replicas do not train apart, or meet only when a step closes."""

    def __init__(
        self, around: Surroundings, holding: Holding, situation: Situation, roster: Callable[[], Roster]
    ) -> None:
        averaging = around.manifest.averaging
        self._holding, self._roster, self._endpoint = holding, roster, around.endpoint
        self._mixing: Mixing | None = None
        if averaging.mode != "local" or averaging.local.sync_every == 1:
            return
        events = _Counting(around.events, situation)
        context = MixingContext(
            endpoint=around.endpoint, device=around.device, clock=around.clock, events=events, held=self._held
        )
        mixes = self._mixes(context, around)
        self._mixing = Mixing(mixes, self._held, averaging.local.sync_every)
        holding.leg_over = self._mixing.leg_over

    def _mixes(self, context: MixingContext, around: Surroundings) -> Mix:
        averaging, seed = around.manifest.averaging, around.manifest.run.seed
        if averaging.strategy == "push-sum":
            pushing = Pushing(context, PushSum(), seed, reach_of(around.manifest))
            around.endpoint.mount(pushing)
            return pushing
        around.endpoint.mount(VersionDesk(self._held))
        rules = MixingRules(
            strategy=STRATEGIES[averaging.strategy],
            seed=seed,
            wait_avoiding=WaitAvoiding(averaging.local.staleness),
            reach=reach_of(around.manifest),
        )
        return Taking(context, rules)

    async def run(self) -> None:
        """Mix after each leg, until cancelled."""
        if self._mixing is not None:
            await self._mixing.run()

    def _held(self) -> Held | None:
        part = self._holding.part
        if not isinstance(part, LocalPart):
            return None
        replicas = self._roster().replicas(part.spec.name)
        if self._endpoint.peer not in replicas:  # cut off, or not let in yet
            return None
        return part.spec.name, part, replicas
