"""What a replica keeps of one microbatch, from its admission until the step is closed."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.ids import JourneyKey, MicrobatchId, PeerId
from swarm.network.protocols import Payload
from swarm.pipeline.compute import Graph


@dataclass(slots=True, eq=False)
class Passage:
    """One microbatch at one replica.

    ``forward_attempt`` is that of the admitted forward; ``begun`` says that its payload came, until ``expires`` it
    still may. Payloads and graph are kept for as long as somebody may ask for them and no longer.
    """

    key: JourneyKey
    route: tuple[PeerId, ...]
    arrived: float = 0.0
    input: Payload | None = None
    targets: Payload | None = None
    output: Payload | None = None
    graph: Graph | None = None
    gradient: Payload | None = None
    gradient_sender: PeerId | None = None
    forward_attempt: int = -1
    expires: float = 0.0
    begun: bool = False
    accumulated: bool = False

    @property
    def index(self) -> tuple[int, MicrobatchId]:
        """What it is found by."""
        return self.key.step, self.key.microbatch

    def under_way(self, now: float) -> bool:
        """Whether it takes up one of the replica's places."""
        return not self.accumulated and (self.begun or now < self.expires)

    def clear(self) -> None:
        """Let go of everything large."""
        self.input = self.targets = self.output = self.graph = self.gradient = None
