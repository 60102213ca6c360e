"""How many answers a caller may have on their way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from swarm.errors import Busy, Violation
from swarm.ids import PeerId
from swarm.state.transfer import FEW, OpenAnswers

GREEDY, MODEST = PeerId("greedy"), PeerId("modest")


def test_caller_has_so_many_of_each_kind() -> None:
    answers = OpenAnswers(2, kind=lambda body: body.part)
    one, other = SimpleNamespace(part="stage-0"), SimpleNamespace(part="stage-1")
    for _ in range(2):
        answers.admit(GREEDY, one, 0)
    with pytest.raises(Busy):
        answers.admit(GREEDY, one, 0)
    answers.admit(GREEDY, other, 0)
    answers.admit(MODEST, one, 0)
    answers.over(GREEDY, one)
    answers.admit(GREEDY, one, 0)


def test_caller_has_a_few_however_many_others_have() -> None:
    answers = OpenAnswers(10, 10)
    for _ in range(10):
        answers.admit(GREEDY, None, 0)
    for _ in range(FEW):
        answers.admit(MODEST, None, 0)
    with pytest.raises(Busy):
        answers.admit(MODEST, None, 0)
    for _ in range(FEW + 1):
        answers.over(GREEDY, None)
    answers.admit(MODEST, None, 0)


def test_callers_of_many_identities_have_twice_as_many_at_most() -> None:
    answers = OpenAnswers(10, 10)
    for number in range(20):
        answers.admit(PeerId(f"greedy-{number}"), None, 0)
    with pytest.raises(Busy):
        answers.admit(MODEST, None, 0)


def test_payload_is_a_violation() -> None:
    with pytest.raises(Violation):
        OpenAnswers(1).admit(GREEDY, None, 1)
