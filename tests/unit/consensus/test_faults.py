"""What proves a replica wrong, and for how long a member that is proven wrong is barred."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
import pytest

from swarm.consensus.faults import (
    CONTRADICTIONS,
    FAULT_BYTES,
    FIRST_BAR,
    MAX_AUDITORS,
    MAX_BARRED,
    MAX_STATEMENTS,
    AveragingFault,
    HopFault,
    auditors,
    barring,
    check_fault,
    newly_barred,
)
from swarm.consensus.records import CloseRecord
from swarm.consensus.roster import Member, Roster
from swarm.consensus.slowness import FORGET, Barred, rests_until
from swarm.errors import PeerError, Refused, Violation
from swarm.ids import JourneyKey, MicrobatchId, PeerId
from swarm.network.rpc.bodies import decode, pack, unpack
from swarm.schema import AFTER_CHARS
from swarm.security.signing import PrivateIdentity, audit_bytes, averaging_bytes, receipt_bytes, verify
from swarm.security.statements import AuditStatement
from tests.harness.rigs.consensus import record

RUN, PREVIOUS, STEP, STAGE = "ab" * 32, "cd" * 32, 7, 1
TOLD = bytes(range(32))
PEERS = [PrivateIdentity(bytes([number]) * 32) for number in range(12)]
ACCUSED, STRANGER = PEERS[0], PEERS[-1]
KEY = JourneyKey(STEP, MicrobatchId(PEERS[10].peer, "ab" * 8, 0, 3), 2, PREVIOUS[:AFTER_CHARS])


def roster_of(replicas: int) -> Roster:
    """So many replicas of the stage, one of another, and a trainer."""
    parts = {identity.peer: "stage-1" for identity in PEERS[:replicas]} | {PEERS[9].peer: "stage-0"}
    hosts = [Member(peer=p, role="stage", name=p[-4:], part=part, addresses=()) for p, part in parts.items()]
    return Roster([*hosts, Member(peer=PEERS[10].peer, role="trainer", name="t", part=None, addresses=())])


@dataclass(frozen=True, kw_only=True)
class Said:
    """What goes into a fault, as its signers have it."""

    run: str = RUN
    key: JourneyKey = KEY
    told: bytes = TOLD
    accused: PrivateIdentity = ACCUSED
    receipt_by: PrivateIdentity = ACCUSED
    tokens: int = 0

    def fault(self, *words: tuple[PrivateIdentity, bool], **fields: Any) -> HopFault:
        """Return a fault with these words; ``fields`` are changed after all have signed."""
        said = tuple(self.statement(who, wrong) for who, wrong in words)
        told = {"step": self.key.step, "microbatch": self.key.microbatch, "attempt": self.key.attempt}
        more = {"told": self.told, "tokens": self.tokens, "receipt": self.receipt, "statements": said, "hop": STAGE}
        return HopFault(**{**told, **more, "after": self.key.after, "accused": self.accused.peer, **fields})

    @property
    def receipt(self) -> bytes:
        """Return the accused's signature."""
        return self.receipt_by.sign(receipt_bytes(self.run, self.key, STAGE, self.told, self.tokens))

    def statement(self, who: PrivateIdentity, wrong: bool) -> AuditStatement:
        """Return one replica's word."""
        signed = audit_bytes(self.run, self.key, STAGE, self.accused.peer, self.receipt, wrong)
        return AuditStatement(auditor=who.peer, wrong=wrong, signature=who.sign(signed))


def found(fault: HopFault, replicas: int = 4) -> tuple[PeerId, ...]:
    return check_fault(RUN, roster_of(replicas), STEP, PREVIOUS, fault, verify)


def wrong(*numbers: int) -> list[tuple[PrivateIdentity, bool]]:
    return [(PEERS[number], True) for number in numbers]


def right(*numbers: int) -> list[tuple[PrivateIdentity, bool]]:
    return [(PEERS[number], False) for number in numbers]


