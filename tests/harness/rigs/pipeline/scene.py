"""A replica in the middle of a route of three; its neighbours and its trainer take notes, and send what a test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from blake3 import blake3

from swarm.ids import JourneyKey, PeerId
from swarm.network.protocols import Incoming, Payload
from swarm.pipeline.messages import Backward, Forward, InputGradient, Output, Resend, Targets
from swarm.pipeline.seals import Across
from swarm.sim.network import SimNetwork
from tests.harness.expect import eventually
from tests.harness.rigs.clocks import LoopClock
from tests.harness.rigs.pipeline.parts import TRAINER, Mailbox, microbatch, tensor, token_ids
from tests.harness.rigs.pipeline.sides import Replica, enter, seals

T = TypeVar("T", Forward, Backward, Output, InputGradient)
UP, ME, DOWN, ALIEN = PeerId("up"), PeerId("me"), PeerId("down"), PeerId("stranger")
ROUTE = (UP, ME, DOWN)


def sealed(kind: type[T], by: PeerId, payload: Payload, **fields: Any) -> T:
    """Return a message with its sender's signature under the tensor that it brings to a ``hop``, where it has none."""
    key = JourneyKey(fields["step"], fields["microbatch"], fields["attempt"], fields.get("after", ""))
    hop, way = fields["hop"], "forward" if kind in (Forward, Output) else "backward"
    seal = seals(by).seal(Across(key, hop, way), blake3(payload).digest())
    if kind in (Output, InputGradient):
        del fields["hop"]
    return kind(**({"seal": seal} | fields))


def chosen(**fields: Any) -> dict[str, Any]:
    """Return what a message says, with its trainer's signature under the way, where it has none."""
    key = JourneyKey(fields["step"], fields["microbatch"], fields["attempt"], fields.get("after", ""))
    return {"chosen": seals(key.microbatch.trainer).choose(key, fields["route"])} | fields


class ReplicaScene:
    """The replica under test between an upstream, a downstream and a trainer that only take notes."""

    def __init__(self, stage: int = 1, route: tuple[PeerId, ...] = ROUTE, **settings: Any) -> None:
        self.network, self.route, self.stage = SimNetwork(LoopClock()), route, stage
        self._settings = settings

    async def open(self) -> None:
        """Have everybody enter the run."""
        names = dict.fromkeys([*ROUTE, TRAINER, ALIEN])
        endpoints = dict(zip(names, await enter(self.network, *names), strict=True))
        self.replica = Replica(endpoints[ME], self.stage, len(self.route), **self._settings)
        self.part, self.server = self.replica.part, self.replica.server
        self.boxes = {peer: Mailbox(endpoint) for peer, endpoint in endpoints.items() if peer != ME}
        self.trainer, self.down, self.up = self.boxes[TRAINER], self.boxes[DOWN], self.boxes[UP]

    def fields(self, position: int = 0, **changes: Any) -> dict[str, Any]:
        """Return what messages about a microbatch say, by default the usual."""
        usual = {"step": 1, "microbatch": microbatch(position), "attempt": 0, "route": self.route, "hop": self.stage}
        return chosen(**(usual | changes))

    async def forward(self, position: int = 0, *, by: PeerId = UP, x: float | bytes = 1.0, **changes: Any) -> None:
        """Send the replica an activation."""
        payload = x if isinstance(x, bytes) else tensor(x)
        await self.boxes[by].call(ME, sealed(Forward, by, payload, **self.fields(position, **changes)), payload)

    async def backward(self, position: int = 0, *, by: PeerId = DOWN, x: float | bytes = 1.0, **changes: Any) -> None:
        """Send the replica a gradient."""
        payload = x if isinstance(x, bytes) else tensor(x)
        await self.boxes[by].call(ME, sealed(Backward, by, payload, **self.fields(position, **changes)), payload)

    async def resend(self, position: int = 0, *, by: PeerId = TRAINER, **changes: Any) -> None:
        """Ask the replica to send again."""
        await self.boxes[by].call(ME, Resend(**self.fields(position, hop=self.stage + 1, **changes)))

    async def targets(self, position: int = 0, *, by: PeerId = TRAINER, **changes: Any) -> None:
        """Send the replica targets."""
        fields = self.fields(position, **changes)
        del fields["hop"]
        await self.boxes[by].call(ME, Targets(**fields), token_ids())

    async def there(self, position: int = 0, **changes: Any) -> None:
        """Send the replica an activation, and wait until it is computed and handed on."""
        before = len(self.down.of("forward"))
        await self.forward(position, **changes)
        await eventually(lambda: len(self.down.of("forward")) > before)

    async def blocked(self) -> Any:
        """Return what the trainer heard last of a blocked microbatch, once it heard something."""
        await eventually(lambda: self.trainer.of("blocked"))
        return self.trainer.of("blocked")[-1]

    def arrive(self, kind: str, body: Any, payload: bytes, caller: PeerId) -> Callable[[], Any]:
        """Admit a message now; the returned function lets its payload arrive later."""
        method = next(m for m in self.server.methods() if m.rpc.name == f"pipeline/1/{kind}")
        assert method.admit is not None
        method.admit(caller, body, len(payload))
        return lambda: method.handle(caller, body, Incoming(memoryview(bytearray(payload)), 1e9))
