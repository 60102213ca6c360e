"""Reduce some chunks again that others reduced, before the round counts: a wrong mean has no other witness.

All members get the same bytes of a chunk, whatever its reducer made of the sums. So in a round that is checked each
member draws some of them in secret, or blocks of them, asks for the sums, and reduces them again, to the bit. What a
block shows only has its whole chunk looked at. Nobody can be framed:

* Each contributor commits to its sum before any travels: it signs the root of its blocks' hashes. Reducers take only
  what it committed to, and so do those who check. With what they hold all tell the roots that they were given, and
  compare them before they check anything. So a member that hands the reducer one sum and others another is named
  itself, and a reducer for nothing that it could not know.
* What one member calls wrong, signed, all tell each other, and reduce it again before anybody leaves. A mean that is
  wrong names its reducer at each of them. One that is right stays, no matter who says otherwise.
* Who keeps a sum back, or gives up, is named for nothing but its own mean, and by nobody else than who had drawn it.

What a member saw so for itself is ``proven`` there: it never is of an honest one, whose roots all have, and whose mean
these give at any machine. More than half of the others who say so have it barred (:mod:`swarm.consensus.faults`).

Cost of a round of K members: a hash of the own sum and of all sums that are reduced here, some .3 ns a byte; K - 1
signatures to verify, .1 ms each; two small calls more to each other member; and of what is drawn all sums.
Related: Verde (arXiv 2502.19405) settles disputes by computing one step again, once all agree on what went into it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from blake3 import blake3

from swarm.averaging.allreduce.guard import FAR, distances
from swarm.averaging.allreduce.inbox import Inbox
from swarm.averaging.allreduce.messages import CHECKED, SUM, Checked, SumRequest
from swarm.averaging.allreduce.output import Floats, ReducedVector, weighted_mean
from swarm.averaging.allreduce.partition import BLOCKS, ReduceChunk
from swarm.averaging.allreduce.plan import RoundPlan
from swarm.averaging.allreduce.questions import Means, RoundQuestions
from swarm.errors import RoundFailed, Violation
from swarm.ids import PeerId
from swarm.network.protocols import Payload
from swarm.security.signing import SIGNATURE_BYTES, Signing
from swarm.waiting import first_done

logger = logging.getLogger(__name__)
ItemT = TypeVar("ItemT", bound=Hashable)
FoundT = TypeVar("FoundT")
HASH_BYTES = 32
NEAR = 0.05
"""Who is so near to being far out may be left out of a mean by one machine, and not by another."""
MOST_UNSURE = 4
"""Where more are, a mean that looks wrong may be right elsewhere."""


@dataclass(frozen=True, slots=True)
class Commitment:
    """The hashes of the blocks of one member's encoded chunks, in their order, and its signature under their root."""

    leaves: bytes
    signature: bytes

    @classmethod
    def of(cls, plan: RoundPlan, encoded: Iterable[Payload], signing: Signing) -> Commitment:
        """Commit to these chunks; none of a member that contributes nothing."""
        leaves = b"".join(_leaves(plan, chunk, one) for chunk, one in zip(plan.chunks, encoded, strict=False))
        return cls(leaves, signing.sign(_signed(plan, _root(leaves))))

    @classmethod
    def read(cls, plan: RoundPlan, peer: PeerId, told: Payload, signing: Signing) -> Commitment:
        """Read what a member answered. Raises Violation, naming it, for what it did not sign or has another length."""
        read = bytes(told)
        found = cls(read[SIGNATURE_BYTES:], read[:SIGNATURE_BYTES])
        chunks = len(plan.chunks) if plan.weights[peer] else 0
        if len(read) != SIGNATURE_BYTES + HASH_BYTES * plan.blocks * chunks:
            raise Violation(f"commits to its sum with {len(read)} bytes", peer=peer)
        if not signing.verify(peer, _signed(plan, found.root), found.signature):
            raise Violation("did not sign what it commits to", peer=peer)
        return found

    @property
    def root(self) -> bytes:
        """The hash of all."""
        return _root(self.leaves)

    def to_bytes(self) -> bytes:
        """Return what :meth:`read` takes."""
        return self.signature + self.leaves

    def fits(self, plan: RoundPlan, chunk: ReduceChunk, encoded: Payload) -> bool:
        """Return whether a chunk's sum is the one that was committed to. Cost: a hash of it."""
        size = HASH_BYTES * plan.blocks
        return _leaves(plan, chunk, encoded) == self.leaves[size * chunk.index : size * (chunk.index + 1)]

    def fits_block(self, plan: RoundPlan, chunk: ReduceChunk, number: int, encoded: Payload) -> bool:
        """Return the same of one block."""
        at = HASH_BYTES * (plan.blocks * chunk.index + number)
        return blake3(encoded).digest() == self.leaves[at : at + HASH_BYTES]


