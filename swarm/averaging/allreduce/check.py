"""Reduce some chunks again that others reduced, before the round counts: a wrong mean has no other witness.

All members get the same bytes of a chunk, whatever its reducer made of the sums. So in a round that is checked each
member draws some of them in secret, asks for the sums, and reduces them again, to the bit. Nobody can be framed:

* Each contributor commits to its sum before any travels: it signs the root of its chunks' hashes. Reducers take only
  what it committed to, and so do those who check; at the end all compare the roots that they were given. So a member
  that hands the reducer one sum and others another is named itself.
* What one member calls wrong all others reduce again as well, and each names whom it saw to be wrong: the reducer, or
  the one that called it wrong.

Cost of a round of K members: a hash of the own sum and of all sums that are reduced here, some .3 ns a byte; K - 1
signatures to verify, .1 ms each; two small calls more to each other member; and of the chunks that are drawn all sums.
Related: Verde (arXiv 2502.19405) settles disputes by computing one step again, once all agree on what went into it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from blake3 import blake3

from swarm.averaging.allreduce.guard import FAR, distances
from swarm.averaging.allreduce.inbox import Inbox
from swarm.averaging.allreduce.messages import CHECKED, SUM, Checked, SumRequest
from swarm.averaging.allreduce.output import Floats, ReducedVector, weighted_mean
from swarm.averaging.allreduce.partition import ReduceChunk
from swarm.averaging.allreduce.plan import RoundPlan
from swarm.averaging.allreduce.questions import Means, RoundQuestions
from swarm.errors import RoundFailed, Violation
from swarm.ids import PeerId
from swarm.network.protocols import Payload
from swarm.security.signing import SIGNATURE_BYTES, Signing
from swarm.waiting import first_done

HASH_BYTES = 32
NEAR = 0.01
"""Who is so near to being far out may be left out of a mean by one machine, and not by another."""
MOST_UNSURE = 4
"""Who so many others are beside is judged as it looks here."""


@dataclass(frozen=True, slots=True)
class Commitment:
    """The hashes of one member's encoded chunks, in their order, and its signature under their root."""

    leaves: bytes
    signature: bytes

    @classmethod
    def of(cls, plan: RoundPlan, encoded: Iterable[Payload], signing: Signing) -> Commitment:
        """Commit to these chunks; none of a member that contributes nothing."""
        leaves = b"".join(blake3(one).digest() for one in encoded)
        return cls(leaves, signing.sign(_signed(plan, _root(leaves))))

    @classmethod
    def read(cls, plan: RoundPlan, peer: PeerId, told: Payload, signing: Signing) -> Commitment:
        """Read what a member answered. Raises Violation, naming it, for what it did not sign or has another length."""
        read = bytes(told)
        found = cls(read[SIGNATURE_BYTES:], read[:SIGNATURE_BYTES])
        chunks = len(plan.chunks) if plan.weights[peer] else 0
        if len(read) != SIGNATURE_BYTES + HASH_BYTES * chunks:
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

    def fits(self, chunk: ReduceChunk, encoded: Payload) -> bool:
        """Return whether a chunk's sum is the one that was committed to. Cost: a hash of it."""
        at = HASH_BYTES * chunk.index
        return blake3(encoded).digest() == self.leaves[at : at + HASH_BYTES]


def commitment_bytes(plan: RoundPlan) -> int:
    """Return the most that a commitment takes."""
    return SIGNATURE_BYTES + HASH_BYTES * len(plan.chunks)


def told_roots(commitments: Mapping[PeerId, Commitment]) -> dict[PeerId, str]:
    """Return what a member tells the others of the commitments that it was given."""
    return {peer: (one.root + one.signature).hex() for peer, one in commitments.items()}


def equivocator(
    plan: RoundPlan, mine: Mapping[PeerId, Commitment], teller: PeerId, told: Mapping[str, str], signing: Signing
) -> tuple[PeerId, str] | None:
    """Say who gave ``teller`` another commitment than us, as its signatures show; the teller where it shows none."""
    for peer, ours in mine.items():
        other = bytes.fromhex(told.get(peer, ""))
        root, signature = other[:HASH_BYTES], other[HASH_BYTES:]
        if root == ours.root:
            continue
        if signing.verify(peer, _signed(plan, root), signature):
            return peer, "committed to two sums in one round"
        return teller, f"tells of a sum that {peer} did not commit to"
    return None


def drawn(plan: RoundPlan, me: PeerId, *, everything: bool) -> list[ReduceChunk]:
    """Draw from the chunks that others reduce; nobody else can know which."""
    chance = random.SystemRandom().random
    others = (chunk for chunk in plan.chunks if plan.reducer(chunk) != me)
    return [chunk for chunk in others if everything or chance() < plan.checked]


def is_mean(plan: RoundPlan, chunk: ReduceChunk, sums: Mapping[PeerId, Floats], seal: bytes) -> bool:
    """Return whether the bytes with this hash are what an honest reducer makes of these sums, in rank order."""
    means = (weighted_mean(kept, list(kept), divisor, plan.result_dtype) for kept, divisor in _kept(plan, sums))
    return any(blake3(plan.results.encode(mean, chunk)).digest() == seal for mean in means)


