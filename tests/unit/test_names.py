"""One rule for what peers are called, wherever a name comes from; and what people are shown of equal names."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from pydantic import ValidationError

from peers.options.reading import read_peer_options
from swarm.consensus.changes import Admission
from swarm.consensus.placement import Candidate
from swarm.consensus.roster import Member, Roster
from swarm.errors import ConfigError, Violation
from swarm.ids import MAX_NAME, distinct_names, is_name
from swarm.network.discovery.records import PeerRecord
from swarm.network.rpc.bodies import decode

GOOD = ("a", "host-1", "GPU_box.2", "Zoë", "李雷", "мышь-7", "9", "x" * MAX_NAME)
BAD = (
    "",
    " ",
    "a b",
    "a\nb",
    "a\x1b[31m",
    "a\u202eb",  # turns what follows round
    "a\u200bb",  # no width
    "\u2066a",
    "<b>a</b>",
    "a&amp;b",
    'a"b',
    "a'b",
    "a`b",
    "a~b",
    "a/b",
    "$(a)",
    "-a",
    ".a",
    "\u0301a",
    "a\u3164",  # not shown
    "a\u034f",
    "a" + 4 * "\u0323",  # marks without end
    unicodedata.normalize("NFD", "Zoë"),
    "a\u2028b",
    "\ue000",
    "😀",
    "x" * (MAX_NAME + 1),
)
MEMBER: dict[str, Any] = {"peer": "p1", "role": "trainer", "part": None, "addresses": ()}


def member(peer: str, name: str) -> Member:
    return Member(**MEMBER | {"peer": peer, "name": name})


def test_rule_takes_letters_of_any_script_and_nothing_that_could_be_mistaken() -> None:
    assert [name for name in GOOD if not is_name(name)] == []
    assert [name for name in BAD if is_name(name)] == []


@pytest.mark.parametrize("name", BAD)
def test_name_against_the_rule_is_refused_wherever_it_comes_from(name: str) -> None:
    with pytest.raises(ConfigError, match="letters and digits of any script"):
        read_peer_options("join", {"name": name})
    asked = {"step": 1, "member": MEMBER | {"name": name}, "signature": b"s" * 64}
    with pytest.raises(Violation, match=r"Admission\.member\.name"):
        decode(Admission, asked)
    candidate = {"peer": "p1", "role": "trainer", "name": name, "stage": None, "addresses": ()}
    with pytest.raises(ValidationError, match="name"):
        Candidate.model_validate(candidate)
    record = {"role": "trainer", "name": name, "incarnation": 1, "status": "ready", "step": 0}
    with pytest.raises(ValidationError, match="name"):
        PeerRecord.model_validate(record)


def test_equal_names_are_shown_with_the_end_of_each_id() -> None:
    shown = distinct_names({"aaaaaa111111": "host", "bbbbbb222222": "host", "cccccc333333": "other"})
    assert shown == {"aaaaaa111111": "host~111111", "bbbbbb222222": "host~222222", "cccccc333333": "other"}
    assert not any(is_name(name) for name in shown.values() if "~" in name), "nobody can be called so"
    roster = Roster([member("p1", "same"), member("p2", "same"), member("p3", "alone")])
    assert dict(roster.names) == {"p1": "same~p1", "p2": "same~p2", "p3": "alone"}
