"""Watch what the leaders of the open step do, and veto what none may decide though its numbers are right.

A leader cannot be believed about who is lost, what trainers reported, or how the batch was shared out. Every member
knows some of it itself: whom it hears, which rows are its own, what a trainer's quota was. Who vetoes answers Busy, so
that an honest leader whose view differs goes on asking, and the next in the succession leads at once
(:mod:`swarm.step.member.leader_watch`). A record that comes back in a later term is judged in the same way. Only where
the voters' promises show that it may have been decided before, what a member knows of its own counts for nothing: else
who knows otherwise would hold the step up for ever. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from swarm.consensus.faults import newly_barred
from swarm.consensus.records import CloseRecord
from swarm.consensus.roster import Roster, unserved
from swarm.errors import Busy
from swarm.ids import PeerId
from swarm.step.leader.exclusion import STALLED_S
from swarm.step.rules import StepRules

LEADERS = 2
"""So many leaders must have tried to close a step with a member that others hear, before it may be left out."""
TERM_S, MOST_DOUBLINGS = 90.0, 8
"""Who led a step for so long in later terms than its first begins another one only when the present one is as old, and
twice as old each time: else one that begins term after term, and closes nothing, would hold the step up for ever."""


@dataclass(slots=True)
class LeaderConduct:
    """What one member has seen of the open step's leaders.

    ``questions`` are those that moved the closing on, the last of them in term ``asked_in``, which began to close the
    step at ``closing_at`` (monotonic seconds). ``missed`` are the members
    that were gone at any time since the step ``began`` (monotonic seconds). ``vetoed_in`` is the last term in which we
    vetoed, and ``why``; ``refused`` are the hashes of those records. ``tied`` are replicas that are there and count as
    lost, for as many of their part hold one result as another (:mod:`swarm.step.ties`). ``_term`` is who began the
    present term, and when; ``_led`` for how long each led, and how often it began one after it had led for TERM_S.
    """

    began: float = -math.inf
    questions: int = 0
    asked_in: int = -1
    closing_at: float = math.inf
    missed: set[PeerId] = field(default_factory=set)
    vetoed_in: int = -1
    why: str = ""
    refused: set[str] = field(default_factory=set)
    tied: dict[PeerId, str] = field(default_factory=dict)
    _term: tuple[PeerId | None, float] = (None, -math.inf)
    _led: dict[PeerId, tuple[float, int]] = field(default_factory=dict)
    _tried: dict[PeerId, int] = field(default_factory=dict)
    _left_out: dict[PeerId, set[PeerId]] = field(default_factory=dict)
    _inventors: set[PeerId] = field(default_factory=set)

    def asked(self, term: int, now: float) -> None:
        """Count a question of this term's leader that moves the closing on: not one that asks the same again."""
        if self.asked_in != term:
            self.closing_at = now
        self.questions, self.asked_in = self.questions + 1, term

    def check_begins(self, leader: PeerId, now: float) -> None:
        """Raises Busy where a member that led for long enough is to begin a term, and the present one is too young."""
        led_s, again = self._led.get(leader, (0.0, 0))
        present, since = self._term
        led_s += now - since if present == leader else 0.0
        wait_s = since + TERM_S * 2.0**again - now
        if led_s >= TERM_S and wait_s > 0:
            raise Busy(f"{leader} led the step for {led_s:.0f} s: it may begin another term in {wait_s:.0f} s")

    def begins(self, leader: PeerId, now: float) -> None:
        """Note that a member begins a term."""
        present, since = self._term
        if present is not None:
            led_s, again = self._led.get(present, (0.0, 0))
            self._led[present] = led_s + now - since, again
        led_s, again = self._led.get(leader, (0.0, 0))
        self._led[leader] = led_s, min(again + (led_s >= TERM_S), MOST_DOUBLINGS)
        self._term = leader, now

    def attempt(self, leader: PeerId, term: int, live: Collection[str], late: Collection[str] = ()) -> None:
        """Note with whom this term's leader makes an attempt, and whom it leaves out after one with it: not those that
        are only ``late``, who stay members."""
        for peer, tried in self._tried.items():
            if tried == term and peer not in live and peer not in late:
                self._left_out.setdefault(peer, set()).add(leader)
        self._tried |= {PeerId(peer): term for peer in live}

    def unexplained(self, term: int, absent: Collection[str], gone: Collection[str], others: int) -> list[PeerId]:
        """Return those of ``absent`` that are there, were there all the time, and with which the step was not tried in
        this term, or not by two leaders that both went on without it: the word of one is not enough, unless only one
        of the ``others`` can lead."""
        known, enough = {*gone, *self.missed}, min(LEADERS, others)
        return [
            PeerId(p)
            for p in sorted(absent)
            if p not in known
            and (self._tried.get(PeerId(p), -1) < term or len(self._left_out.get(PeerId(p), ())) < enough)
        ]

    def made_up(self, leader: PeerId) -> bool:
        """Note that a leader proposed what cannot be. Return whether that is new."""
        new = leader not in self._inventors
        self._inventors.add(leader)
        return new

    def veto(self, term: int, record: CloseRecord, why: str) -> None:
        """Remember what we do not accept of this term's leader."""
        self.vetoed_in, self.why = term, why
        self.refused.add(record.hash())


