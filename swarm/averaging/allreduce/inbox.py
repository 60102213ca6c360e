"""Collect the other members' messages in one round: sums for our chunks, agreements, aborts."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Set

from swarm.averaging.allreduce.messages import Agreement, Checked, ReduceRequest
from swarm.averaging.allreduce.meter import RoundMeter
from swarm.averaging.allreduce.partition import ReduceChunk
from swarm.averaging.allreduce.plan import MemberPlan, RoundPlan
from swarm.errors import Busy, Refused, RoundFailed, Violation
from swarm.ids import PeerId
from swarm.network.protocols import Payload

_Topic = tuple[int, int]
"""A chunk's index and a level."""

OVERDUE = 0.5
"""Share of a round's time after which a member that still owes something to us may be blamed when another gives up."""


MAX_ASKED = 4
"""How often a member may ask for one sum: answers get lost."""


class _RoundNews:
    """The waiting for news of one round. A ``failure`` ends all their waiting; the first one stays."""

    def __init__(self) -> None:
        self.failure: RoundFailed | None = None
        self._changed: dict[object, asyncio.Event] = {}

    async def wait(self, topic: object, reached: Callable[[], bool]) -> None:
        """Return when it is reached, which is looked at when the topic is woken, or when the round fails."""
        while not reached() and self.failure is None:
            await self._changed.setdefault(topic, asyncio.Event()).wait()

    def wake(self, topic: object) -> None:
        """Something of this topic has changed."""
        event = self._changed.pop(topic, None)
        if event is not None:
            event.set()

    def fail(self, failure: RoundFailed) -> None:
        """Wake all."""
        self.failure = self.failure or failure
        for topic in list(self._changed):
            self.wake(topic)


class _HeldSums:
    """The sums that came and are not added up yet, and those that are coming, within each member's window."""

    def __init__(self, plan: RoundPlan, place: MemberPlan) -> None:
        self._plan, self._place = plan, place
        self._sums: dict[_Topic, dict[PeerId, Payload]] = {}
        self._held: Counter[tuple[PeerId, int, int]] = Counter()
        self._open: dict[tuple[PeerId, int, int], bool] = {}  # calls; whether their sum is still coming
        self._coming: Counter[tuple[PeerId, int, int]] = Counter()
        self._taken: set[_Topic] = set()

    def begin(self, caller: PeerId, request: ReduceRequest) -> None:
        """See :meth:`Inbox.take_place`."""
        call, at = (caller, request.index, request.level), self._window_of(caller, request)
        if call in self._open:
            raise Busy("that is asked already")
        if self._is_new(caller, request):
            if self._held[at] + self._coming[at] >= self._plan.window * (2 if request.level else 1):
                raise Busy("that is more than the window")
            self._coming[at] += 1
        self._open[call] = self._is_new(caller, request)

    def end(self, caller: PeerId, request: ReduceRequest) -> None:
        """See :meth:`Inbox.call_over`."""
        if self._open.pop((caller, request.index, request.level), False):
            self._coming[self._window_of(caller, request)] -= 1

    def hold(self, caller: PeerId, request: ReduceRequest, payload: Payload) -> bool:
        """Keep a sum that came; False for one that is here already, or has been added up."""
        if not self._is_new(caller, request):
            return False
        topic = request.index, request.level
        self._sums.setdefault(topic, {})[caller] = payload
        self._held[self._window_of(caller, request)] += 1
        if self._open.get((caller, *topic)):
            self._open[caller, *topic] = False
            self._coming[self._window_of(caller, request)] -= 1
        return True

    def came(self, topic: _Topic) -> Set[PeerId]:
        """Return the members whose sum of a chunk at a level is here."""
        return self._sums.get(topic, {}).keys()

    def take(self, topic: _Topic) -> dict[PeerId, Payload]:
        """Return the sums of a chunk at a level, and let go of them."""
        self._taken.add(topic)
        return self._sums.pop(topic, {})

    def is_taken(self, topic: _Topic) -> bool:
        """Return whether they were taken."""
        return topic in self._taken

    def let_in(self, chunk: ReduceChunk, level: int) -> None:
        """Have room for the next ones of those whose sums of this chunk were held."""
        for peer in self._place.station(chunk, level).due:
            self._held[peer, chunk.rank, level] -= 1

    def fills_window(self, peer: PeerId, rank: int) -> bool:
        """Return whether a member has sent as much of a part as it may before it hears from us."""
        return self._held[peer, rank, 0] >= self._plan.window

    def clear(self) -> None:
        """Let go of everything."""
        for kept in (self._sums, self._held, self._open, self._coming):
            kept.clear()

    def _window_of(self, caller: PeerId, request: ReduceRequest) -> tuple[PeerId, int, int]:
        return caller, self._plan.chunks[request.index].rank, request.level

    def _is_new(self, caller: PeerId, request: ReduceRequest) -> bool:
        topic = request.index, request.level
        return topic not in self._taken and caller not in self.came(topic)


