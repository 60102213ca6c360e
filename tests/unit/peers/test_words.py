from __future__ import annotations

import pytest

from peers.complaint import Complaint
from peers.words import listed, report_error
from swarm.errors import EXIT_ERROR, EXIT_UNREACHABLE, ConfigError, RunEnded, SwarmError


@pytest.mark.parametrize(
    ("names", "text"), [(["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c"), ([], "")]
)
def test_listed_joins_names_as_people_do(names: list[str], text: str) -> None:
    assert listed(names) == text


def test_report_of_a_lost_peer_says_what_can_be_done_now(capsys: pytest.CaptureFixture[str]) -> None:
    report_error(RunEnded("s1 (12D3) is gone: it is silent", EXIT_UNREACHABLE))
    cause, next_ = capsys.readouterr().err.splitlines()
    assert cause == "error: s1 (12D3) is gone: it is silent"
    assert next_.startswith("  next:  look whether the run goes on: ")
    for command in (" peers ", " sample"):
        assert command in next_


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (RunEnded("no", EXIT_UNREACHABLE, check="a", remedy="b"), ["error: no", "  check: a", "  next:  b"]),
        (RunEnded("over", EXIT_ERROR), ["error: over"]),
        (Complaint("no", check="a", next_="b\x1b"), ["error: no", "  check: a", "  next:  b "]),
        (ConfigError("--x", None, "a", "b"), ["error: --x is missing", "  check: expected a", "  next:  b"]),
        (SwarmError("one\ntwo"), ["error: one two"]),
    ],
)
def test_report_of_others_says_what_they_know(
    capsys: pytest.CaptureFixture[str], error: SwarmError, lines: list[str]
) -> None:
    report_error(error)
    assert capsys.readouterr().err.splitlines() == lines