def _kept(plan: RoundPlan, sums: Mapping[PeerId, Floats]) -> list[tuple[dict[PeerId, Floats], int]]:
    """Whose sums may be in the mean, and what divides them. Machines differ in the last bits of a distance."""
    found = distances(sums, plan.weights) if plan.guarded else [0.0] * len(sums)
    far = {peer for peer, one in zip(sums, found, strict=True) if one > FAR * (1 + NEAR)}
    unsure = [peer for peer, one in zip(sums, found, strict=True) if abs(one - FAR) <= FAR * NEAR][:MOST_UNSURE]
    choices = itertools.chain.from_iterable(itertools.combinations(unsure, n) for n in range(len(unsure) + 1))
    left_out = [far.union(some) for some in choices]
    return [
        ({peer: values for peer, values in sums.items() if peer not in out},
         plan.divisor - sum(plan.weights[peer] for peer in out))
        for out in left_out
    ]  # fmt: skip


def _root(leaves: bytes) -> bytes:
    return blake3(leaves).digest()


def _signed(plan: RoundPlan, root: bytes) -> bytes:
    return b"sum|" + plan.digest.encode() + b"|" + root


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
            if not self._commitments[peer].fits(chunk, encoded):
                raise Violation(f"sent another sum of chunk {chunk.index} than it committed to", peer=peer)

    async def run(self, output: ReducedVector) -> None:
        """Check what we draw, and what others call wrong; all hold the same result by now. Raises RoundFailed naming
        who is wrong, once those who only look on have seen it, too."""
        wrong = await self._wrong(output, drawn(self._plan, self._me, everything=self._inbox.suspicious))
        if wrong:
            self._inbox.judged = self._failure(wrong[0])
        message = Checked.of(
            self._plan, turn=0, wrong=wrong[0].index if wrong else None, sums=told_roots(self._commitments)
        )
        told = await self._tell(message, set(self._plan.members))
        accused = {peer: self._plan.chunks[said.wrong] for peer, said in told.items() if said.wrong is not None}
        failure = self._inbox.judged or self._compared(told) or await self._judged(output, accused)
        if failure is None:
            return
        self._inbox.judged = failure
        aside = {failure.peer, *accused, *map(self._plan.reducer, accused.values())}
        try:
            await self._tell(Checked.of(self._plan, turn=1), set(self._plan.members) - aside)
        except* RoundFailed:
            pass  # the others give up for the same reason
        raise failure

    def _failure(self, wrong: ReduceChunk) -> RoundFailed:
        reducer = self._plan.reducer(wrong)
        blamed = "" if reducer == self._me else reducer
        return RoundFailed(f"reduced chunk {wrong.index} to something else than its sums give", peer=blamed)

    async def _tell(self, message: Checked, awaited: set[PeerId]) -> Mapping[PeerId, Checked]:
        """Tell these, and wait for the same of them; returns what each said."""
        self._inbox.note_checked(self._me, message)
        async with asyncio.TaskGroup() as tasks:
            for peer in awaited - {self._me}:
                tasks.create_task(self._tell_one(peer, message))
            said = await self._inbox.wait_checked(message.turn, awaited)
        return said

    async def _tell_one(self, peer: PeerId, message: Checked) -> None:
        """Tell one that may have given up because it is called wrong: then others say so in a moment."""
        try:
            await self._questions.ask(peer, CHECKED, message)
        except RoundFailed as failed:
            if not failed.peer:
                await first_done(self._means.clock.sleep(PATIENCE_S), self._inbox.wait_accused(peer))
            if not self._inbox.is_accused(peer):
                raise

    def _compared(self, told: Mapping[PeerId, Checked]) -> RoundFailed | None:
        """Say who committed to two sums."""
        for peer, said in sorted(told.items()):
            found = equivocator(self._plan, self._commitments, peer, said.sums, self._signing)
            if found is not None:
                return RoundFailed(found[1], peer=found[0])
        return None

    async def _judged(self, output: ReducedVector, accused: Mapping[PeerId, ReduceChunk]) -> RoundFailed | None:
        """Say who is wrong about the chunks that these members call wrong: a reducer before one that only says so."""
        chunks = {chunk.index: chunk for chunk in accused.values()}
        wrong = await self._wrong(output, chunks.values())
        if wrong:
            return self._failure(wrong[0])
        for peer, chunk in sorted(accused.items()):
            return RoundFailed(f"calls the mean of chunk {chunk.index} wrong, which is right", peer=peer)
        return None

    async def _wrong(self, output: ReducedVector, chunks: Iterable[ReduceChunk]) -> list[ReduceChunk]:
        """Return those of the chunks whose mean is not what their sums give."""
        left, right = iter(chunks), dict[ReduceChunk, bool]()

        async def lane() -> None:
            for chunk in left:
                right[chunk] = await self._is_right(output, chunk)

        async with asyncio.TaskGroup() as lanes:
            for _ in range(AT_ONCE):
                lanes.create_task(lane())
        return sorted((chunk for chunk in right if not right[chunk]), key=lambda chunk: chunk.index)

    async def _is_right(self, output: ReducedVector, chunk: ReduceChunk) -> bool:
        request, most = SumRequest.of(self._plan, index=chunk.index), self._plan.sums.wire_bytes(chunk.elements)
        sums: dict[PeerId, Payload] = {}
        for peer in self._plan.contributors:
            own = peer == self._me
            sums[peer] = self._own(chunk) if own else await self._questions.ask(peer, SUM, request, b"", most)
        try:
            right: bool = await self._means.run(self._fits, chunk, sums, output.seal(chunk))
        except Violation as error:
            raise RoundFailed(error.reason, peer=error.peer) from error
        return right

    def _fits(self, chunk: ReduceChunk, sums: Mapping[PeerId, Payload], seal: bytes) -> bool:
        self.look_at(chunk, sums)
        decoded = {peer: self._plan.sums.decode(encoded, chunk.elements) for peer, encoded in sums.items()}
        return is_mean(self._plan, chunk, decoded, seal)
