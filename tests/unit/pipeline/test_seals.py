"""What neighbours say of the tensors between them: who is named where they do not agree."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from blake3 import blake3

from swarm.errors import Refused, Violation
from swarm.events import HopDiffers, JourneySetAside
from swarm.ids import ATTEMPTS_OF_A_WAY, JourneyKey, PeerId
from swarm.pipeline.seals import (
    NOTHING,
    OFF_LOOP_BYTES,
    Across,
    Content,
    Sealed,
    Shown,
    differing,
    hash_of,
    told_digest,
)
from swarm.pipeline.stage.microbatch_state import Hashes
from swarm.pipeline.trainer.journey import MOST_DIFFERING, Differs, Journey
from swarm.pipeline.trainer.journey_state import JourneyState
from swarm.pipeline.trainer.pace import ReplicaChoice
from swarm.pipeline.wiring import Wiring
from tests.harness.rigs.pipeline import TRAINER, Crew, microbatch, seals, token_ids

A, A_OTHER, B = PeerId("a0"), PeerId("a1"), PeerId("b0")
KEY = JourneyKey(1, microbatch(0), 0)
FIRST, MIDDLE, LAST = (blake3(word).digest() for word in (b"embedding", b"between", b"output"))
BACK = tuple(blake3(word).digest() for word in (b"home", b"back between", b"loss"))
OTHER = blake3(b"something else").digest()


def seal(by: PeerId, hop: int, direction: str, hashed: bytes, key: JourneyKey = KEY) -> bytes:
    return seals(by).seal(Across(key, hop, direction), hashed)


class Way:
    """What an honest trainer and two honest replicas say; a test changes a word of it."""

    def __init__(self, key: JourneyKey = KEY) -> None:
        self.said: dict[PeerId, Any] = {
            A: [Content(FIRST, MIDDLE, BACK[1], BACK[0]), seal(TRAINER, 0, "forward", FIRST, key),
                seal(B, 0, "backward", BACK[1], key)],
            B: [Content(MIDDLE, LAST, BACK[2], BACK[1]), seal(A, 1, "forward", MIDDLE, key),
                seal(TRAINER, 1, "backward", BACK[2], key)],
        }  # fmt: skip
        self.key, self.again = key, set[PeerId]()
        self.named = {A: frozenset([A]), B: frozenset([B])}
        self.home = (LAST, seal(B, 2, "forward", LAST, key)), (BACK[0], seal(A, -1, "backward", BACK[0], key))

    def say(self, peer: PeerId, **hashes: bytes) -> None:
        self.said[peer][0] = self.said[peer][0]._replace(**hashes)

    def judged(self) -> tuple[int, PeerId] | frozenset[PeerId] | None:
        (output, output_seal), (gradient, gradient_seal) = self.home
        me = frozenset([TRAINER])
        before = Shown(TRAINER, me, Content(output=FIRST, gradient=gradient), (b"", gradient_seal))
        behind = Shown(TRAINER, me, Content(input=output, sent=BACK[2]), (output_seal, b""))
        told = [(peer, self.named[peer], *said) for peer, said in self.said.items()]
        hops = [Shown(peer, named, said, (came, back), peer in self.again) for peer, named, said, came, back in told]
        found = differing(seals(TRAINER), self.key, [before, *hops, behind])
        return None if found is None else found.among or (found.stage, found.peer)


def invent_input(way: Way) -> None:
    way.say(B, input=OTHER)


def invent_gradient(way: Way) -> None:
    way.say(A, gradient=OTHER)


def invent_first_input(way: Way) -> None:
    way.say(A, input=OTHER)


def invent_targets(way: Way) -> None:
    way.say(B, gradient=OTHER)


def deny_output(way: Way) -> None:
    way.say(A, output=OTHER)


def deny_gradient(way: Way) -> None:
    way.say(B, sent=OTHER)


def deny_last_output(way: Way) -> None:
    way.say(B, output=OTHER)


def deny_first_gradient(way: Way) -> None:
    way.say(A, sent=OTHER)


@pytest.mark.parametrize(
    ("lie", "stage", "liar"),
    [
        (invent_input, 1, B),
        (invent_gradient, 0, A),
        (invent_first_input, 0, A),
        (invent_targets, 1, B),
        (deny_output, 0, A),
        (deny_gradient, 1, B),
        (deny_last_output, 1, B),
        (deny_first_gradient, 0, A),
    ],
)
def test_who_says_what_its_neighbour_has_no_signature_for_or_denies_its_own_is_named(
    lie: Callable[[Way], None], stage: int, liar: PeerId
) -> None:
    way = Way()
    assert way.judged() is None
    lie(way)
    assert way.judged() == (stage, liar)


def test_who_took_a_hop_over_is_not_named_for_what_another_sent() -> None:
    way = Way()
    way.named[A] = frozenset([A, A_OTHER])
    way.say(A, output=OTHER)
    way.said[B][1] = seal(A_OTHER, 1, "forward", MIDDLE)
    assert way.judged() == {A, A_OTHER, B}, "one of them, or nobody"
    way.say(B, input=BACK[0])
    assert way.judged() == (1, B), "nobody signed that"


@pytest.mark.parametrize("moved", [A, B])
def test_who_was_asked_again_may_have_computed_other_bits(moved: PeerId) -> None:
    way = Way()
    way.say(A, output=OTHER)
    way.named[moved] |= {A_OTHER}
    assert way.judged() == {A, B}
    way.say(A, gradient=OTHER)
    assert way.judged() == (0, A), "nobody signed that"


@pytest.mark.parametrize("asked", [A, B])
async def test_of_whom_it_was_asked_again_nobody_is_named_for_other_bits(asked: PeerId) -> None:
    way = Way()
    way.say(A, output=OTHER)
    way.again = {asked}
    assert way.judged() == {A, B}
    way.say(B, input=BACK[0])
    assert way.judged() == (1, B), "nobody signed that"


def test_who_gives_again_what_it_computes_anew_is_not_named_for_other_bits() -> None:
    way = Way()
    way.say(B, input=OTHER)
    way.said[B][1] = seals(A).seal(Across(KEY, 1, "forward").again, OTHER)
    assert way.judged() == {A, B}
    way.said[B][1] = seals(A_OTHER).seal(Across(KEY, 1, "forward").again, OTHER)
    assert way.judged() == (1, B)


def test_who_shows_a_signature_of_a_way_that_was_given_up_is_named_and_not_who_made_it() -> None:
    anew = KEY._replace(attempt=ATTEMPTS_OF_A_WAY)
    way = Way(anew)
    assert way.judged() is None
    way.say(B, input=OTHER)
    way.said[B][1] = seal(A, 1, "forward", OTHER)
    assert way.judged() == (1, B)
    way.said[B][1] = seal(A, 1, "forward", OTHER, anew)
    assert way.judged() == (0, A), "it signed that on this way"


def test_a_trainer_never_names_itself() -> None:
    way = Way()
    way.say(A, input=OTHER)
    way.said[A][1] = seal(TRAINER, 0, "forward", OTHER)
    assert way.judged() is None


@pytest.mark.parametrize(("liar", "what", "stage"), [(A, "sent", 0), (B, "output", 1)])
def test_who_says_that_it_sent_what_no_trainer_with_hosted_ends_gets_is_named(
    liar: PeerId, what: str, stage: int
) -> None:
    way = Way()
    way.home = ((NOTHING, b""), (NOTHING, b""))
    way.say(A, sent=NOTHING)
    way.say(B, output=NOTHING)
    assert way.judged() is None
    way.say(liar, **{what: OTHER})
    assert way.judged() == (stage, liar)


def test_a_signature_is_of_one_tensor_of_one_hop_of_one_microbatch_after_one_record() -> None:
    keys = (KEY, KEY._replace(step=2), KEY._replace(microbatch=microbatch(1)), KEY._replace(after="ab"))
    ways = [Across(*about) for about in itertools.product(keys, (0, 1), ("forward", "backward"))]
    signed = Sealed(FIRST, seals(A).seal(ways[0], FIRST))
    assert [way for way in ways if seals(B).sealed_by(A, way, signed)] == ways[:1]
    assert not seals(B).sealed_by(B, ways[0], signed)
    assert not seals(B).sealed_by(A, ways[0], signed._replace(hash=OTHER))
    repeated, anew = (Across(KEY._replace(attempt=attempt), 0, "forward") for attempt in (3, ATTEMPTS_OF_A_WAY))
    assert seals(B).sealed_by(A, repeated, signed), "a repeated message says the same in any attempt"
    assert not seals(B).sealed_by(A, anew, signed), "but for those of another way"
    assert not seals(B).sealed_by(A, ways[0].again, signed)


async def test_a_large_payload_has_the_same_hash_beside_the_loop() -> None:
    large = bytes(OFF_LOOP_BYTES + 1)
    assert await hash_of(large) == await hash_of(memoryview(bytearray(large))) == blake3(large).digest()
    assert await hash_of(memoryview(bytearray(large[:-1])).cast("f")) == blake3(large[:-1]).digest()
    assert await hash_of(None) == NOTHING


@pytest.mark.parametrize("length", [0, 127, 129])
def test_hashes_of_another_length_are_refused(length: int) -> None:
    with pytest.raises(Violation):
        Content.from_wire(bytes(length))


async def test_who_knows_the_text_and_not_the_signatures_cannot_check_a_guess_by_what_a_leader_gets() -> None:
    crew = await Crew.of([[A]], hosted=True)
    (journey,) = (await crew.feed(1)).finished
    (receipt,) = journey.receipts
    text = blake3(token_ids()).digest()
    assert receipt.content == Content(input=text, gradient=text), "all of it follows from the text"
    assert receipt.digest == told_digest(receipt.content.to_wire(), receipt.seals)
    guesses = [told_digest(receipt.content.to_wire(), seals) for seals in ((b"", b""), (bytes(64), b""))]
    assert receipt.digest not in [*guesses, blake3(receipt.content.to_wire()).digest()]


# --- in a pipeline ---------------------------------------------------------------------------------------------------


class Denying(Hashes):
    """Of a replica that says of each output that it was another."""

    told = 0

    @property
    def content(self) -> Content:
        """See :class:`Hashes`."""
        Denying.told += 1
        return super().content._replace(output=OTHER)


def have_it_lie(crew: Crew, peer: PeerId, monkeypatch: pytest.MonkeyPatch) -> None:
    table = crew.replicas[peer].server._table
    add = table._add

    def with_lies(state: Any) -> Any:
        state.hashes = Denying()
        return add(state)

    monkeypatch.setattr(table, "_add", with_lies)


async def test_what_a_replica_denies_to_have_sent_is_computed_anew_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, crew = await Crew.of([[A_OTHER], [B]]), await Crew.of([[A, A_OTHER], [B]])
    have_it_lie(crew, A, monkeypatch)
    told = Denying.told
    leader = await crew.feed(6)
    assert Denying.told > told, "it had nothing to lie about"
    assert {(event.stage, event.peer) for event in crew.side.events.of(HopDiffers)} == {(0, A)}
    assert leader.aside == {}
    assert {journey.route for journey in leader.finished} == {(A_OTHER, B)}
    await honest.feed(6)
    assert crew.replicas[A].part.held == {}
    for peer in (A_OTHER, B):
        assert crew.replicas[peer].part.held == honest.replicas[peer].part.held
    assert crew.side.part.held == honest.side.part.held


async def test_who_is_gone_when_a_microbatch_is_begun_anew_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    crew = await Crew.of([[A, A_OTHER], [B]])
    have_it_lie(crew, A, monkeypatch)
    compare = Journey._compare

    def compare_and_kill(journey: Journey) -> None:
        try:
            compare(journey)
        except Differs:
            if not crew.struck:
                crew.kill(A)
            raise

    monkeypatch.setattr(Journey, "_compare", compare_and_kill)
    leader = await crew.feed(4)
    assert crew.struck == [A]
    assert leader.aside == {}
    assert {journey.route for journey in leader.finished} == {(A_OTHER, B)}
    assert len(leader.finished) == 4


async def test_what_cannot_be_taken_out_again_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    crew = await Crew.of([[A, A_OTHER], [B]])
    have_it_lie(crew, A, monkeypatch)
    asked = []

    async def refuse(state: Any) -> Any:
        asked.append(state.work.microbatch)
        raise Refused("never")

    monkeypatch.setattr(crew.replicas[B].server, "_undo", refuse)
    leader = await crew.feed(4)
    assert asked
    assert set(asked) == set(leader.aside) == {event.microbatch for event in crew.side.events.of(JourneySetAside)}
    assert all(A not in journey.route for journey in leader.finished)
    assert set(crew.side.part.held) == {journey.key.microbatch for journey in leader.finished}


async def test_microbatch_about_which_the_only_replica_lies_again_and_again_is_set_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crew = await Crew.of([[A], [B]])
    have_it_lie(crew, A, monkeypatch)
    leader = await crew.feed(1)
    assert len(crew.side.events.of(HopDiffers)) == MOST_DIFFERING
    assert leader.aside == {microbatch(0): "stage 0: a0 differs about what it got, or sent, on the way out"}
    assert leader.finished == []
    assert crew.held(B) == {microbatch(0)}, "the closing of the step takes it out"


async def test_mail_of_the_way_before_counts_for_nothing_in_the_next() -> None:
    state = JourneyState(ReplicaChoice(wiring=Wiring([[A], [B]], seed=1)), 2, hosted=False, attempt=4)
    state.begin(0.0)
    state.embedded(0.0)
    with pytest.raises(Refused, match="attempt 3"):
        state.check_sender(A, 3, 0, 0.0)
    state.check_sender(A, 4, 0, 0.0)
