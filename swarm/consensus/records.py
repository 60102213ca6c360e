"""The close record: what was decided about a step, once. The run's history is the chain of these."""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median_low
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import (
    Field,
    GetCoreSchemaHandler,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    StringConstraints,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from swarm.columns import MAX_VARIANTS, becomes, joined
from swarm.consensus.admissions import ADMISSIONS_BYTES, Admissions
from swarm.consensus.committed import UnpackedRow, pack, unpack
from swarm.consensus.faults import BARRED_BYTES, FAULT_BYTES, MAX_BARRED, MAX_FAULTS, Fault
from swarm.consensus.majority import majority
from swarm.consensus.roster import Member, Roster
from swarm.consensus.slowness import Barred, Slow
from swarm.consensus.trials import Trial, Words, failed, resting
from swarm.errors import Refused
from swarm.ids import PartName, PeerId, StepWork
from swarm.schema import (
    LISTED,
    MAX_BYTES_PER_S,
    MAX_LATENCY_US,
    Count,
    DigestField,
    Message,
    MicrobatchField,
    PartField,
    PeerIdField,
)
from swarm.security.signing import Verify

if TYPE_CHECKING:
    import torch  # commands that only read records start without it

NO_RECORD = "0" * 64
"""What the first record names as its predecessor."""


MeasuredLink = tuple[Annotated[int, Field(ge=0, le=MAX_LATENCY_US)], Annotated[int, Field(ge=0, le=MAX_BYTES_PER_S)]]
"""A member's link: microseconds one way to the others of its part, and bytes a second; 0 for what is not known."""


CodecName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]{1,16}$")]
CodecPair = tuple[CodecName, CodecName]
"""The codecs of a boundary: of activations, and of their gradients."""
MAX_PACE_US = 1 << 42
"""Microseconds that a microbatch is believed to take at most: weeks."""


MAX_SQ_NORM = 1e100
"""More than any mean gradient has: its numbers fit into float32, so that their squares are below 1.2e77 each."""

FAR_LOSS = 8.0
"""A microbatch with more nats a token, and so many times what most have, is far out, and so is one with so many times
fewer than most have."""

SquaredNorm = Annotated[float, Field(ge=0, le=MAX_SQ_NORM)]


Late = tuple[Annotated[int, Field(ge=1, le=1 << 10)], Count]
"""Closes that a replica has missed in a row, and the tokens of what it did in them."""
Length = Annotated[float, Field(ge=0, le=1e100)]
GradientLengths = tuple[Length, Length]
"""Of microbatches: of their gradients of a part's parameters, and of those that came to the part for them."""
Guarded = Annotated[dict[PeerIdField, Count], Field(max_length=1024)]
"""Whose sums a replica left out of what it averaged for all, and how many of their target tokens the mean so lacks."""
Cap = Annotated[float, Field(gt=0, lt=1)]
"""What the mean of a part that was far out is scaled by."""


class Contribution(Message):
    """One committed microbatch: its target tokens, its loss, and the replica of each stage that holds its gradient.
    ``early``: it was computed with the parameters of the record before the one that its step follows. ``choice`` says
    which variants of stages it passes (:func:`~swarm.columns.takes`)."""

    microbatch: MicrobatchField
    tokens: Count
    loss_sum: float
    route: Annotated[tuple[PeerIdField, ...], Field(max_length=1024)]
    early: Annotated[bool, Field(exclude_if=operator.not_)] = False
    choice: Annotated[int, Field(ge=0, lt=MAX_VARIANTS, exclude_if=operator.not_)] = 0

    @property
    def nats(self) -> float:
        """Return its loss, per target token."""
        return self.loss_sum / self.tokens if self.tokens else 0.0

    def work(self, step: int) -> StepWork:
        """Return what counts of it, in the step that commits it."""
        return StepWork(step, self.microbatch, self.early)


def _made(row: UnpackedRow) -> Contribution:
    return Contribution.model_construct(**row._asdict())  # checked as it was read