@dataclass(frozen=True, slots=True)
class Vetoes:
    """One member's judgement of what it is asked to accept."""

    me: PeerId
    rules: StepRules

    def find(
        self, roster: Roster, record: CloseRecord, conduct: LeaderConduct, gone: Collection[str], now: float
    ) -> str:
        """Return why this record is vetoed, "" when it is not; ``gone`` are those whom this member does not hear."""
        if record.void:
            return self._absence(roster, record, conduct, {*gone, *conduct.tied}, now)
        if record.forks and self.me in record.absent:
            return ""  # those that closed it have signed that they saw no majority: what we heard is another side
        if why := self._absence(roster, record, conduct, gone, now):
            return why
        there = roster.feeding({*record.absent, *conduct.missed})
        return self._quota(roster, record, there)

    def _absence(
        self, roster: Roster, record: CloseRecord, conduct: LeaderConduct, gone: Collection[str], now: float
    ) -> str:
        """Name one whom its leader calls lost, and who is there. We do not judge about ourselves: how we were heard
        others know. Excused are replicas that the record proves wrong, or that nobody of their part can call, and
        trainers of whose work nothing is in the record of a step that is STALLED_S old."""
        others = set(record.absent) - {self.me, *newly_barred(record.barred, record.step)}
        heard = conduct.unexplained(record.term, others, gone, len(roster) - 1)
        if self.rules.served:
            heard = [peer for peer in heard if peer not in unserved(roster, set(record.absent) - {peer})]
        if now - conduct.began >= STALLED_S:
            worked = {one.microbatch.trainer for one in record.committed}
            heard = [peer for peer in heard if roster[peer].role != "trainer" or peer in worked]
        if not heard:
            return ""
        tried = "the step was not tried with it in this term, or fewer than two leaders have gone on without it"
        return f"{heard[0]} is there, as far as is known here, and {tried}"

    def _quota(self, roster: Roster, record: CloseRecord, there: Sequence[PeerId]) -> str:
        """Name the trainer that fed more of the step than is its share among those that were there throughout. In later
        terms than the first only one that has none: what was computed when a leader was lost counts no matter who did
        it."""
        most = self.rules.quota(record.step, there, roster.fed(there))
        fed = Counter(one.microbatch.trainer for one in record.committed)
        for trainer in there:
            if fed[trainer] > most[trainer] and (record.term == 0 or not most[trainer]):
                return f"{trainer} fed {fed[trainer]} microbatches of the step where {most[trainer]} are its quota"
        return ""