def commitment_bytes(plan: RoundPlan) -> int:
    """Return the most that a commitment takes."""
    return SIGNATURE_BYTES + HASH_BYTES * plan.blocks * len(plan.chunks)


def block_of(plan: RoundPlan, chunk: ReduceChunk, encoded: Payload, number: int) -> Payload:
    """Return the bytes of one block of a chunk's sum, in a plan with several."""
    cut = chunk.block(number)
    return memoryview(encoded)[plan.item_bytes * cut.start : plan.item_bytes * cut.stop]


def equivocator(
    plan: RoundPlan, mine: Mapping[PeerId, Commitment], told: Mapping[str, str], signing: Signing
) -> PeerId | None:
    """Return who gave another than us another commitment, as its signatures show."""
    for peer, ours in mine.items():
        other = bytes.fromhex(told.get(peer, ""))
        root, signature = other[:HASH_BYTES], other[HASH_BYTES:]
        if root != ours.root and signing.verify(peer, _signed(plan, root), signature):
            return peer
    return None


def drawn(plan: RoundPlan, me: PeerId, *, everything: bool) -> tuple[list[ReduceChunk], list[tuple[ReduceChunk, int]]]:
    """Draw from what others reduce; nobody else can know what: chunks, and blocks. Blocks show who gives a wrong mean
    of all sums, however short the vector is. Who leaves the wrong ones out is seen in whole chunks only: where there is
    a guard half of the share goes to each."""
    draw, chunks, blocks = random.SystemRandom(), list[ReduceChunk](), list[tuple[ReduceChunk, int]]()
    everything = everything or plan.checked == 1.0
    whole = 1.0 if everything or plan.blocks == 1 else 0.5 if plan.guarded else 0.0
    for chunk in plan.chunks:
        if plan.reducer(chunk) == me:
            continue
        if everything or draw.random() < plan.checked * whole:
            chunks.append(chunk)
            continue
        cuts = [] if whole == 1.0 else [n for n in range(BLOCKS) if chunk.block(n).start < chunk.block(n).stop]
        blocks += [(chunk, number) for number in cuts if draw.random() < plan.checked * (1.0 - whole)]
    return chunks, blocks


def is_mean(plan: RoundPlan, chunk: ReduceChunk, sums: Mapping[PeerId, Floats], seal: bytes) -> bool | None:
    """Return whether the bytes with this hash are what an honest reducer makes of these sums, in rank order; None where
    that hangs on the machine. Machines differ in the last bits of a distance: who is beside the limit may be in or out,
    and all of them are tried, up to MOST_UNSURE."""
    found = distances(sums, plan.weights) if plan.guarded else [0.0] * len(sums)
    far = {peer for peer, one in zip(sums, found, strict=True) if one > FAR * (1 + NEAR)}
    unsure = [peer for peer, one in zip(sums, found, strict=True) if abs(one - FAR) <= FAR * NEAR]
    tried = unsure[:MOST_UNSURE]
    for some in itertools.chain.from_iterable(itertools.combinations(tried, n) for n in range(len(tried) + 1)):
        kept = {peer: values for peer, values in sums.items() if peer not in far.union(some)}
        divisor = plan.divisor - sum(plan.weights[peer] for peer in far.union(some))
        mean = weighted_mean(kept, list(kept), divisor, plan.result_dtype)
        if blake3(plan.results.encode(mean, chunk)).digest() == seal:
            return True
    return False if tried == unsure else None


def _surest(found: Mapping[ReduceChunk, bool | None]) -> ReduceChunk:
    """Return the chunk to name of those that are not right: the first that is wrong, before one of which that is not
    known. So all who see the same name the same."""
    return min(found, key=lambda one: (found[one] is None, one.index))