@pytest.mark.parametrize(
    ("replicas", "words"),
    [(3, wrong(1, 2)), (4, wrong(1, 2)), (4, [*wrong(1, 2), *right(3)]), (6, [*wrong(1, 2, 3), *right(4)])],
)
def test_more_than_half_of_the_other_replicas_prove_one_wrong_and_who_calls_it_right(
    replicas: int, words: list[Any]
) -> None:
    wrong_too = [who.peer for who, said in words if not said]
    assert found(Said().fault(*words), replicas) == (ACCUSED.peer, *wrong_too)
    assert found(Said(tokens=5).fault(*words), replicas) == (ACCUSED.peer, *wrong_too)


@pytest.mark.parametrize(
    ("replicas", "words"),
    [(3, [*wrong(1), *right(2)]), (4, [*wrong(1), *right(2, 3)]), (5, [*wrong(1, 2), *right(3, 4)])]
    + [(6, [*wrong(1, 2), *right(3, 4, 5)])],
)
def test_who_calls_wrong_what_most_and_the_accused_call_right_is_proven_wrong(replicas: int, words: list[Any]) -> None:
    fault = Said().fault(*words)
    assert set(found(fault, replicas)) == {who.peer for who, said in words if said}
    assert fault.sides[1] == (ACCUSED.peer, *(who.peer for who, said in words if not said))


FEWEST_LIARS = {2: None, 3: 2, 4: 2, 5: 3, 6: 3, 7: 4}
"""Of so many replicas of a stage, how many must lie to have an honest one proven wrong."""


@pytest.mark.parametrize("replicas", FEWEST_LIARS)
def test_fewer_liars_than_half_have_no_honest_replica_proven_wrong_and_one_is_found_out(replicas: int) -> None:
    framing, judges = list[int](), PEERS[1:replicas]
    for wrong_hop, liars in itertools.product([False, True], range(replicas)):
        lying, honest = judges[:liars], judges[liars:]
        guilty = {who.peer for who in [*[ACCUSED] * wrong_hop, *lying]}
        for lies, truths in itertools.product(range(liars + 1), range(len(honest) + 1)):  # a trainer may keep some back
            words = [(who, not wrong_hop) for who in lying[:lies]] + [(who, wrong_hop) for who in honest[:truths]]
            try:
                proven = set(found(Said().fault(*words), replicas))
            except Refused:
                proven = set()
            if proven - guilty:
                framing.append(len(guilty))
            if len(guilty) == 1 < len(words) == len(judges):
                assert proven == guilty
    assert min(framing, default=None) == FEWEST_LIARS[replicas]


NOTHING_DECIDED: dict[str, tuple[int, list[Any]]] = {
    "nobody": (4, []),
    "one": (4, wrong(1)),
    "two of two replicas": (2, wrong(1)),
    "one of three": (4, [*wrong(1), *right(2)]),
    "half": (5, wrong(1, 2)),
    "all find it right": (4, right(1, 2, 3)),
}


@pytest.mark.parametrize("name", NOTHING_DECIDED)
def test_fewer_decide_nothing(name: str) -> None:
    replicas, words = NOTHING_DECIDED[name]
    with pytest.raises(Refused):
        found(Said().fault(*words), replicas)


two = wrong(1, 2)
elsewhere = KEY._replace(microbatch=KEY.microbatch._replace(position=9))


def with_words(said: Said, words: list[tuple[PrivateIdentity, bool]], **changed: Any) -> HopFault:
    """A fault of ours, with what was said of another hop, or changed after it was signed."""
    statements = [one.model_copy(update=changed) for one in said.fault(*words).statements]
    return Said().fault(statements=tuple(statements))


