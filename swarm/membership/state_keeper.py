"""What a membership asks of the keeper of its run on this machine's disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from swarm.consensus.records import CloseRecord, Decision
from swarm.membership.founding_record import Origin
from swarm.network.protocols import Service
from swarm.optim.part import TrainedPart
from swarm.state.snapshot import Snapshot


class Beginning(Protocol):
    """Where the state comes from that a run begins with."""

    async def load(self, told: Callable[[int, int], None]) -> tuple[Origin, list[Snapshot]]:
        """Return what the founding record says of it, and every part of it; ``told`` is told how many parts are ready,
        and of how many. Raises StateError when it is not to be had."""


class StateKeeper(AbstractAsyncContextManager[Any], Protocol):
    """Keeps this peer's part, and what else is given to it. Leaving the context waits for what is being written."""

    @property
    def root(self) -> Path | None:
        """Return where checkpoints lie; None where nothing is kept."""

    def services(self) -> Sequence[Service]:
        """Return what to mount, so that others can fetch what is kept."""

    def beginning(self) -> Beginning | None:
        """Return what a founder goes on from; None: a new run, with initial weights."""

    async def decided(self, decision: Decision, held: TrainedPart | None, *, departed: bool) -> None:
        """Keep the result of a decision when it is due. Called inside the context, for every decision.

        Args:
            decision: What was decided here.
            held: This peer's part, which has the decision's result; None where it holds none.
            departed: Whether the record lets this peer go.
        """

    async def keep_copies(self, copies: Sequence[Snapshot], record: CloseRecord, within_s: float) -> None:
        """Keep the last state of others' parts, that of ``record``, after what is being written of this peer's own: as
        much as is begun within that time. Called inside the context."""

    async def keep_now(self, state: Snapshot, record: CloseRecord) -> str:
        """Keep a state that only this peer has, before it ends; returns why it is not kept, "" once it is."""

    def check_last(self) -> None:
        """Raise RunEnded when the state that the run was for could not be kept. Called after the context."""