class Inbox:
    """The messages of one round, from the moment it is expected until it is over. For one event loop, no I/O.

    Holds at most ``plan.window`` unreduced chunks of a part from each that is below us in its tree, and twice as many
    of who trades with us; a sum sent twice counts once, the first.
    Anyone who waits here is woken when the round ends, whichever way.
    """

    def __init__(self, plan: RoundPlan, me: PeerId) -> None:
        self.plan, self.me, self.place = plan, me, MemberPlan(plan, me)
        self.agreements: dict[PeerId, str] = {}
        self.roots: dict[PeerId, Mapping[str, str]] = {}
        """What members were given to commit to, in a round that is checked."""
        self.cleared: set[ReduceChunk] = set()
        """What others call wrong, and was found right here."""
        self.meter = RoundMeter()
        self.entered_at = math.inf
        self._sums = _HeldSums(plan, self.place)
        self.in_at: dict[PeerId, float] = {}
        self._said: dict[PeerId, bool] = {}  # who has answered; whether it is in
        self._traded = False
        self._given: Counter[tuple[PeerId, int]] = Counter()  # bytes of each result
        self._results: dict[int, memoryview] = {}
        self._news = _RoundNews()
        self.suspicious = False
        """Whether an attempt before this one was void because a mean was wrong: then everything is checked."""
        self.commitment: bytes | None = None
        """What who asks whether we are in is told in a round that is checked; None until it is known."""
        self.judged: RoundFailed | None = None
        """Whom we saw to be wrong, while others still look."""
        self._own: Callable[[ReduceChunk], Payload] | None = None
        self._asked: Counter[tuple[PeerId, int, int | None]] = Counter()
        self._lent = 0
        self._checked: dict[int, dict[PeerId, Checked]] = {0: {}, 1: {}}
        self._looked = False

    @property
    def failure(self) -> RoundFailed | None:
        """Return why the round is void, once it is."""
        return self._news.failure

    @property
    def bytes_answered(self) -> int:
        """Bytes of the results given so far, and of sums to who checks, repetitions included."""
        return self._given.total() + self._lent

    def admit(self, caller: PeerId, request: ReduceRequest, payload_bytes: int) -> None:
        """Raise Violation or Refused unless this member may send this many bytes, before there is room for them."""
        self.admit_member(caller, request.plan)
        if request.index >= len(self.plan.chunks):
            raise Violation(f"there is no chunk {request.index}", peer=caller)
        chunk = self.plan.chunks[request.index]
        weight = self.place.station(chunk, request.level).weights.get(caller)
        if weight is None:
            raise Violation(f"chunk {request.index} is not reduced here for it", peer=caller)
        if request.weight != weight:
            raise Violation(f"claims weight {request.weight}, the ledger says {weight}", peer=caller)
        expected = self.plan.sums.wire_bytes(chunk.elements) if weight else 0
        if payload_bytes != expected:
            raise Violation(f"chunk {request.index} has {payload_bytes} bytes, not {expected}", peer=caller)

    def take_place(self, caller: PeerId, request: ReduceRequest) -> None:
        """An admitted call begins: its sum counts from now on, whether it has arrived or not, until :meth:`call_over`.

        Raises Busy when more chunks of this member are unreduced here, or coming, than its window allows, and for what
        it has asked already and is not answered.
        """
        self._sums.begin(caller, request)

    def call_over(self, caller: PeerId, request: ReduceRequest) -> None:
        """A call that took a place is over: one whose sum has not arrived gives it back."""
        self._sums.end(caller, request)

    def admit_member(self, caller: PeerId, plan_digest: str) -> None:
        """Raise Violation for one who is no member, Refused for a member under another plan or after a failure."""
        if caller not in self.plan.weights:
            raise Violation(f"is no member of round {self.plan.key}", peer=caller)
        self._refuse_if_void()
        if plan_digest != self.plan.digest:
            raise Refused(f"round {self.plan.key} is planned differently here")

    async def answer(self, caller: PeerId, request: ReduceRequest, payload: memoryview) -> memoryview:
        """Hold an admitted sum and wait for the chunk's result, as bytes that must not change before the round ends; a
        trade waits for nothing.

        Raises Refused when the round fails meanwhile. Cancelling forgets the question, not the sum.
        """
        if payload and self._sums.hold(caller, request, payload):
            self._news.wake((request.index, request.level))
        if request.level:
            return memoryview(b"")
        await self._news.wait(("result", request.index), lambda: request.index in self._results)
        self._refuse_if_void()
        encoded = self._results[request.index]
        self._given[caller, request.index] += len(encoded)
        self._news.wake("given")
        return encoded

    def said_busy(self, peer: PeerId) -> None:
        """Note that a member has answered whether it is in, if only that it is not yet."""
        self._said.setdefault(peer, False)

    def said_in(self, peer: PeerId, now: float) -> None:
        """Note that a member is in: it said so, or it asked whether we are."""
        self._said[peer] = True
        self.in_at.setdefault(peer, now)
        self._news.wake(("in", peer))

    @property
    def waited(self) -> dict[PeerId, float]:
        """Return for how long we were in without those that came later."""
        return {peer: at - self.entered_at for peer, at in self.in_at.items() if at > self.entered_at}

    async def wait_in(self, peer: PeerId) -> None:
        """Until a member says that it is in, or the round fails."""
        await self._news.wait(("in", peer), lambda: self._said.get(peer, False))

    async def wait_given(self) -> None:
        """Until everybody has the results that only we can give, or the round failed. Who adds something asked with its
        sums, long ago; who adds nothing may ask later. Raises RoundFailed."""
        await self._news.wait("given", lambda: not self._to_give())
        self.raise_failure()

    def _to_give(self) -> set[PeerId]:
        chunks = self.plan.chunks_of(self.me)
        return {peer for chunk in chunks for peer in self.place.askers(chunk) if (peer, chunk.index) not in self._given}

    def unsure(self) -> list[PeerId]:
        """Return the members that do not hold the whole result, as far as we know."""
        return sorted(set(self.plan.members) - self.agreements.keys() if self.plan.signed else self._to_give())

    def agree(self, caller: PeerId, message: Agreement) -> None:
        """Note that a member holds the whole result. The first word counts."""
        if caller not in self.agreements:
            self.agreements[caller], self.roots[caller] = message.result, message.sums
            self._news.wake("agreement")

    def fail(self, failure: RoundFailed) -> None:
        """End the round for all who wait here. The first reason stays; what was held is let go."""
        self._sums.clear()
        self._results.clear()
        self._news.fail(failure)

    async def wait_sums(self, chunk: ReduceChunk, level: int = 0) -> dict[PeerId, Payload]:
        """All sums of one chunk that are due at a level, encoded; they are let go here. Raises RoundFailed."""
        topic, due = (chunk.index, level), self.place.station(chunk, level).due
        await self._news.wait(topic, lambda: self._sums.came(topic) >= due)
        self.raise_failure()
        if level:
            self._sums.let_in(chunk, level)
        return self._sums.take(topic)

    def publish(self, chunk: ReduceChunk, encoded: memoryview) -> None:
        """Answer those who wait for a chunk's result, and let their next ones in. ``encoded`` must stay as it is."""
        if self.place.askers(chunk):
            self._results[chunk.index] = encoded
            self._sums.let_in(chunk, 0)
            self._news.wake(("result", chunk.index))

    def traded(self) -> None:
        """We hold the whole result, and nobody needs to stay with us any longer."""
        self._traded = True
        self._news.wake("traded")

    async def wait_traded(self) -> None:
        """Until we hold the whole result. Raises Refused when the round fails before."""
        await self._news.wait("traded", lambda: self._traded)
        if not self._traded:
            self._refuse_if_void()

    async def wait_signed(self, caller: PeerId, result: str) -> None:
        """Until we signed the same result ourselves; for a caller whom nobody calls, until all such have told us, too.
        Raises Refused when the round fails meanwhile, as it does when a result differs."""
        outgoing = self.plan.outgoing
        awaited = {self.me, *outgoing} if caller in outgoing else {self.me}
        await self._news.wait("agreement", lambda: awaited <= self.agreements.keys())
        self._refuse_if_void()
        if any(self.agreements[peer] != result for peer in awaited):
            await self._news.wait("failure", lambda: False)  # until we know who differs from most, and fail for it
            self._refuse_if_void()

    async def wait_agreements(self) -> None:
        """Until every member agreed or the round failed. Raises RoundFailed, also when the results differ."""
        await self._news.wait("agreement", lambda: len(self.agreements) == len(self.plan.members))
        self.raise_failure()
        if len(set(self.agreements.values())) > 1:
            raise self._disagreement()

    def _disagreement(self) -> RoundFailed:
        """Names who differs from what more than half of the members hold, if they hold the same, and it is not we."""
        ((result, count),) = Counter(self.agreements.values()).most_common(1)
        others = [peer for peer in self.plan.members if self.agreements.get(peer, result) != result]
        told = ", ".join(f"{peer} {digest[:12]}" for peer, digest in sorted(self.agreements.items()))
        dissenter = others[0] if 2 * count > len(self.plan.members) else ""
        blamed = dissenter if dissenter != self.me else ""
        return RoundFailed(f"members hold different results: {told}", peer=blamed, differs=True)

    # --- a round that is checked ---------------------------------------------------------------------------------

    def commit(self, told: bytes, own: Callable[[ReduceChunk], Payload]) -> None:
        """We have committed to our sum, whose chunks are ``own``."""
        self.commitment, self._own = told, own

    def admit_check(
        self, caller: PeerId, index: int, block: int | None
    ) -> tuple[Callable[[ReduceChunk], Payload], ReduceChunk]:
        """Return what gives one who checks our sum of a chunk, off the loop where that has to be encoded. Raises
        Violation, and Busy before we hold the result: else one could commit to what it makes of the others' sums."""
        if not self.plan.checked or not self.plan.weights[self.me] or index >= len(self.plan.chunks):
            raise Violation(f"there is no sum of chunk {index} here", peer=caller)
        if block is not None and block >= self.plan.blocks:
            raise Violation(f"chunk {index} is not cut into blocks", peer=caller)
        if self._own is None or self.me not in self.agreements:
            raise Busy("that is told once all have committed to theirs")
        self._asked[caller, index, block] += 1
        if self._asked[caller, index, block] > MAX_ASKED:
            raise Violation(f"asks for the sum of chunk {index} again and again", peer=caller)
        chunk = self.plan.chunks[index]
        whole = self.plan.sums.wire_bytes(chunk.elements)
        self._lent += whole if block is None else whole // self.plan.blocks
        return self._own, chunk

    def note_checked(self, caller: PeerId, message: Checked) -> None:
        """A member has checked: one that has agreed, as all have before they check. The first word counts. Raises
        Violation for chunks that their accusers did not have to check, and Busy before it has agreed."""
        if caller not in self.agreements:
            raise Busy("it has not told what it holds")
        for accuser, (index, _) in message.wrong.items():
            if index >= len(self.plan.chunks) or self.plan.reducer(self.plan.chunks[index]) == accuser:
                raise Violation(f"tells of chunk {index}, which is no other's", peer=caller)
        if message.turn == 0 and not message.wrong.keys() <= {caller}:
            raise Violation("speaks for others before it has heard them", peer=caller)
        self._checked[message.turn].setdefault(caller, message)
        self._news.wake("checked")

    async def wait_checked(self, turn: int, members: Set[PeerId]) -> Mapping[PeerId, Checked]:
        """What these say that they found, and those who else have by then; those that others call wrong may say
        nothing. Raises RoundFailed."""
        told = self._checked[turn].keys()
        await self._news.wait("checked", lambda: all(self.is_accused(peer) for peer in members - told))
        self.raise_failure()
        return dict(self._checked[turn])

    def looked(self) -> None:
        """We have looked at all that others call wrong, and need no sums any more."""
        self._looked = True
        self._news.wake("looked")

    async def wait_looked(self) -> None:
        """Until we have. Raises Refused when the round ends before."""
        await self._news.wait("looked", lambda: self._looked)
        self._refuse_if_void()

    def is_accused(self, peer: PeerId) -> bool:
        """Return whether another member calls a chunk wrong that this one reduced, and that is not cleared."""
        told = {self.plan.chunks[index] for said in self._checked[0].values() for index, _ in said.wrong.values()}
        return any(self.plan.reducer(chunk) == peer for chunk in told - self.cleared)

    async def wait_accused(self, peer: PeerId) -> None:
        """Until it is, or the round fails."""
        await self._news.wait("checked", lambda: self.is_accused(peer))

    # --- how a round fails ----------------------------------------------------------------------------------------

    async def wait_failure(self) -> None:
        """Until another member's message voids the round; then raises its RoundFailed."""
        await self._news.wait("failure", lambda: False)
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the round's failure, if it failed."""
        if (one := self.failure) is not None:
            more = {"differs": one.differs, "proven": one.proven}
            raise RoundFailed(one.reason, peer=one.peer, aborted_by=one.aborted_by, **more)

    def given_up_by(self, caller: PeerId, reason: str, now: float, culprit: PeerId | None = None) -> RoundFailed:
        """Return the failure of the round when another member says that it is void. Nobody is blamed for its word: only
        whom we suspect ourselves, when we have waited so long that this means something; else one could frame those who
        is slow. In a round that follows others it must be the member that it names, if any is: all may wait for one
        that is in an earlier round and not in ours."""
        if self.judged is not None:
            return self.judged
        if len(set(self.agreements.values())) > 1:
            return self._disagreement()  # as we know as well as it does
        overdue = now - self.entered_at >= OVERDUE * self.plan.timeout_s
        suspects = [peer for peer in self.suspects()[1] if overdue and peer != caller]
        blamed = culprit if culprit in suspects else None if self.plan.key.round else next(iter(suspects), None)
        return RoundFailed(reason, peer=blamed or "", aborted_by=caller)

    def suspects(self) -> tuple[str, tuple[PeerId, ...]]:
        """Return, for a late round, the reason in words, and the members on which it broke, in rank order: only those
        that need not wait for others themselves. Nobody when all may be waiting for somebody else.

        One that has not even answered whether it is in comes first: a link that swallows everything is at no other
        place as plain to see. Then those that are not in, for all that are were let in without waiting for anybody;
        those that owe a sum; and who alone has not signed, where all others hold the whole result.
        """
        asked = self.plan.called_by(self.me)
        unsigned = set(self.plan.members) - self.agreements.keys()
        for lacking, those in (
            ("no answer", {peer for peer in asked if peer not in self._said}),
            ("it did not enter", {peer for peer in asked if not self._said.get(peer, False)}),
            ("no sum", self._owing_below() or self._owing_beside()),
            ("no agreement", unsigned - {self.me} if len(unsigned) == 1 else set()),
        ):
            if those:
                return lacking, tuple(peer for peer in self.plan.members if peer in those)
        return "", ()

    def _owing_below(self) -> set[PeerId]:
        """Return the members whose sum is missing for the first chunk that we have not added up: only those that need
        not wait for others themselves, nor for our answers to a whole window of what they sent."""
        seen: set[int] = set()
        for chunk in self.plan.chunks:
            if chunk.rank in seen or self._sums.is_taken((chunk.index, 0)):
                continue
            seen.add(chunk.rank)
            owing = {
                peer
                for peer in self.place.blamed(chunk) - self._sums.came((chunk.index, 0))
                if not self._sums.fills_window(peer, chunk.rank)
            }
            if owing:
                return owing
        return set()

    def _owing_beside(self) -> set[PeerId]:
        """With whom we trade first, when not even the first sum of all came, and nobody is below it: for a later chunk,
        or at a later level, it may be waiting for others."""
        for chunk in self.plan.chunks[: min(1, self.place.levels)]:
            due = self.place.station(chunk, 1).due - self._sums.came((chunk.index, 1))
            if not self._sums.is_taken((chunk.index, 1)):
                return {peer for peer in due if not self.plan.routes.children(peer, self.plan.reducer(chunk))}
        return set()

    def _refuse_if_void(self) -> None:
        if self.failure is not None:
            raise Refused(f"round {self.plan.key} is void: {self.failure}")
