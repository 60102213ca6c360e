"""Leaving in order: no new part in the run after the open step, nothing lost, nobody surprised."""

from __future__ import annotations

from swarm.consensus.changes import ALL_ASKED, Departure, departure_bytes
from swarm.consensus.records import NO_RECORD
from swarm.errors import (
    Advice,
    Busy,
    DeadlineMissed,
    Ending,
    PeerError,
    Refused,
    RunEnded,
    Superseded,
    Unreachable,
    WrongStep,
)
from swarm.membership.announcer import Announcer
from swarm.membership.handover import ResidualHandover
from swarm.membership.observer_service import Observers
from swarm.membership.run import RunContext
from swarm.membership.status_types import ENDED
from swarm.step.messages import LEAVE
from swarm.waiting import ExponentialBackoff, first_done

HANDOVER_S, LOOK_S = 15.0, 1.0
"""So long after it was told to leave a peer waits for others to come before it lets the run end; looked at so often."""
ASK_AGAIN_S = 4.0
"""How often one that cannot be spared asks again: whether all others have been asked to leave meanwhile."""


def ended_in_order(step: int) -> str:
    """Return why the run is over before its last step, in words."""
    return f"{ENDED} {step}, as all its peers were asked to leave; {Advice.GO_ON}"


class Leaving:
    """Asks the leader of each step to let this peer go, from the moment it is told to, until a record does. When all
    members ask, who can be spared or not, the record of the step ends the run: unless one was told so a moment ago, or
    helps a peer that is no member yet, or that asked it a moment ago where the run stands, for as long as it does.
    """

    def __init__(
        self,
        run: RunContext,
        observers: Observers,
        announcer: Announcer,
        handover: ResidualHandover,
    ) -> None:
        self._run, self._exit, self._at = run, run.exit, run.position
        self._observers, self._announcer, self._handover = observers, announcer, handover
        self._situation, self._clock = run.situation, run.around.clock
        self._refused, self._asked_in = False, (-1, 0)

    @property
    def ending(self) -> Ending:
        """Return how it ended, once it has: as this peer was told, when it left in order, alone or with all others."""
        return self._exit.ending if self._at.departed or self._ended else Ending.DONE

    @property
    def _ended(self) -> bool:
        return self._at.head is not None and self._at.head.ended

    @property
    def outcome(self) -> str:
        """Return why it is over, once it is, in words."""
        if self._at.departed:
            return f"it left in order after step {self._at.open_step - 1}"
        return ended_in_order(self._at.open_step - 1) if self._ended else "every step of the run is closed"

    async def hand_over(self) -> None:
        """Give the others what they need of this peer once it has left: see :meth:`ResidualHandover.give`."""
        if self._at.departed:
            await self._handover.give()

    async def say_gone(self) -> None:
        """Tell the directory that this peer has left. A courtesy: takes a second at most, and never fails."""
        await self._announcer.gone()

    def ask(self, reason: str, ending: Ending, within_s: float | None = None, bound: str = "") -> str:
        """Leave as soon as the run can do without. Returns what happens now, in words. Idempotent;
        any other that asks is told so. ``within_s`` seconds from now this peer is ended all the same; None: never;
        ``bound`` says so in words."""
        if not self._exit.asked:
            self._exit.ending, self._exit.told_at = ending, self._clock.monotonic()
        if within_s is not None:
            by = self._clock.wall() + within_s
            self._situation.ends_by = by if self._situation.ends_by is None else min(by, self._situation.ends_by)
        if reason not in self._exit.reasons:  # who asks once more in another way must see that it was heard
            self._situation.drain(reason, again=self._exit.asked, bound=bound)
        self._exit.reasons.add(reason)
        self._exit.told.set()
        if self._situation.waiting_for:
            return f"draining: {self._situation.waiting_for}"
        return f"asked to leave; step {self._at.open_step} is the first with which it may"

    async def run(self) -> None:
        """Wait to be asked, then ask. Raises RunEnded when there is nothing to leave in order: before it took part,
        and while it would first have to be let in again."""
        await self._exit.told.wait()
        if not self._at.is_member and not self._exit.admitted.is_set():
            raise RunEnded("this peer left before it took part", self._exit.ending)
        patience = ExponentialBackoff(0.2)
        while not (self._at.departed or self._at.over):
            if self._at.cut_off:
                raise RunEnded(
                    f"this peer left while the run went on without it: {self._at.cut_off}", self._exit.ending
                )
            await self._at.wait_member()
            step, term, ends = self._at.open_step, self._at.term, self._agrees()
            if not await self._ask_leader(step, ends=ends):
                await self._clock.sleep(patience.pause_s())
                continue
            waits = [self._at.wait_term(step, term), self._change_of_mind(ends)]
            waits += [self._clock.sleep(ASK_AGAIN_S)] if self._refused else []
            await first_done(*waits)

    def _agrees(self) -> bool:
        """Return whether the run may end for this peer, if all want it: nobody who comes would find it gone."""
        return self._clock.monotonic() - self._exit.told_at >= HANDOVER_S and not self._helping

    @property
    def _helping(self) -> bool:
        return self._observers.beside(self._at.roster.peers)

    async def _change_of_mind(self, agreed: bool) -> None:
        while self._agrees() == agreed:
            await self._clock.sleep(LOOK_S)

    async def _ask_leader(self, step: int, *, ends: bool) -> bool:
        """Return whether its answer stands until the step is closed, or another leads it."""
        me, self._refused = self._run.calls.me, False
        head, asked_in = self._at.head, (step, self._at.term)
        previous = NO_RECORD if head is None else head.hash()
        signature = self._run.around.identity.sign(departure_bytes(self._run.rules.run, step, previous, me, ends=ends))
        body, leader = Departure(step=step, peer=me, ends=ends, signature=signature), self._at.leader
        try:
            await self._run.calls.ask(leader, LEAVE, body, timeout_s=self._run.deadline.seconds())
            self._wait(f"step {step} to close")
        except WrongStep as error:
            self._wait(f"the next step: {error.reason}")
        except (Superseded, Unreachable, DeadlineMissed, Busy) as error:
            self._wait(f"a leader of step {step}: {error.reason}")
            return False
        except PeerError as error:
            self._refused = isinstance(error, Refused)
            helps = "; not while this peer helps another to join" if self._helping else ""
            # The first of all to ask a leader hears that the others have not: they are about to.
            if self._asked_in == asked_in or not self._situation.waiting_for.startswith(ALL_ASKED):
                self._wait(f"{error.reason}{helps}")
        self._asked_in = asked_in
        return True

    def _wait(self, what: str) -> None:
        """Say what leaving waits for: without a majority for that, before anything else."""
        self._situation.wait_for(self._situation.no_majority or what)
