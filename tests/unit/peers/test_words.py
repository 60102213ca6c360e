from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from peers.console import words
from peers.console.words import (
    CommandError,
    codecs_text,
    command_to_join,
    reason_of,
    report_error,
    with_commands,
)
from peers.exit_codes import EXIT_CODES, exit_code_of
from swarm.consensus.roster import Member, Roster, part_lost
from swarm.errors import Advice, ConfigError, Ending, RunEnded, SwarmError, install_command
from swarm.ids import ENDS, PeerId, stage_part
from tests.harness.sources import ROOT


def test_errors_are_told_with_what_can_be_done_now(capsys: pytest.CaptureFixture[str], snapshot: Any) -> None:
    roster = Roster([Member(peer=PeerId("A"), role="stage", name="a", part="stage-0", addresses=())])
    lost = part_lost(roster, stage_part(0), {PeerId("A"): "silent"})
    assert lost is not None
    told = []
    for error in (
        RunEnded("s1 (12D3) is gone: it is silent", Ending.UNREACHABLE),
        RunEnded("no", Ending.UNREACHABLE, check="a", remedy="b"),
        RunEnded("over", Ending.FAILED),
        CommandError("no", check="a", next_="b\x1b"),
        ConfigError("--x", None, "a", "b"),
        ConfigError("--x", 1, "a", "b", why="it is c"),
        SwarmError("one\ntwo"),
        lost,
    ):
        report_error(error)
        told.append(capsys.readouterr().err)
    assert told == snapshot
    assert "\x1b" not in "".join(told)


@pytest.mark.parametrize("advice", Advice)
def test_advice_of_the_library_is_told_with_a_command(advice: Advice) -> None:
    assert re.search(r"swarm|--", with_commands(advice)), "an advice without a command"
    assert not re.search(r"swarm [a-z]|--", advice), "a command in the library"
    assert all(other not in advice for other in Advice if other is not advice), "one is found in another"
    assert with_commands(f"a: {advice} b") == f"a: {with_commands(advice)} b"


def test_reason_of_a_home_of_another_run_names_its_history() -> None:
    error = ConfigError("home", "/h", "a home of run 1", Advice.OTHER_HOME)
    assert "Look at it with swarm history --file /h/history.jsonl; then" in reason_of(error)


def test_command_to_join_for_a_part_begins_at_an_issuer_where_a_run_admits_by_invite(snapshot: Any) -> None:
    parts = (None, ENDS, stage_part(2))
    open_runs = [command_to_join(part, open_port=port) for part in parts for port in (False, True)]
    modes = [command_to_join(part, admission=mode) for part in parts[1:] for mode in ("token", "organisation")]
    assert [*open_runs, *modes] == snapshot


@pytest.mark.parametrize("advice", [Advice.NEW_INVITE, Advice.JOIN_ANEW, Advice.JOIN_FOUNDER, Advice.SAME_VERSION])
def test_who_is_to_ask_for_an_invite_is_told_how_either_kind_of_run_gives_one(advice: Advice) -> None:
    assert "swarm invite (where a run admits by invite, at an issuer: swarm invite --for NAME" in with_commands(advice)


@pytest.mark.parametrize("ending", Ending)
def test_exit_code_of_every_ending(ending: Ending) -> None:
    assert exit_code_of(RunEnded("over", ending)) == EXIT_CODES[ending]


_NO_COMMAND = re.compile(r"(It|This|There|That|They|None|Every|A stage host|A trainer|No) ")


def test_next_says_what_to_do_and_never_the_cause() -> None:
    """Of each ConfigError that is made in a module of the command line, as far as its remedy is written down there."""
    said: list[str] = []
    for file in sorted(Path(words.__file__).parents[1].rglob("*.py")):
        if file.parent.name == "checkpoints" and file.name != "writer.py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ConfigError":
                remedy = node.args[3]
                first = remedy.values[0] if isinstance(remedy, ast.JoinedStr) else remedy
                if isinstance(first, ast.Constant):
                    said.append(f"{file.name}: {first.value}")
    assert len(said) > 20
    assert [one for one in said if _NO_COMMAND.match(one.split(": ", 1)[1])] == []


def test_codecs_are_told_by_boundary_most_last() -> None:
    exact, small, mixed = ("float32", "float32"), ("int8h", "int8h"), ("int8h", "float32")
    assert codecs_text(()) == ""
    assert codecs_text([exact] * 3) == "float32"
    assert codecs_text([mixed] * 2) == "int8h (gradients float32)"
    assert codecs_text([exact, small, small, exact, exact]) == "int8h at boundaries 1 to 2, else float32"
    assert codecs_text([small, exact, small, exact, mixed, exact]) == (
        "int8h (gradients float32) at boundary 4, int8h at boundaries 0 and 2, else float32"
    )


def test_extra_is_installed_from_the_locks_of_the_checkout_or_with_pip_of_the_python_that_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.prefix", str(ROOT / ".venv"))
    assert install_command("wandb") == f"make -C {ROOT} setup EXTRAS=wandb"
    monkeypatch.setattr("sys.prefix", "/usr")
    monkeypatch.setattr("sys.executable", "/usr/bin/python3")
    assert install_command("wandb") == f"/usr/bin/python3 -m pip install '{ROOT}[wandb]'"
    monkeypatch.setattr("swarm.errors.__file__", "/usr/lib/python3/site-packages/swarm/errors.py")
    assert install_command("wandb") == "/usr/bin/python3 -m pip install 'swarm-trainer[wandb]'"