def _read(value: Any) -> Any:
    packed = isinstance(value, tuple) and value and isinstance(value[0], tuple)
    return unpack(value, _made) if packed else value


def _written(committed: Any, in_full: SerializerFunctionWrapHandler, info: SerializationInfo) -> Any:
    return in_full(committed) if info.mode_is_json() else pack(committed)


class _PackedInMessages:
    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        in_full = handler(source)
        return core_schema.json_or_python_schema(
            in_full,
            core_schema.no_info_before_validator_function(_read, in_full),
            serialization=core_schema.wrap_serializer_function_ser_schema(_written, info_arg=True, schema=in_full),
        )


Committed = Annotated[tuple[Contribution, ...], LISTED, _PackedInMessages()]
"""A step's microbatches: in messages as :mod:`swarm.consensus.committed` packs them, in files in full."""


class Quarantined(Message):
    """A microbatch that no replica could compute: it counts for nothing, and its trainer goes on after it."""

    microbatch: MicrobatchField
    reason: Annotated[str, StringConstraints(max_length=200)]


class Confirmation(Message):
    """The proof that the first record of a provisional lineage was decided after all: its signatures, in a later
    term."""

    term: Count
    acceptances: Annotated[
        dict[PeerIdField, Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]], Field(max_length=64)
    ]

    @staticmethod
    def of(term: int, acceptances: Mapping[str, bytes]) -> Confirmation:
        """Make a confirmation from signatures."""
        return Confirmation(term=term, acceptances={peer: signed.hex() for peer, signed in acceptances.items()})

    def signatures(self) -> dict[str, bytes]:
        """By peer."""
        return {peer: bytes.fromhex(signed) for peer, signed in self.acceptances.items()}


_LEFT_OUT = frozenset(
    {"links", "paces", "codecs", "ended", "norms", "caps", "guarded", "lengths", "usual", "late", "spread_ms", "slow"}
    | {"admissions", "repeats", "returns", "resumed", "faults", "barred", "words", "trials", "passed", "dealt"}
)
"""Fields of a record that are not written where they say nothing."""


