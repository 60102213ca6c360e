"""Ledger, wiring and step together, no matter who dies, stalls, comes back or takes over, in any order: each microbatch
counts once or is said not to, quotas are conserved, and only those that are there hold anything."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from peers.chaos.invariants.microbatches import prefix_problem
from swarm.consensus.records import CloseRecord, Contribution
from swarm.errors import Refused
from swarm.ids import MicrobatchId, PeerId, stage_of
from swarm.step.messages import COMPLETE, Complete, SignedReceipt
from tests.harness.rigs.common import set_aside
from tests.properties.bookkeeping import NO, RULES, STAGES, TRAINERS, Blocked, Books, Feeder

PEERS = [*STAGES[0], *STAGES[1], *TRAINERS]
SECONDS = {peer: 0.1 * (1 + index) for replicas in STAGES for index, peer in enumerate(replicas)}
RECEIPTS = (SignedReceipt(digest=bytes(32), signature=b"r" * 64),) * 2
MAX_TURNS = 60
"""Of all trainers together, to fill a batch of 6."""
which = st.integers(0, 10**6)


class BooksMachine(RuleBasedStateMachine):
    """See the module."""

    @initialize(hosted=st.booleans())
    def begin(self, hosted: bool) -> None:
        self.books = Books(hosted=hosted)
        self.counted: dict[MicrobatchId, int] = {}
        self.put_aside: set[MicrobatchId] = set()
        self.now = 0.0

    def teardown(self) -> None:
        self.books.close_loop()

    def feeder(self, number: int) -> Feeder | None:
        there = self.books.here(self.books.roster.trainers)
        return self.books.feeders[there[number % len(there)]] if there else None

    # --- work ----------------------------------------------------------------------------------------------------

    @rule(number=which, wanted=st.integers(1, 4))
    def lease(self, number: int, wanted: int) -> None:
        feeder, step = self.feeder(number), self.books.open_step
        assert feeder is not None
        try:
            granted = self.books.told(feeder, feeder.remote.lease(step, wanted))
        except NO:
            return
        assert granted <= wanted
        for _ in range(granted):
            feeder.under_way[feeder.take(step)] = [self.choose(feeder, stage, ()) for stage in range(len(STAGES))]

    def choose(self, feeder: Feeder, stage: int, tried: tuple[PeerId, ...]) -> PeerId:
        """As a journey does, but for the waiting: time passes until somebody may be chosen."""
        exclude = {*tried, *self.books.gone}
        while True:
            try:
                chosen, reason = feeder.wiring.choose(stage, exclude, now=self.now)
            except Refused:
                assert set(feeder.wiring.replicas(stage)) - exclude, "nobody is there"
                self.now += 1.0
                continue
            assert reason
            assert chosen in self.books.here(self.books.roster.columns()[stage])
            return chosen

    @rule(number=which, pick=which, detour=st.booleans())
    def come_home(self, number: int, pick: int, detour: bool) -> None:
        """A journey ends; where a replica is gone, or its answer is late, by another."""
        feeder = self.feeder(number)
        if feeder is None or not feeder.under_way:
            return
        microbatch = sorted(feeder.under_way)[pick % len(feeder.under_way)]
        route = feeder.under_way.pop(microbatch)
        for stage, peer in enumerate(route):
            late = detour and len(self.books.here(self.books.roster.columns()[stage])) > 1
            if peer in self.books.gone or late:
                feeder.wiring.fail(stage, peer, now=self.now)
                route[stage] = self.choose(feeder, stage, (peer,))
                self.books.held[peer].add(microbatch)  # it may have been done all the same
            self.books.held[route[stage]].add(microbatch)
            feeder.wiring.claimed(stage, route[stage], SECONDS[route[stage]], "forward")
        feeder.home[microbatch] = Contribution(microbatch=microbatch, tokens=7, loss_sum=1.5, route=tuple(route))
        self.report(number)

    @rule(number=which)
    def report(self, number: int) -> None:
        """What came home and was not taken note of so far."""
        feeder = self.feeder(number)
        for microbatch, contribution in list(feeder.home.items()) if feeder else ():
            assert feeder is not None
            try:
                work = feeder.remote.complete(self.books.open_step, contribution, RECEIPTS)
                self.books.told(feeder, work)
            except Blocked:
                continue
            except NO:
                pass
            feeder.home.pop(microbatch, None)

    @rule(number=which, pick=which)
    def give_up(self, number: int, pick: int) -> None:
        feeder, step = self.feeder(number), self.books.open_step
        if feeder is None or not feeder.under_way:
            return
        microbatch = sorted(feeder.under_way)[pick % len(feeder.under_way)]
        del feeder.under_way[microbatch]
        set_aside(feeder.taken, step, microbatch)
        self.put_aside.add(microbatch)
        try:
            self.books.told(feeder, feeder.remote.put_aside(step, microbatch, "poison"))
        except NO:
            return

    @rule(pick=which)
    def hear_twice(self, pick: int) -> None:
        """A report that the leader knows arrives again: nothing changes."""
        led = self.books.services[self.books.leader].book.led
        ledger = led and led.ledger
        known = ledger.committed() if ledger else ()
        if not known:
            return
        one = known[pick % len(known)]
        body = Complete(step=self.books.open_step, term=self.books.term, contribution=one, receipts=RECEIPTS)
        with contextlib.suppress(*NO):
            self.books.run(self.books.ask(self.books.leader, COMPLETE, body, timeout_s=1.0))
        assert ledger is not None
        assert ledger.committed() == known

    # --- faults --------------------------------------------------------------------------------------------------

    @rule(peer=st.sampled_from(PEERS), dies=st.booleans())
    def vanish(self, peer: PeerId, dies: bool) -> None:
        books = self.books
        if peer in books.here(books.roster.peers) and books.can_spare(peer):
            (books.dead if dies else books.suspected).add(peer)
            books.noticed()

    @rule(dies=st.booleans())
    def leader_vanishes(self, dies: bool) -> None:
        """Another takes over, and hears from the trainers what they have begun."""
        self.vanish(self.books.leader, dies)

    @rule(peer=st.sampled_from(PEERS))
    def answer_again(self, peer: PeerId) -> None:
        """It was only slow."""
        if peer in self.books.suspected:
            self.books.suspected.discard(peer)
            self.books.noticed()

    @precondition(lambda self: self.books.hosted and self.books.dead)
    @rule(pick=which)
    def lose(self, pick: int) -> None:
        """What nobody has any more of a dead trainer's."""
        book = self.books.services[self.books.leader].book
        ledger = book.led and book.led.ledger
        orphans = (
            [one.microbatch for one in ledger.committed() if one.microbatch.trainer in self.books.gone]
            if ledger
            else []
        )
        if orphans:
            book.exclude([orphans[pick % len(orphans)]])

    # --- steps ---------------------------------------------------------------------------------------------------

    @rule(back=st.sets(st.sampled_from(PEERS)), first=which, poison=st.booleans(), struck=st.booleans())
    def close(self, back: set[PeerId], first: int, poison: bool, struck: bool) -> None:
        """Those there fill the batch, whatever went before; on the way one may be given up, the leader die."""
        for turn in range(first, first + MAX_TURNS):
            if self.books.services[self.books.leader].book.full:
                break
            self.report(turn)
            self.lease(turn, 2)
            if poison and turn == first:
                self.give_up(turn, first)
            if struck and turn == first + 1:
                self.leader_vanishes(first % 2 == 0)
            self.come_home(turn, first, detour=False)
        record = self.books.close()
        self.check(record)
        self.books.decide(record, [peer for peer in back if peer in self.books.dead])

    def check(self, record: CloseRecord) -> None:
        assert len(record.committed) == RULES.target
        for one in record.committed:
            assert one.microbatch not in self.counted, (
                f"{one.microbatch} counts in step {self.counted[one.microbatch]} too"
            )
            self.counted[one.microbatch] = record.step
            for stage, peer in enumerate(one.route):
                assert peer not in self.books.gone
                assert stage_of(self.books.roster[peer].part) == stage  # type: ignore[arg-type]
                assert one.microbatch in self.books.held[PeerId(peer)]
        said = {one.microbatch for each in [*self.books.records, record] for one in each.aside}
        assert not said & self.counted.keys(), "set aside, and counted"
        for trainer, cursor in record.cursors.items():
            done = {(m.epoch, m.position) for m in self.counted if m.trainer == trainer}
            done |= {(m.epoch, m.position) for m in said if m.trainer == trainer and (m.epoch, m.position) < cursor}
            assert not prefix_problem(done, cursor), f"{trainer}: {prefix_problem(done, cursor)}"

    # --- always --------------------------------------------------------------------------------------------------

    @invariant()
    def quota_is_conserved(self) -> None:
        led = self.books.services[self.books.leader].book.led
        ledger = led and led.ledger
        assert ledger is not None, "nobody leads"
        aside = [one.microbatch for one in ledger.aside()]
        done = [one.microbatch for one in ledger.committed()]
        assert not set(aside) & set(done)
        leased = {trainer: account.leased for trainer, account in ledger._accounts.items()}
        assert sum(leased.values()) - len(aside) <= RULES.target
        for trainer in {*ledger.trainers, *leased}:
            mine = sum(m.trainer == trainer for m in aside) + sum(m.trainer == trainer for m in done)
            assert mine <= leased.get(trainer, 0), f"{trainer} has more than was leased to it"

    @invariant()
    def what_is_taken_was_leased(self) -> None:
        for feeder in self.books.feeders.values():
            assert len(feeder.started(self.books.open_step)) <= feeder.remote._book.leased


BooksMachine.TestCase.settings = settings(
    max_examples=50, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestBooks = pytest.mark.promise("a shard's cursor is exact")(BooksMachine.TestCase)
