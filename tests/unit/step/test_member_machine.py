"""Three members in a world that duplicates, reorders, delays and hangs up, under leaders who may lie."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any, ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swarm.consensus.majority import majority
from swarm.consensus.records import CloseRecord
from swarm.errors import PeerError
from swarm.ids import PeerId
from swarm.schema import Message
from swarm.step.messages import Accepted, Decide, Propose
from tests.harness.rigs.step import COMMITTED, GENESIS, ROSTER, MemberBench, apply, reconcile, record, sign

CHAIN = [GENESIS]
for _ in range(3):
    CHAIN.append(record(CHAIN[-1]))
SCRIPT = [(kind, step) for step in (1, 2, 3) for kind in ("reconcile", "apply", "propose", "decide")]
TURNS = 12
peers = st.sampled_from(ROSTER.peers)
steps = st.sampled_from([1, 1, 1, 2, 2, 3])
LIES = st.sampled_from([{}, {}, {}, {"grad_norm": 3.0}, {"lr": 0.25}])


class Swarm(RuleBasedStateMachine):
    """Every rule is one message to one member, or one nuisance. Leaders repeat what they please."""

    lies: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.benches = {peer: MemberBench(peer) for peer in ROSTER.peers}
        self.records = {kept.hash(): kept for kept in CHAIN}
        self.signed: dict[str, dict[str, bytes]] = defaultdict(dict)
        self.answered: dict[PeerId, int] = dict.fromkeys(ROSTER.peers, 0)
        self.asking: list[asyncio.Task[None]] = []
        self.unexpected: list[BaseException] = []

    @rule(to=st.none() | peers)
    def go_on(self, to: PeerId | None) -> None:
        """The honest leaders' next question; to one member, or to all."""
        for peer in ROSTER.peers if to is None else (to,):
            at = self.answered[peer]
            if at < len(SCRIPT):
                kind, step = SCRIPT[at]
                self.send(peer, self.honest(kind, step), at=at)

    # --- messages ------------------------------------------------------------------------------------------------

    @rule(to=st.none() | peers, step=steps, lie=st.integers(0, 4))
    def reconcile(self, to: PeerId | None, step: int, lie: int) -> None:
        self.send(to, reconcile(step, COMMITTED[:1] if lie == 4 and self.lies else COMMITTED))

    @rule(to=st.none() | peers, step=steps, lie=st.integers(0, 4))
    def apply(self, to: PeerId | None, step: int, lie: int) -> None:
        self.send(to, apply(step, lr=0.25 if lie == 4 and self.lies else 0.5))

    @rule(to=st.none() | peers, step=steps, lie=LIES)
    def propose(self, to: PeerId | None, step: int, lie: dict[str, Any]) -> None:
        self.send(to, Propose(record=self.variant(step, lie)))

    @rule(to=st.none() | peers, step=steps, lie=LIES, forge=st.booleans())
    def decide(self, to: PeerId | None, step: int, lie: dict[str, Any], forge: bool) -> None:
        """With the signatures that were really given, the missing ones made up at most."""
        chosen = self.variant(step, lie)
        made_up = {absent: sign(absent, b"something else") for absent in ROSTER.peers} if forge else {}
        acceptances = made_up | self.signed[chosen.hash()]
        self.send(to, Decide(step=step, record=chosen.hash(), acceptances=acceptances))

    # --- nuisances -----------------------------------------------------------------------------------------------

    @rule(peer=peers)
    def hold_up(self, peer: PeerId) -> None:
        for holder in (self.benches[peer].average, self.benches[peer].device):
            if holder.gate is None or holder.gate.is_set():
                holder.gate = asyncio.Event()

    @rule(peer=peers)
    def let_go(self, peer: PeerId) -> None:
        for holder in (self.benches[peer].average, self.benches[peer].device):
            if holder.gate is not None:
                holder.gate.set()
        self.turn()

    @precondition(lambda self: any(not task.done() for task in self.asking))
    @rule(choice=st.integers(0, 99))
    def hang_up(self, choice: int) -> None:
        pending = [task for task in self.asking if not task.done()]
        pending[choice % len(pending)].cancel()
        self.turn()

    # --- what must hold ------------------------------------------------------------------------------------------

    @invariant()
    def nothing_unexpected(self) -> None:
        assert not self.unexpected

    @invariant()
    def swapped_once_per_step_and_to_what_the_record_says(self) -> None:
        for bench in self.benches.values():
            kept = [self.records[digest] for digest in self.history(bench)]
            expected = [closed.digests[bench.part.name] for closed in kept]
            swapped = bench.part.swapped
            assert swapped[: len(expected)] == expected
            # The swap itself may be done and its record not yet kept, while the step is being closed.
            assert len(swapped) - len(expected) in (0, 1)

    @invariant()
    def nobody_swapped_without_a_majoritys_acceptance(self) -> None:
        for bench in self.benches.values():
            for digest in self.history(bench):
                assert len(self.signed[digest]) >= majority(len(ROSTER))

    @invariant()
    def nobody_is_cut_off_while_one_record_is_proposed(self) -> None:
        assert self.lies or not any(bench.position.cut_off for bench in self.benches.values())

    @invariant()
    def histories_are_one_chain(self) -> None:
        histories = sorted((self.history(bench) for bench in self.benches.values()), key=len)
        for shorter, longer in zip(histories, histories[1:], strict=False):
            assert longer[: len(shorter)] == shorter

    def teardown(self) -> None:
        """With honest leaders, whatever happened, the step that was opened last can still be closed."""
        for peer in ROSTER.peers:
            self.let_go(peer)
        if not self.lies:
            self.finish()
        for bench in self.benches.values():
            self.loop.run_until_complete(bench.member.close())
        for task in self.asking:
            task.cancel()
        self.turn()
        assert all(task.done() for task in self.asking)
        self.loop.close()

    # --- inside --------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        for kind, step in SCRIPT:
            self.send(None, self.honest(kind, step))
        assert {bench.position.open_step for bench in self.benches.values()} == {4}
        assert not self.unexpected

    def honest(self, kind: str, step: int) -> Message:
        if kind in ("reconcile", "apply"):
            return reconcile(step) if kind == "reconcile" else apply(step)
        if kind == "propose":
            return Propose(record=CHAIN[step])
        return Decide(step=step, record=CHAIN[step].hash(), acceptances=self.signed[CHAIN[step].hash()])

    def variant(self, step: int, lie: dict[str, Any]) -> CloseRecord:
        changed = record(CHAIN[step - 1], **lie) if self.lies else CHAIN[step]
        self.records[changed.hash()] = changed
        return changed

    def history(self, bench: MemberBench) -> list[str]:
        """Hashes of the records after the genesis, oldest first."""
        found: list[str] = []
        at = bench.history.head_hash
        while at != GENESIS.hash():
            found.insert(0, at)
            at = self.records[at].previous
        return found

    def send(self, to: PeerId | None, body: Any, *, at: int = -1) -> None:
        """To one member, or to all."""
        for peer in ROSTER.peers if to is None else (to,):
            self.asking.append(self.loop.create_task(self.ask(peer, body, at)))
        self.turn()

    async def ask(self, peer: PeerId, body: Any, at: int) -> None:
        try:
            answer = await self.benches[peer].ask(body)
        except PeerError:
            return
        except Exception as error:  # noqa: BLE001 - an invariant looks at it
            self.unexpected.append(error)
            return
        if self.answered[peer] == at:
            self.answered[peer] += 1
        if isinstance(answer, Accepted):
            self.signed[body.record.hash()][peer] = answer.signature

    def turn(self) -> None:
        async def turns() -> None:
            for _ in range(TURNS):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())


class HonestSwarm(Swarm):
    """The same world with leaders that never lie: then nothing may stop the run."""

    lies = False


quick = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestSwarm = Swarm.TestCase
TestSwarm.settings = quick
TestHonestSwarm = HonestSwarm.TestCase
TestHonestSwarm.settings = quick
