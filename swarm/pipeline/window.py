"""Which steps a peer works on, and with the parameters of which record. Pure.

Work of a step is computed with the parameters of the record before it. Where a run overlaps, the step after the open
one is fed early: with the parameters that are there, those of the open step, which one record more will be behind.
"""

from __future__ import annotations

from typing import Protocol

from swarm.ids import MicrobatchId, StepWork


class AboutWork(Protocol):
    """A message about one microbatch of a step, computed with the parameters of the record that ``after`` begins the
    hash of."""

    @property
    def step(self) -> int:
        """The step."""

    @property
    def microbatch(self) -> MicrobatchId:
        """The microbatch."""

    @property
    def after(self) -> str:
        """The beginning of the record's hash."""


class StepWindow:
    """The open ``step``, which follows the record whose hash begins with ``after``, as that follows ``before``. With
    ``ahead`` the next step may be fed early; ``hop`` is that of :class:`~swarm.ids.StepWork`."""

    def __init__(self, *, ahead: bool = False, hop: int = 0) -> None:
        self.ahead, self.hop, self.step, self.after, self.before = ahead, hop, 0, "", ""

    def open_step(self, step: int, after: str, before: str) -> None:
        """This step is open from now on."""
        self.step, self.after, self.before = step, after, before

    def work_of(self, about: AboutWork) -> StepWork:
        """Return what a message is about. It is early work if the record that it follows is not the one before its
        step but the one before that: of the step after the open one only such work is known to follow the right one."""
        follows = {self.step: self.before, self.step + 1: self.after}.get(about.step, "")
        return StepWork(about.step, about.microbatch, self.ahead and about.after == follows != "", self.hop)

    def after_of(self, work: StepWork) -> str:
        """Return how the hash of the record begins that work of the open step follows, or early work of the next."""
        return self.before if work.early and work.step == self.step else self.after