def _leaves(plan: RoundPlan, chunk: ReduceChunk, encoded: Payload) -> bytes:
    cuts = [encoded] if plan.blocks == 1 else [block_of(plan, chunk, encoded, number) for number in range(BLOCKS)]
    return b"".join(blake3(one).digest() for one in cuts)


def _root(leaves: bytes) -> bytes:
    return blake3(leaves).digest()


def _signed(plan: RoundPlan, root: bytes) -> bytes:
    return b"sum|" + plan.digest.encode() + b"|" + root


def _accused(plan: RoundPlan, index: int) -> bytes:
    return f"wrong|{plan.digest}|{index}".encode()


async def _each(items: Iterable[ItemT], look: Callable[[ItemT], Awaitable[FoundT]]) -> dict[ItemT, FoundT]:
    """Look at each, AT_ONCE of them at a time."""
    left, found = iter(items), dict[ItemT, FoundT]()

    async def lane() -> None:
        for item in left:
            found[item] = await look(item)

    async with asyncio.TaskGroup() as lanes:
        for _ in range(AT_ONCE):
            lanes.create_task(lane())
    return found


# --- one member's part in it ------------------------------------------------------------------------------------------

PATIENCE_S = 0.5
"""For so long it is looked for another reason when one gives up whom others may call wrong."""
AT_ONCE = 4
"""Chunks that are reduced again side by side: their sums are held meanwhile."""