class CloseRecord(Message):
    """The decision about a step: the microbatches that count, the scalars, and the results. A ``founding`` record, with
    which a run begins, has no microbatches: step 0 is the genesis, with the digests of the initial weights; a resumed
    run begins with the step of its checkpoint. A ``void`` record has none either: the step was given up, because all
    holders of a part were lost; weights and cursors stay, and the roster names the new holder
    (``swarm.step.member.rescue``). An ``ended`` record ends the run before its last step, as all members had asked.
    A void record that ``repeats`` steps is decided in place of the step of that number, which nobody could finish: the
    run goes back to the checkpoint of the record's own ``step``, and a new chain begins with it. ``returns`` counts how
    often it did: of two records that one is newer that has more, or as many and a later step (:attr:`age`). ``resumed``
    is drawn for each founding record of a run that is resumed: what was signed after one shows nothing of a member
    after another of the same checkpoint and members.

    ``roster`` takes part in the *next* step. ``digests`` are of parameters and optimizer state after this step.
    ``cursors`` say where every shard continues. ``term`` is the one in which it was proposed first. ``absent`` are the
    members that were lost in the step. ``links`` is what was measured of those of members that train a part, which
    nobody can check: nothing but speed depends on it, the next step's schedules and codecs, its moves, and how much of
    its work a replica gets. ``paces`` are the microseconds that a stage's replicas say they compute one microbatch for,
    and ``codecs`` those of the *next* step, by boundary from the trainers' embedding to their head, which everybody
    finds in the same way (``swarm.step.boundary_codecs``); empty where the manifest says them. ``norms`` are the
    squared norms of all parts' means. From them follow ``grad_norm``, ``clip`` and ``caps``: the factors for all means,
    and for those of parts whose norm was far out (``swarm.optim.clipping``). ``guarded`` says by replica whose sums it
    left out, which nobody else can check: nothing but what people are told depends on it. ``lengths`` are what
    replicas say is usual among their microbatches, and ``usual`` is what follows from them and the record before, by
    part: what bounds a microbatch of the next step (``swarm.optim.clipping``). ``late`` are the replicas that were not
    ready for the close, and are members as before, with what they are owed; ``spread_ms`` is how much arrivals usually
    differ (``swarm.step.lateness``). ``slow`` are those that hold steps up, as leaders say, or did
    (``swarm.consensus.slowness``). ``faults`` prove members wrong, and ``barred`` says until when they, and those
    before them, may not join again (``swarm.consensus.faults``). ``words`` are what replicas say of the trainers whose
    microbatches they hold, and ``trials`` what follows from them and the record before (``swarm.consensus.trials``).
    ``passed`` is how many microbatches have passed each variant of a stage lately (:func:`swarm.columns.passed_by`),
    ``dealt`` the step with which copies of a part were given to other peers last (``swarm.step.moves``).
    ``admissions`` are there in a run that not everybody may join. Size: see :func:`record_bytes`.

    ``lineage`` is 0 for what a majority decided. Without one it is the step of the first record that those who were
    there closed by themselves (``swarm.consensus.branches``), until one that carries its ``confirmation``.
    """

    run: DigestField
    lineage: Count = 0
    step: Count
    term: Count = 0
    committed: Committed
    aside: Annotated[tuple[Quarantined, ...], LISTED] = ()
    tokens: Count
    loss_sum: float
    grad_norm: float
    clip: float
    lr: float
    digests: Annotated[dict[PartField, DigestField], Field(max_length=1025)]
    cursors: Annotated[dict[PeerIdField, tuple[Count, Count]], LISTED]
    roster: Annotated[tuple[Member, ...], Field(max_length=20_000)]
    absent: Annotated[tuple[PeerIdField, ...], Field(max_length=20_000)] = ()
    void: bool = False
    ended: bool = False
    repeats: Count = 0
    returns: Count = 0
    resumed: Count = 0
    links: Annotated[dict[PeerIdField, MeasuredLink], Field(max_length=20_000)] = {}
    paces: Annotated[dict[PeerIdField, Annotated[int, Field(gt=0, le=MAX_PACE_US)]], Field(max_length=20_000)] = {}
    codecs: Annotated[tuple[CodecPair, ...], Field(max_length=1025)] = ()
    norms: Annotated[dict[PartField, SquaredNorm], Field(max_length=1025)] = {}
    caps: Annotated[dict[PartField, Cap], Field(max_length=1025)] = {}
    guarded: Annotated[dict[PeerIdField, Guarded], Field(max_length=20_000)] = {}
    lengths: Annotated[dict[PeerIdField, GradientLengths], Field(max_length=20_000)] = {}
    usual: Annotated[dict[PartField, GradientLengths], Field(max_length=1025)] = {}
    late: Annotated[dict[PeerIdField, Late], Field(max_length=20_000)] = {}
    spread_ms: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    slow: Annotated[dict[PeerIdField, Slow], Field(max_length=20_000)] = {}
    faults: Annotated[tuple[Fault, ...], Field(max_length=MAX_FAULTS)] = ()
    barred: Annotated[dict[PeerIdField, Barred], Field(max_length=MAX_BARRED)] = {}
    words: Annotated[dict[PeerIdField, Words], Field(max_length=20_000)] = {}
    trials: Annotated[dict[PeerIdField, Trial], Field(max_length=20_000)] = {}
    passed: Annotated[dict[PartField, Count], Field(max_length=1025)] = {}
    dealt: Annotated[dict[PartField, Count], Field(max_length=1025)] = {}
    admissions: Admissions | None = None
    confirmation: Confirmation | None = None
    previous: DigestField

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        """Return what goes back keeps nothing of the open step: a record that had results, too, would be checked for
        these. And only who founds draws a number: the others' hashes follow from what they decide."""
        if self.repeats and not (self.void and self.step < self.repeats):
            raise ValueError("a record that goes back is void, and of a step before the open one")
        if self.resumed and not self.founding:
            raise ValueError("only a record with which a run goes on is drawn a number")
        return self

    @model_serializer(mode="wrap")
    def _as_ever(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave unset fields out, so that records made before a field existed keep their hash."""
        plain: dict[str, Any] = dump(self)
        return {key: value for key, value in plain.items() if value or key not in _LEFT_OUT}

    def __copy__(self) -> Self:
        """Copy the fields alone: a changed copy (``model_copy``) has another hash, and may have another roster."""
        copied = super().__copy__()
        for kept in copied.__dict__.keys() - type(self).model_fields:
            del copied.__dict__[kept]
        return copied

    @cached_property
    def members(self) -> Roster:
        """The next step's roster: one object, since much is found from a roster once (``copies.copy_duties``)."""
        unfed = resting(self.trials, self.step + 1)
        return Roster(self.roster, self.admissions, self.slow, self.barred, unfed, self.dealt)

    @property
    def failed_trainers(self) -> Mapping[PeerId, Trial]:
        """Return the trainers that it takes the quota from."""
        return {} if self.void else failed(self.trials, self.step)

    @property
    def founding(self) -> bool:
        """True if a run begins with it."""
        return not self.committed and not self.void

    @property
    def decides(self) -> int:
        """The number of the step whose close it decides: its own, but for one with which the run goes back."""
        return self.repeats or self.step

    @property
    def age(self) -> tuple[int, int]:
        """Return what orders the records of a run: a later one has a greater age."""
        return self.returns, self.step

    def told_of(self, part: PartName) -> str:
        """Return what replicas of a part of the step said of their state after it, where the record has it: the part's
        digest, or those of the stages that it has turned into (:func:`~swarm.columns.joined`)."""
        return joined(self.digests.get(one, "") for one in ((part,) if part in self.digests else becomes(part)))

    def follows(self, before: CloseRecord) -> bool:
        """Return whether it is of the very next step of the same history."""
        return self.step == before.step + 1 and self.previous == before.hash()

    @property
    def provisional(self) -> bool:
        """True if nobody knows yet that it counts."""
        return self.lineage > 0

    @property
    def forks(self) -> bool:
        """True if a provisional lineage begins with it."""
        return self.provisional and self.lineage == self.step

    @cached_property
    def loss(self) -> float:
        """Nats per target token, without the microbatches that are far out; 0 for the genesis."""
        out = self.far_out
        tokens, loss_sum = self.tokens - sum(one.tokens for one in out), self.loss_sum
        if out:
            loss_sum = math.fsum(one.loss_sum for one in self.committed if one not in out)
        return loss_sum / tokens if tokens else 0.0

    @cached_property
    def far_out(self) -> tuple[Contribution, ...]:
        """Return the microbatches whose loss is so far from that of most that it says nothing about the model: above
        it, or below, as of text that is easy, or of a trainer that reports less than it computed. Nothing else follows
        from it."""
        usual = median_low([one.nats for one in self.committed] or [0.0])
        least, most = usual / FAR_LOSS, max(FAR_LOSS, FAR_LOSS * usual)
        return tuple(one for one in self.committed if not least <= one.nats <= most)

    @property
    def suspect(self) -> PeerId | None:
        """Return who alone can have made them so: it is in all of them, and in few others; None where nobody is, or two
        are. A loss is the trainer's word, but may come of what replicas gave it."""
        out = self.far_out
        hands = [{PeerId(one.microbatch.trainer), *map(PeerId, one.route)} for one in out]
        had = Counter(peer for one in self.committed for peer in {one.microbatch.trainer, *one.route})
        found = [peer for peer in set.intersection(*hands) if 2 * len(out) > had[peer]] if hands else []
        return found[0] if len(found) == 1 else None

    @cached_property
    def called_far(self) -> Mapping[PeerId, tuple[int, tuple[PeerId, ...]]]:
        """Return of how many target tokens of whose sums means lack, and who says so that left them out: no more of a
        peer than it computed, for several may count the same ones, and one may lie."""
        did = Counter[str]()
        for one in self.committed if self.guarded else ():
            did.update(dict.fromkeys((one.microbatch.trainer, *one.route), one.tokens))
        found: dict[PeerId, tuple[int, tuple[PeerId, ...]]] = {}
        for by, sums in sorted(self.guarded.items()):
            for peer, tokens in sums.items():
                before, others = found.get(PeerId(peer), (0, ()))
                found[PeerId(peer)] = min(before + tokens, did[peer]), (*others, PeerId(by))
        return found

    def hash(self) -> str:
        """Hex sha256 of the canonical JSON: what acceptances sign and the next record names. Found once a record."""
        return self._hash

    @cached_property
    def _hash(self) -> str:
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Decision:
    """A decided record, the term in which a majority accepted it with the signatures that prove it, and what it was
    decided about: the mean gradient of the part that this peer holds, float32 on CPU (None without a part, for a
    founding record, and for a member that could not compute it), and the digest that it found its weights to have with
    it ("" then)."""

    record: CloseRecord
    acceptances: Mapping[str, bytes]
    mean: torch.Tensor | None = None
    term: int = 0
    digest: str = ""

    def proven(self, roster: Roster, verify: Verify) -> Decision:
        """With the signatures of those only who take part in its step, ``roster``; of a founding record, whom it names.
        Who tells of a decision may add what he likes."""
        asked = self.record.members if self.record.founding else roster
        signed = valid_acceptances(self.record, asked.peers, self.acceptances, verify, self.term)
        return replace(self, acceptances=signed)


class RecentDecisions:
    """The last ``most`` decisions made at this peer, one unbroken chain, oldest first; without their means."""

    def __init__(self, most: int) -> None:
        self._kept: deque[Decision] = deque(maxlen=most)

    def __iter__(self) -> Iterator[Decision]:
        return iter(self._kept)

    @property
    def newest(self) -> Decision | None:
        """The last one that was added; None before the first."""
        return self._kept[-1] if self._kept else None

    def at(self, step: int) -> Decision | None:
        """Return the decision of a step; None when it is not known, or not any more."""
        return next((decision for decision in self._kept if decision.record.step == step), None)

    def add(self, decision: Decision) -> bool:
        """Add a decision, and return whether it follows the one before. When it does not, for steps were left out or
        did not count, nobody is led on from before it: none of those is known any more."""
        newest = self.newest
        follows = newest is None or decision.record.follows(newest.record)
        if not follows:
            self._kept.clear()
        self._kept.append(replace(decision, mean=None))
        return follows


def acceptance_bytes(record: CloseRecord, term: int = 0) -> bytes:
    """Return the bytes that a peer signs when it accepts a record in a term."""
    return f"accept|{record.run}|{record.lineage}|{record.step}|{term}|{record.hash()}".encode()


def rows_bytes(run: str, step: int, previous: str, rows: Sequence[Contribution], absent: Iterable[str] = ()) -> bytes:
    """Return the bytes that a trainer signs for its ``rows`` of a step, in their order, after the record whose hash is
    ``previous``: what it reported, where all take part but those that are ``absent``."""
    said = [
        f"{'/'.join(map(str, one.microbatch))}:{one.tokens}:{one.loss_sum.hex()}{':early' if one.early else ''}"
        f":{'/'.join(one.route)}{f':{one.choice}' if one.choice else ''}"
        for one in rows
    ]
    text = "|".join([*said, *sorted(absent)])
    return f"rows|{run}|{step}|{previous}|{hashlib.sha256(text.encode()).hexdigest()}".encode()


def by_trainer(committed: Sequence[Contribution]) -> dict[PeerId, list[Contribution]]:
    """Return each trainer's rows of a step, in their order."""
    rows: dict[PeerId, list[Contribution]] = {}
    for one in committed:
        rows.setdefault(PeerId(one.microbatch.trainer), []).append(one)
    return rows


MAX_VOTERS = 11


def voters(roster: Roster, previous: str) -> tuple[PeerId, ...]:
    """Return the voters of a step: the members that may vote, MAX_VOTERS of them when they are more, by a hash of the
    record before it, whose hash is ``previous``."""
    entitled = roster.entitled
    if len(entitled) <= MAX_VOTERS:
        return entitled
    drawn = sorted(entitled, key=lambda peer: hashlib.sha256(f"{previous}|{peer}".encode()).digest())
    return tuple(sorted(drawn[:MAX_VOTERS]))


def check_acceptances(
    record: CloseRecord,
    electorate: Roster,
    acceptances: Mapping[str, bytes],
    verify: Verify,
    term: int = 0,
) -> None:
    """Check that the record is decided: a majority (:mod:`.majority`) of the voters among those who take part in its
    step accepted it in the same term; a founding record is accepted by everybody, and one that begins a provisional
    lineage by a majority of those that were there and may vote. Raises Refused."""
    if not record.forks:
        check_confirmed(record, electorate, acceptances, verify, term)
        return
    there = [peer for peer in electorate.entitled if peer not in record.absent]
    _check_signed(record, there, acceptances, verify, term)


def check_confirmed(
    record: CloseRecord,
    electorate: Roster,
    acceptances: Mapping[str, bytes],
    verify: Verify,
    term: int = 0,
) -> None:
    """As :func:`check_acceptances`, and of one that begins a provisional lineage that a majority has accepted it since.
    Raises Refused."""
    asked = electorate.peers if record.founding else voters(electorate, record.previous)
    _check_signed(record, asked, acceptances, verify, term)
    if record.forks and term <= record.term:  # in its own term nobody votes for it, who signs it
        raise Refused("it was signed in the term in which it was made: that is no vote")


def _check_signed(
    record: CloseRecord,
    asked: Sequence[PeerId],
    acceptances: Mapping[str, bytes],
    verify: Verify,
    term: int,
) -> None:
    accepted = valid_acceptances(record, asked, acceptances, verify, term)
    missing = [peer for peer in asked if peer not in accepted]
    if record.founding and missing:
        raise Refused(f"the acceptance of {missing[0]} is missing or forged")
    if len(accepted) < majority(len(asked)):
        raise Refused(f"{len(asked) - len(missing)} of {len(asked)} voters accepted it: that is no majority")


def valid_acceptances(
    record: CloseRecord,
    asked: Sequence[PeerId],
    acceptances: Mapping[str, bytes],
    verify: Verify,
    term: int,
) -> dict[str, bytes]:
    """The signatures of those of ``asked`` that accepted the record in this term."""
    signed = acceptance_bytes(record, term)
    return {peer: acceptances[peer] for peer in asked if verify(peer, signed, acceptances.get(peer, b""))}


MAX_ASIDE, ASIDE_BYTES = 2048, 400
"""How many microbatches a record has room for that were put aside, and the most that one takes with a reason in ASCII.
More than the trainers that it has room for, so that each may put one aside."""


def record_bytes(microbatches: int, stages: int, members: int, *, closed: bool = False) -> int:
    """An upper estimate of a record's size on the wire: five bytes a microbatch and hop, 400 and more a member, of a
    trainer 60 a stage besides, and all that may be put aside, or be said of those that were proven wrong; ``closed``:
    of a run that not everybody may join."""
    more = MAX_ASIDE * ASIDE_BYTES + MAX_FAULTS * FAULT_BYTES + MAX_BARRED * BARRED_BYTES
    more += ADMISSIONS_BYTES if closed else 0
    return microbatches * (150 + 5 * stages) + members * _member_bytes(stages) + more


def record_room(microbatches: int, stages: int, limit_bytes: int, *, closed: bool = False) -> int:
    """Return the number of members for which a record of ``limit_bytes`` has room: the inverse of
    :func:`record_bytes`."""
    return max(0, limit_bytes - record_bytes(microbatches, stages, 0, closed=closed)) // _member_bytes(stages)


def _member_bytes(stages: int) -> int:
    return max(2000, 1000 + 60 * stages)
