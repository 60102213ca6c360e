"""What follows from what arrives for one microbatch on a stage replica: pure, nothing is computed or sent."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.errors import Busy, Refused
from swarm.ids import PeerId
from swarm.pipeline.messages import Forward
from swarm.pipeline.seals import Sealed
from swarm.pipeline.stage.microbatch_state import Action, MicrobatchState, Phase
from swarm.pipeline.stage.table import MicrobatchTable
from tests.harness.rigs.pipeline import DOWN, ME, ROUTE, UP, microbatch

OTHERS = (UP, ME, PeerId("another"))


def forward(attempt: int = 0, route: tuple[str, ...] = ROUTE, *, step: int = 1, after: str = "") -> Forward:
    at: dict[str, Any] = {"step": step, "microbatch": microbatch(0), "attempt": attempt, "after": after}
    return Forward(**at, route=route, chosen=bytes(64), hop=1, seal=bytes(64))


@pytest.fixture
def dropped() -> list[int]:
    return []


@pytest.fixture
def table(dropped: list[int]) -> MicrobatchTable:
    table = MicrobatchTable(100, 4, lambda state, size: dropped.append(size))
    table.open_step(1, "")
    return table


@pytest.fixture
def state(table: MicrobatchTable) -> MicrobatchState:
    known, newer = table.note(forward())
    assert (known.phase, newer) == (Phase.EXPECTED, False)
    known.forward_attempt = 0
    return known


def received(state: MicrobatchState) -> MicrobatchState:
    state.take_input(0, b"input", Sealed())
    return state


def sent_on(state: MicrobatchState) -> MicrobatchState:
    assert received(state).queue("forward", 1.0)
    assert state.start() == "forward"
    assert state.computed(b"output", object()).action is Action.TELL_FORWARD
    return state


def test_microbatch_whose_backward_another_lane_took_is_computed_once(state: MicrobatchState) -> None:
    assert received(state).queue("forward", 1.0)
    assert state.queue("backward", 2.0)
    assert state.start() == "backward"
    assert state.start() is None


def test_forward_that_ends_behind_its_backward_leaves_nothing(state: MicrobatchState) -> None:
    assert received(state).queue("forward", 1.0)
    assert state.start() == "forward"
    assert state.queue("backward", 2.0)
    assert state.start() == "backward"
    state.accumulate(0.0, 0)
    assert state.computed(b"output", object()).action is Action.NOTHING
    assert (state.tensors.graph, state.tensors.output) == (None, None)


def accumulated(state: MicrobatchState) -> MicrobatchState:
    sent_on(state).take_gradient(b"gradient", DOWN, Sealed())
    assert state.queue("backward", 2.0)
    assert state.start() == "backward"
    state.take_graph()
    state.accumulate(0.0, 0)
    return state


def test_microbatch_goes_through_its_phases(state: MicrobatchState) -> None:
    phases = [received(state).phase]
    assert state.after_input(needs_targets=False).action is Action.QUEUE_FORWARD
    state.queue("forward", 1.0)
    phases.append(state.phase)
    state.start()
    phases.append(state.phase)
    state.computed(b"output", object())
    phases.append(state.phase)
    assert state.take_gradient(b"gradient", DOWN, Sealed())
    assert state.after_gradient(asked_anew=False).action is Action.QUEUE_BACKWARD
    state.queue("backward", 2.0)
    phases.append(state.phase)
    assert state.start() == "backward"
    phases.append(state.phase)
    state.accumulate(3.0, 2)
    phases.append(state.phase)
    state.take_out()
    assert phases == [
        Phase.RECEIVED,
        Phase.QUEUED,
        Phase.COMPUTING,
        Phase.SENT_ON,
        Phase.QUEUED_BACK,
        Phase.CONTRIBUTING,
        Phase.ACCUMULATED,
    ]
    assert (state.phase, state.loss) == (Phase.TAKEN_OUT, (3.0, 2))


def test_microbatch_on_a_hosted_last_stage_waits_for_both_halves(state: MicrobatchState) -> None:
    assert state.take_targets(b"targets", Sealed())
    assert state.after_input(needs_targets=True) == (Action.NOTHING, "its targets wait for its input")
    assert not state.take_targets(b"others", Sealed())
    assert received(state).after_input(needs_targets=True).action is Action.QUEUE_FORWARD


def test_microbatch_whose_input_came_first_waits_for_its_targets(state: MicrobatchState) -> None:
    assert received(state).after_input(needs_targets=True) == (Action.NOTHING, "its input waits for its targets")


def test_microbatch_whose_gradient_comes_while_it_is_computed_goes_back_at_once(state: MicrobatchState) -> None:
    received(state).queue("forward", 1.0)
    state.start()
    state.take_gradient(b"gradient", DOWN, Sealed())
    assert state.after_gradient(asked_anew=False).action is Action.NOTHING
    assert state.computed(b"output", object()).action is Action.QUEUE_BACKWARD
    assert state.tensors.output == b"output", "a receipt has its hash, though nobody is sent it"


def test_microbatch_of_which_only_a_gradient_came_is_fetched(state: MicrobatchState) -> None:
    state.take_gradient(b"gradient", DOWN, Sealed())
    assert state.after_gradient(asked_anew=False) == (Action.FETCH, "its gradient came and nothing else")
    state.adopting = True
    assert state.after_gradient(asked_anew=True).action is Action.NOTHING


@pytest.mark.parametrize(("newer", "action"), [(True, Action.TELL_FORWARD), (False, Action.NOTHING)])
def test_microbatch_that_was_sent_on_and_comes_again(state: MicrobatchState, newer: bool, action: Action) -> None:
    assert sent_on(state).after_forward_again(newer, hosted=False).action is action


@pytest.mark.parametrize("far", [Phase.QUEUED_BACK, Phase.TURNED_BACK, Phase.ACCUMULATED])
def test_microbatch_that_its_trainer_begins_anew_is_sent_on_however_far_it_came(
    state: MicrobatchState, far: Phase
) -> None:
    """With private ends: only the trainer has the loss."""
    sent_on(state).phase = far
    assert state.after_forward_again(newer=True, hosted=False).action is Action.TELL_FORWARD
    assert state.after_forward_again(newer=False, hosted=False).action is Action.NOTHING


@pytest.mark.parametrize("again", ["forward", "gradient", "adopt"])
def test_microbatch_that_was_added_and_comes_again_is_told_again(state: MicrobatchState, again: str) -> None:
    accumulated(state)
    decisions = {
        "forward": state.after_forward_again(newer=True, hosted=True),
        "gradient": state.after_gradient(asked_anew=True),
        "adopt": state.after_adopt(),
    }
    assert decisions[again].action is Action.TELL_BACKWARD


def test_microbatch_is_resent_unless_it_is_being_computed(state: MicrobatchState) -> None:
    received(state).queue("forward", 1.0)
    state.start()
    assert state.after_resend().action is Action.NOTHING
    state.computed(b"output", object())
    assert state.after_resend().action is Action.SEND_OUTPUT


def test_microbatch_goes_back_once_and_is_not_computed_when_it_is_in_the_sum(state: MicrobatchState) -> None:
    assert sent_on(state).queue("backward", 2.0)
    assert not state.queue("backward", 3.0)
    assert state.arrived == 2.0
    assert state.after_adopt().action is Action.NOTHING
    state.accumulate(0.0, 0)  # replayed, by the closing of the step
    assert state.start() is None
    assert not state.queue("backward", 4.0)


def test_microbatch_that_was_taken_out_begins_anew_when_it_comes_again(state: MicrobatchState) -> None:
    accumulated(state).take_out()
    assert (state.here, state.complete, state.under_way(0.0)) == (False, True, False)
    state.take_input(0, b"input", Sealed())
    assert (state.phase, state.complete, state.under_way(0.0)) == (Phase.RECEIVED, False, True)


def test_table_follows_a_newer_attempt_and_refuses_an_older(table: MicrobatchTable, state: MicrobatchState) -> None:
    with pytest.raises(Refused, match="leads elsewhere"):
        table.note(forward(0, OTHERS))
    assert table.note(forward(1, OTHERS)) == (state, True)
    assert (state.key.attempt, state.route) == (1, OTHERS)
    with pytest.raises(Refused, match="superseded"):
        table.note(forward(0))
    with pytest.raises(Busy):
        table.note(forward(2, after="abcdef"))
    with pytest.raises(Refused, match="not awaited"):
        state.take_input(1, b"input", Sealed())


def test_table_says_why_a_microbatch_left_it(table: MicrobatchTable, state: MicrobatchState) -> None:
    ahead, _ = table.note(forward(step=2, after="abc"))
    other, _ = table.note(forward(step=3))
    table.open_step(2, "def")
    assert (state.dropped, ahead.dropped) == ("step 1 is closed", "step 2 follows another record")
    table.drop(other, "given up")
    assert (other.dropped, list(table)) == ("given up", [])


def test_table_lets_go_of_what_is_complete_when_it_retains_too_much(
    table: MicrobatchTable, state: MicrobatchState, dropped: list[int]
) -> None:
    received(state).tensors.input = bytes(101)
    table.retention.hold(state)
    assert dropped == []
    state.accumulate(0.0, 0)
    table.retention.hold(state)
    assert (dropped, state.tensors.input) == ([101], None)