class RoundCheck:
    """What one member does of it. ``local`` is its vector of sums, None of one that contributes nothing."""

    def __init__(self, means: Means, inbox: Inbox, questions: RoundQuestions, local: Floats | None) -> None:
        assert means.signing is not None  # noqa: S101 - who checks signs, see AllReduce
        self._means, self._inbox, self._questions, self._local = means, inbox, questions, local
        self._signing, self._plan, self._me = means.signing, inbox.plan, inbox.me
        self._commitments: dict[PeerId, Commitment] = {}

    async def commit(self) -> None:
        """Commit to our own sum. From here on we say that we are in, and answer who checks."""
        own = self._commitments[self._me] = await self._means.run(self._committed)
        self._inbox.commit(own.to_bytes(), self._own)

    def _committed(self) -> Commitment:
        encoded = () if self._local is None else map(self._own, self._plan.chunks)
        return Commitment.of(self._plan, encoded, self._signing)

    def _own(self, chunk: ReduceChunk) -> Payload:
        assert self._local is not None  # noqa: S101 - else nobody may ask for it
        return self._plan.sums.encode(self._local[chunk.start : chunk.stop], chunk)

    def take(self, peer: PeerId, told: Payload) -> None:
        """Take another's commitment. Raises RoundFailed."""
        try:
            self._commitments[peer] = Commitment.read(self._plan, peer, told, self._signing)
        except Violation as error:
            raise RoundFailed(error.reason, peer=peer) from error

    def look_at(self, chunk: ReduceChunk, sums: Mapping[PeerId, Payload]) -> None:
        """Raise Violation where one of a chunk's sums is not the one that its member committed to. Any thread."""
        for peer, encoded in sums.items():
            if not self._commitments[peer].fits(self._plan, chunk, encoded):
                raise Violation(f"sent another sum of chunk {chunk.index} than it committed to", peer=peer)

    def roots(self) -> dict[str, str]:
        """Return what we tell the others of the commitments that we were given."""
        given = {peer: one for peer, one in self._commitments.items() if peer != self._me}
        return {peer: (one.root + one.signature).hex() for peer, one in given.items()}

    async def run(self, output: ReducedVector) -> None:
        """Check what we draw, and what others call wrong; all hold the same result by now. Raises RoundFailed naming
        who is wrong, once those who only look on have seen it, too."""
        everybody, inbox = set(self._plan.members), self._inbox
        inbox.judged = self._compared()
        found = {}
        if inbox.judged is None:
            chunks, blocks = drawn(self._plan, self._me, everything=inbox.suspicious)
            found = await self._found(output, [*chunks, *await self._doubted(output, blocks)])
        own: dict[str, tuple[int, bytes]] = {}
        if found:
            chunk = _surest(found)
            inbox.judged = self._failure(chunk, known=found[chunk] is False)
            own = {self._me: (chunk.index, self._signing.sign(_accused(self._plan, chunk.index)))}
        told = await self._heard_out(output, await self._tell(Checked.of(self._plan, turn=0, wrong=own), everybody))
        heard = {peer: said for one in told.values() for peer, said in self._signed(one).items()}
        # One that is called wrong at one member only, is called so at all now: nobody leaves before it was looked at.
        again = await self._tell(Checked.of(self._plan, turn=1, wrong=heard), everybody)
        for by, one in again.items():
            heard |= {peer: said for peer, said in self._signed(one).items() if peer != by}
        if inbox.judged is None and not heard:
            return
        accused = {self._plan.chunks[index] for index, _ in heard.values()} - inbox.cleared
        failure = inbox.judged = inbox.judged or await self._judged(output, accused)
        aside = {*heard, *map(self._plan.reducer, accused), *([failure.peer] if failure is not None else [])}
        inbox.looked()
        await asyncio.gather(*(self._wait_for(peer) for peer in everybody - aside - {self._me}))
        if failure is not None:
            raise failure

    async def _heard_out(self, output: ReducedVector, told: Mapping[PeerId, Checked]) -> Mapping[PeerId, Checked]:
        """Return what all found but those whose chunk is wrong, as others say, or may be: they may say nothing. Who is
        called wrong and is not is heard, too: it may be about to name who says so."""
        inbox, everybody = self._inbox, set(self._plan.members)
        while inbox.judged is None and (silent := everybody - told.keys()):
            signed = {index for one in told.values() for index, _ in self._signed(one).values()}
            called = {self._plan.chunks[index] for one in told.values() for index, _ in one.wrong.values()}
            called = {chunk for chunk in called if self._plan.reducer(chunk) in silent}
            if await self._judged(output, {chunk for chunk in called if chunk.index in signed}) is not None:
                break
            inbox.cleared |= called
            told = await inbox.wait_checked(0, everybody)
        return told

    def _signed(self, said: Checked) -> dict[str, tuple[int, bytes]]:
        """Return what members call wrong, as far as they signed it."""
        return {
            peer: (index, signature)
            for peer, (index, signature) in said.wrong.items()
            if peer in self._plan.weights
            and (peer == self._me or self._signing.verify(PeerId(peer), _accused(self._plan, index), signature))
        }

    def _failure(self, chunk: ReduceChunk, *, known: bool) -> RoundFailed:
        reducer = self._plan.reducer(chunk)
        did = f"reduced chunk {chunk.index} to something else than its sums give"
        unsure = f"reduced chunk {chunk.index}, and nothing shows that it did so rightly"
        if reducer == self._me:
            return RoundFailed(did if known else unsure)
        return RoundFailed(did if known else unsure, peer=reducer, proven=known)

    async def _tell(self, message: Checked, awaited: set[PeerId]) -> Mapping[PeerId, Checked]:
        """Tell these, and wait for the same of them; returns what each said."""
        self._inbox.note_checked(self._me, message)
        async with asyncio.TaskGroup() as tasks:
            for peer in awaited - {self._me}:
                tasks.create_task(self._tell_one(peer, message))
            said = await self._inbox.wait_checked(message.turn, awaited)
        return said

    async def _wait_for(self, peer: PeerId) -> None:
        """Until one has looked at what others call wrong, for which it may need our sums, or has ended."""
        with contextlib.suppress(RoundFailed):
            await self._questions.ask(peer, CHECKED, Checked.of(self._plan, turn=2))

    async def _tell_one(self, peer: PeerId, message: Checked) -> None:
        """Tell one that may have given up because it is called wrong: then others say so in a moment."""
        try:
            await self._questions.ask(peer, CHECKED, message)
        except RoundFailed as failed:
            if not failed.peer:
                await first_done(self._means.clock.sleep(PATIENCE_S), self._inbox.wait_accused(peer))
            if not self._inbox.is_accused(peer):
                raise

    def _compared(self) -> RoundFailed | None:
        """Say who committed to two sums. What each member was given it has told with what it holds: a reducer does so
        before it is checked by what others were given. What one shows of itself does not count: it may show that to a
        single member, which would name it alone, and be taken for the liar."""
        for by, told in sorted(self._inbox.roots.items()):
            given = {peer: root for peer, root in told.items() if peer != by}
            if (found := equivocator(self._plan, self._commitments, given, self._signing)) is not None:
                return RoundFailed("committed to two sums in one round", peer=found, proven=True)
        return None

    async def _judged(self, output: ReducedVector, accused: Iterable[ReduceChunk]) -> RoundFailed | None:
        """Say which of the chunks that others call wrong is. One that is right stays, no matter who says otherwise;
        where nothing shows that one is, the round is void, and nobody is named for that."""
        found = await self._found(output, sorted(accused, key=lambda chunk: chunk.index))
        if not found:
            return None
        if found[chunk := _surest(found)] is False:
            return self._failure(chunk, known=True)
        return RoundFailed(f"chunk {chunk.index} is called wrong, and nothing shows that it is right")

    async def _found(self, output: ReducedVector, chunks: Iterable[ReduceChunk]) -> dict[ReduceChunk, bool | None]:
        """Return those of the chunks that are not shown to be right: see :meth:`_is_right`."""
        right = await _each(chunks, partial(self._is_right, output))
        return {chunk: one for chunk, one in right.items() if not one}

    async def _doubted(self, output: ReducedVector, blocks: Iterable[tuple[ReduceChunk, int]]) -> list[ReduceChunk]:
        """Return the chunks to be reduced again, for a block of them is not the mean of all sums, or nobody knows."""
        plain = await _each(blocks, partial(self._is_plain, output))
        return sorted({chunk for (chunk, _), one in plain.items() if not one}, key=lambda chunk: chunk.index)

    async def _is_plain(self, output: ReducedVector, drawn: tuple[ReduceChunk, int]) -> bool:
        """Return whether a block is the mean of all sums. One that is not may be right: see :meth:`_is_right`."""
        plan, (chunk, number), sums = self._plan, drawn, dict[PeerId, Floats]()
        cut, request = chunk.block(number), SumRequest.of(plan, index=chunk.index, block=number)
        elements = cut.stop - cut.start
        try:
            for peer in plan.contributors:
                if peer == self._me:
                    given = block_of(plan, chunk, self._own(chunk), number)
                else:
                    given = await self._questions.ask(peer, SUM, request, b"", plan.sums.wire_bytes(elements))
                if not self._commitments[peer].fits_block(plan, chunk, number, given):
                    return False
                sums[peer] = plan.sums.decode(given, elements)
            mean = weighted_mean(sums, list(sums), plan.divisor, plan.result_dtype)
        except (RoundFailed, Violation):
            return False
        held = output.vector[chunk.start : chunk.stop][cut]
        return np.array_equal(mean, held)

    async def _is_right(self, output: ReducedVector, chunk: ReduceChunk) -> bool | None:
        """Return whether a chunk's mean is that of its sums; None where its own reducer keeps its sum to itself, or it
        hangs on the machine. Where another does, it counts as right: else who keeps it back could have others blamed.
        """
        request, most = SumRequest.of(self._plan, index=chunk.index), self._plan.sums.wire_bytes(chunk.elements)
        sums: dict[PeerId, Payload] = {}
        for peer in self._plan.contributors:
            try:
                own = peer == self._me
                sums[peer] = self._own(chunk) if own else await self._questions.ask(peer, SUM, request, b"", most)
                await self._means.run(self.look_at, chunk, {peer: sums[peer]})
            except (RoundFailed, Violation) as error:
                logger.warning("chunk %d cannot be checked, %s gives no sum: %s", chunk.index, peer, error)
                return None if peer == self._plan.reducer(chunk) else True
        try:
            right: bool | None = await self._means.run(self._fits, chunk, sums, output.seal(chunk))
        except Violation as error:
            raise RoundFailed(error.reason, peer=error.peer) from error
        return right

    def _fits(self, chunk: ReduceChunk, sums: Mapping[PeerId, Payload], seal: bytes) -> bool | None:
        decoded = {peer: self._plan.sums.decode(encoded, chunk.elements) for peer, encoded in sums.items()}
        return is_mean(self._plan, chunk, decoded, seal)