FORGED: dict[str, Callable[[], HopFault]] = {
    "receipt by another": lambda: Said(receipt_by=PEERS[1]).fault(*two),
    "receipt of something else": lambda: Said().fault(*two, told=bytes(32)),
    "receipt of other tokens": lambda: Said().fault(*two, tokens=1),
    "another run": lambda: Said(run="ef" * 32).fault(*two),
    "statement by another": lambda: with_words(Said(), wrong(1), auditor=PEERS[2].peer),
    "statement turned round": lambda: with_words(Said(), right(1, 2), wrong=True),
    "statement of another hop": lambda: with_words(Said(key=elsewhere), two),
    "statement of a receipt of other tokens": lambda: with_words(Said(tokens=1), [*wrong(1), *right(2)]),
    "statement about another": lambda: with_words(Said(accused=PEERS[3]), two),
    "one word twice": lambda: Said().fault(*wrong(1, 1)),
}
OUTSIDE: dict[str, Callable[[], HopFault]] = {
    "another step": lambda: Said(key=KEY._replace(step=STEP + 1)).fault(*two),
    "another record before": lambda: Said(key=KEY._replace(after="ef" * 8)).fault(*two),
    "no record before": lambda: Said(key=KEY._replace(after="")).fault(*two),
    "accused of another stage": lambda: Said(accused=PEERS[9], receipt_by=PEERS[9]).fault(*two),
    "accused of no roster": lambda: Said(accused=STRANGER, receipt_by=STRANGER).fault(*two),
    "auditor of another stage": lambda: Said().fault(*wrong(1, 9)),
    "auditor of no roster": lambda: Said().fault(*wrong(1, 2), (STRANGER, True)),
    "accused judges itself": lambda: Said().fault(*wrong(1, 2), (ACCUSED, False)),
}


@pytest.mark.parametrize(
    ("name", "error"), [*((name, Violation) for name in FORGED), *((name, Refused) for name in OUTSIDE)]
)
def test_what_is_forged_or_of_elsewhere_proves_nothing(name: str, error: type[PeerError]) -> None:
    with pytest.raises(error):
        found({**FORGED, **OUTSIDE}[name]())


def averaged(
    *words: tuple[PrivateIdentity, bool], about: dict[str, Any] | None = None, **fields: Any
) -> AveragingFault:
    """What these say that ACCUSED did in averaging; they sign it ``about`` something else, or it is changed later."""
    said = {"run": RUN, "step": STEP, "after": PREVIOUS[:AFTER_CHARS], "part": "stage-1", "accused": ACCUSED.peer}
    told, signed = {**said, **fields}, {**said, **(about or {})}
    statements = [
        AuditStatement(auditor=who.peer, wrong=is_wrong, signature=who.sign(averaging_bytes(**signed, wrong=is_wrong)))
        for who, is_wrong in words
    ]
    return AveragingFault(**{key: told[key] for key in told if key != "run"}, statements=tuple(statements))


@pytest.mark.parametrize(("replicas", "enough"), [(3, 2), (4, 2), (5, 3), (6, 3), (9, 5)])
def test_more_than_half_of_the_other_replicas_prove_one_wrong_in_averaging(replicas: int, enough: int) -> None:
    roster = roster_of(replicas)
    assert check_fault(RUN, roster, STEP, PREVIOUS, averaged(*wrong(*range(1, enough + 1))), verify) == (ACCUSED.peer,)
    with pytest.raises(Refused, match="decides nothing"):
        check_fault(RUN, roster, STEP, PREVIOUS, averaged(*wrong(*range(1, enough))), verify)


AVERAGED: dict[str, tuple[AveragingFault, type[PeerError]]] = {
    "one against nobody": (averaged(*wrong(1)), Refused),
    "the accused's own word": (averaged(*wrong(0, 1)), Refused),
    "of another part's replica": (averaged(*wrong(1, 9)), Refused),
    "one word twice": (averaged(*wrong(1, 1)), Violation),
    "of another step": (averaged(*wrong(1, 2), about={"step": STEP - 1}), Violation),
    "of another record before": (averaged(*wrong(1, 2), about={"after": "ef" * 8}), Violation),
    "of another part": (averaged(*wrong(1, 2), about={"part": "stage-0"}), Violation),
    "of another run": (averaged(*wrong(1, 2), about={"run": "ef" * 32}), Violation),
    "about another": (averaged(*wrong(1, 2), about={"accused": PEERS[2].peer}), Violation),
    "a fault of another step": (averaged(*wrong(1, 2), step=STEP + 1), Refused),
    "a fault of another part": (averaged(*wrong(1, 2), part="stage-0"), Refused),
}


