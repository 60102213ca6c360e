"""The close record: what was decided about a step, once. The run's history is the chain of these."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field

from swarm.errors import Refused
from swarm.ids import MicrobatchId, PeerId
from swarm.optimization.roster import Member, Roster
from swarm.schema import Count, DigestField, Finite, Message, PartField, PeerIdField

NO_RECORD = "0" * 64
"""What the first record names as its predecessor."""


class Contribution(Message):
    """One committed microbatch: its target tokens, its loss, and the replica of each stage that holds its gradient."""

    microbatch: MicrobatchId
    tokens: Count
    loss_sum: Finite
    route: Annotated[tuple[PeerIdField, ...], Field(max_length=1024)]


class CloseRecord(Message):
    """Step 0 is the genesis: digests of the initial weights and the first roster.

    ``roster`` takes part in the *next* step. ``digests`` are of parameters and optimizer state after this step.
    ``cursors`` say where every shard continues. Size: see :func:`record_bytes`.
    """

    run: DigestField
    lineage: Literal[0] = 0
    step: Count
    term: Literal[0] = 0
    committed: tuple[Contribution, ...]
    tokens: Count
    loss_sum: Finite
    grad_norm: Finite
    clip: Finite
    lr: Finite
    digests: dict[PartField, DigestField]
    cursors: dict[PeerIdField, tuple[Count, Count]]
    roster: tuple[Member, ...]
    previous: DigestField

    @property
    def members(self) -> Roster:
        """The next step's roster."""
        return Roster(self.roster)

    @property
    def loss(self) -> float:
        """Nats per target token; 0 for the genesis."""
        return self.loss_sum / self.tokens if self.tokens else 0.0

    def hash(self) -> str:
        """Hex sha256 of the canonical JSON: what acceptances sign and the next record names."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Decision:
    """A decided record, the signatures that prove it, and what it was decided about: the mean gradient of the part
    that this peer holds, float32 on CPU (None without a part, and for the genesis)."""

    record: CloseRecord
    acceptances: Mapping[str, bytes]
    mean: torch.Tensor | None = None


def acceptance_bytes(record: CloseRecord) -> bytes:
    """What a peer signs when it accepts a record."""
    return f"accept|{record.run}|{record.lineage}|{record.step}|{record.term}|{record.hash()}".encode()


def check_acceptances(
    record: CloseRecord,
    electorate: Roster,
    acceptances: Mapping[str, bytes],
    verify: Callable[[PeerId, bytes, bytes], bool],
) -> None:
    """That everybody of the electorate accepted the record: then it is decided. Raises Refused naming who did not."""
    signed = acceptance_bytes(record)
    for peer in electorate.peers:
        if not verify(peer, signed, acceptances.get(peer, b"")):
            raise Refused(f"the acceptance of {peer} is missing or forged")


def record_bytes(microbatches: int, stages: int, members: int) -> int:
    """An upper estimate of a record's size on the wire: 60 bytes a microbatch and peer id, 400 and more a member."""
    return microbatches * (150 + 60 * stages) + members * 2000


def record_room(microbatches: int, stages: int, limit_bytes: int) -> int:
    """How many members a record of ``limit_bytes`` has room for: the inverse of :func:`record_bytes`."""
    return max(0, limit_bytes - record_bytes(microbatches, stages, 0)) // 2000