@pytest.mark.parametrize("name", AVERAGED)
def test_what_was_said_of_other_averaging_or_by_too_few_proves_nothing(name: str) -> None:
    fault, error = AVERAGED[name]
    with pytest.raises(error):
        check_fault(RUN, roster_of(3), STEP, PREVIOUS, fault, verify)


def test_word_of_a_hop_is_none_of_averaging() -> None:
    hop = Said().fault(*wrong(1, 2))
    with pytest.raises(Violation):
        check_fault(
            RUN, roster_of(3), STEP, PREVIOUS, averaged().model_copy(update={"statements": hop.statements}), verify
        )


def test_of_many_replicas_the_record_before_draws_those_that_judge() -> None:
    peers = [PeerId(f"R{number}") for number in range(20)]
    hosts = [Member(peer=peer, role="stage", name=peer, part="stage-1", addresses=()) for peer in peers]
    roster = Roster(hosts)
    drawn = [auditors(roster, KEY._replace(after=f"{step:016x}"), STAGE, peers[0]) for step in range(200)]
    assert {len(set(one)) for one in drawn} == {MAX_AUDITORS}
    assert not any(peers[0] in one for one in drawn)
    assert {peer for one in drawn for peer in one} == set(peers[1:])
    assert auditors(roster, KEY, STAGE, "R3") == auditors(Roster(reversed(hosts)), KEY._replace(attempt=9), STAGE, "R3")


def test_each_fault_bars_for_twice_as_long_and_is_forgotten_long_after() -> None:
    liar, known, step = PeerId("L"), dict[str, Barred](), 10
    for times in range(3):
        known = barring(known, step, {liar: (liar,)})
        assert rests_until(known, liar) == step + 1 + (FIRST_BAR << times)
        assert newly_barred(known, step) == {liar}
        step = rests_until(known, liar)
    assert barring(known, step - 1, {}) == known
    assert newly_barred(known, step) == set()
    assert barring(known, step + 3 * FORGET * FIRST_BAR, {}) == {}


@pytest.mark.parametrize("liar", [(), ("X",)], ids=["it calls right ones wrong", "it calls a wrong one right"])
def test_judge_is_barred_the_second_time_that_most_contradict_it(liar: tuple[PeerId, ...]) -> None:
    loud, known = PeerId("A"), dict[str, Barred]()
    for time in range(1, CONTRADICTIONS + 1):
        known = barring(known, 10 * time, {"X": (*liar, loud), "Y": (loud,)})  # of one step it counts once
        assert newly_barred(known, 10 * time) - {*liar} == ({loud} if time == CONTRADICTIONS else set())
    assert known[loud] == Barred(times=1, until=10 * CONTRADICTIONS + 1 + FIRST_BAR)


def test_records_have_room_for_those_barred_for_longest() -> None:
    known = {f"P{number}": Barred(times=1, until=1000 + number) for number in range(MAX_BARRED)}
    said = barring(known, 500, {"L": (PeerId("L"),)})
    assert len(said) == MAX_BARRED
    assert said.keys() - known.keys() == set()  # its time is over before all theirs
    said = barring(known, 2000, {"L": (PeerId("L"),)})
    assert "L" in said


def test_fault_is_the_same_out_of_a_file() -> None:
    fault = Said().fault(*two)
    assert HopFault.model_validate_json(fault.model_dump_json()) == fault
    assert HopFault.model_validate(fault.to_wire()) == fault
    most = Said(tokens=1 << 52).fault(*wrong(*range(1, MAX_AUDITORS + 1)))
    assert len(msgpack.packb(most.to_wire())) < FAULT_BYTES
    seen = averaged(*wrong(*[1] * MAX_STATEMENTS), step=1 << 52)
    assert len(msgpack.packb(seen.to_wire())) < FAULT_BYTES
    carrying = record(faults=(fault, averaged(*two)))
    assert decode(CloseRecord, unpack(pack(carrying.to_wire()))) == carrying
    assert CloseRecord.model_validate_json(carrying.model_dump_json()).hash() == carrying.hash()
