"""The table of commands: what they import, how they refuse words, and what becomes of their streams."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from peers.cli.app import Commands, app
from peers.console.words import next_commands
from peers.exit_codes import EXIT_USAGE
from peers.invites.invite import Invite
from swarm import __version__
from swarm.ids import RunId
from tests.harness.rigs.peers import HEAVY, KeptRun, Typed, eventful, loaded_after, write
from tests.harness.standing_peer import serving

ADDRESS = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWMrSnzaXRF41zHeiKFu6JxTnmWJGKBmEmoW2LsquAx6zW"
ALL = ("torch", "hivemind", "pydantic", "multiaddr", "cryptography", "asyncio", "rich", "uvloop", "numpy")
"""What commands that only ask a peer do without."""
FILES = {
    "torn.toml": "[run\n", "unknown.toml": "[run]\nbanana = 1\n", "wrong.toml": "[run]\nsteps = -1\n",
    "heads.toml": "[model]\nheads = 3\n", "note.txt": "Hi.\n", "class.toml": "[[peers]]\nname = 'a'\nbanana = 1\n",
    "device.toml": "[[peers]]\nname = 'a'\ndevice = 'banana'\ndown_mbit = 9\nup_mbit = 9\n", "home/runs/README": "",
}  # fmt: skip
WRONG = (
    *(f"new {name}.toml" for name in ("torn", "unknown", "wrong", "nowhere")), "new --preset tiny --steps -1",
    "new --preset tiny --lora-rank 0", "new --preset tiny --peers class.toml", "new --preset tiny --peers torn.toml",
    "new --preset tiny --tokenizer nowhere", "new --preset tiny --text nowhere", "new --resume nowhere",
    "new --model nowhere", "join --config torn.toml", "plan unknown.toml --peers torn.toml",
    "plan wrong.toml --peers class.toml", "plan tiny --peers nowhere", "plan banana --peers class.toml",
    "simulate torn.toml", "simulate class.toml", "simulate nowhere", "chaos torn.toml", "quickstart --steps 0",
    "quickstart --text note.txt --report-to", "export --out model --from home",
    "export --out model --from nowhere --from another", "export --out note.txt",
    "export --out model --run nowhere --from home", "merge --base nowhere --site home=1 --out model",
    "merge --base home --site home=much --out model", "ckpt pull --from home", "ckpt pull --from swarm1:rubbish",
    "ckpt frozen --add home --run nowhere", "ckpt verify nowhere", "eval note.txt --run nowhere",
    "eval note.txt --model nowhere", "data build note.txt --tokenizer nowhere --out shard", "data verify nowhere",
    "history --file torn.toml", "new --preset tiny --stages 99", "new --preset tiny --print-config --stages 99",
    "new --preset tiny --lora-rank 4 --lora-targets banana", "new heads.toml", "quickstart --stages 99",
    "plan heads.toml --peers device.toml", "new --preset tiny --peers device.toml",
    "new --preset tiny --tokenizer note.txt", "quickstart --tokenizer note.txt",
)  # fmt: skip
"""What is wrong with a file or an option, each refused before anything of weight is imported."""

REFUSED = (
    "join", "join nonsense --role stage", "join --config /nonexistent.toml", f"join {ADDRESS} --device banana",
    f"join {ADDRESS} --listen /ip4/127.0.0.1", "join --thread 3", "join --banana", "join x --threads",
    "join --preemption banana", "new --preemption banana", "new --pause-when battery",
    "new --resume", "sample", "sample /nonexistent", "sample /dev/null", "sample /", "sample --model /",
    "sample x --model y", "sample --tokens 0", "sample --tokens x", "export --out /dev/null",
    "export --out new --run /", "eval /nonexistent",
    "eval /dev/null --device banana", "data build", "data build x", "statu", "status x",
    "quickstart --ends x",
)  # fmt: skip


def test_commands_import_nothing_before_they_need_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: KeptRun
) -> None:
    """All in one process, the lightest first; others that only read files after them."""
    monkeypatch.setenv("SWARM_HOME", str(home))
    kept = run.keep(tmp_path / "kept", 10).root
    history = write(tmp_path / "copy" / "history.jsonl", eventful().lines)
    gone = Invite(run=RunId("ab" * 32), name="mine", at=(ADDRESS,)).text()
    asking = ("--help", "nope", "status --help", "status", "peers --json", "drain --no-wait")
    options = ("join --help", "new --help")
    reading = (
        "-h", "--version", "", *(f"{name} --help" for name in Commands.entries), "data build --help",
        "ckpt pull --help", f"ckpt ls {kept}", "ckpt ls --json", "history", f"history --file {history} --verify",
        f"history --file {history} --json", f"doctor --quick {gone}",
    )  # fmt: skip
    with serving(home):
        for name, text in FILES.items():
            write(tmp_path / name, [text])
        refused = [line for line in REFUSED if line != "new --resume"]
        found = loaded_after(*asking, *options, *reading, *refused, *WRONG, cwd=tmp_path)
    modules = {entry.module for entry in Commands.entries.values()}
    assert [sorted(loaded & modules) for _, loaded in found[:6]] == [[], [], *[["peers.cli.running"]] * 4]
    for said, loaded in found:
        light = set(HEAVY)
        if said.words in asking:
            light |= set(ALL)
        elif said.words in options:
            light |= {"pydantic", "pydantic_core", "asyncio", "numpy"}
        elif said.words.endswith("--tokenizer note.txt"):  # the last ones: it is read as what it should be
            light.discard("tokenizers")
        assert not loaded & light, said.words
        assert "Traceback" not in said.err
        fine = 2 if said.words in {*REFUSED, *WRONG, "nope", ""} else 0
        assert said.code == fine or said.words == "history", said.text
        if said.words.endswith(("--help", "-h")):
            assert max(map(len, said.out.splitlines())) <= 80, said.words
            assert not re.search(r"[a-z]\.\.\.", said.out), f"cut off: {said.words}"


def test_cli_help_names_every_command_and_exit_code(
    typed: Typed, monkeypatch: pytest.MonkeyPatch, snapshot: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert typed("--help") == snapshot
    assert re.fullmatch(
        rf"swarm {re.escape(__version__)}( \(commit [0-9a-f]{{40}}(-changed)?\))?", typed("--version").out.strip()
    )


def test_cli_usage_errors_are_cause_check_and_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Typed, snapshot: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "home"))  # anyone who plays this may have runs of their own
    refused = [typed(line) for line in REFUSED]
    assert {one.code for one in refused} == {EXIT_USAGE}
    for one in refused:
        assert [line[:7] for line in one.err.splitlines()] == ["error: ", "  check", "  next:"], one.text
    assert refused == snapshot


@pytest.mark.parametrize("command", ["data", "ckpt"])
def test_cli_group_without_a_command_prints_its_help(command: str, typed: Typed) -> None:
    said = typed(command)
    assert said.code == EXIT_USAGE
    assert said.err.startswith(f"Usage: swarm {command} ")


def test_cli_list_says_of_each_command_what_its_own_help_says() -> None:
    group = typer.main.get_group(app)
    for name, entry in Commands.entries.items():
        assert group.commands[name].name == name
        assert group.commands[name].get_short_help_str(1000) == entry.said, name


def test_commands_that_quickstart_proposes_are_understood() -> None:
    group, proposed = typer.main.get_group(app), next_commands(Path("out/a run"))
    context = typer.Context(group, info_name="swarm")
    for line in proposed:
        _, name, *words = shlex.split(line, comments=True)
        command = group.get_command(context, name)
        assert command is not None
        command.make_context(name, words, parent=context)
    assert len(proposed) == 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_cli_interrupted_while_importing_exits_without_a_traceback(number: signal.Signals) -> None:
    program = (
        "import os, sys, types\n"
        "app = types.ModuleType('peers.cli.app')\n"
        f"app.run = lambda arguments: os.kill(os.getpid(), {int(number)})\n"
        "sys.modules['peers.cli.app'] = app\n"
        "from peers.cli import main\n"
        "main()\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ)
    said = {signal.SIGINT: "interrupted by Ctrl-C\n", signal.SIGTERM: "interrupted by SIGTERM\n"}
    assert (result.returncode, result.stderr) == (128 + number, said[number])


@pytest.mark.parametrize(
    ("command", "streams", "code"),
    [
        ("--version", ">&-", 0),
        ("--version", ">&- 2>&- <&-", 0),
        ("--version", ">/dev/full", 1),
        ("status", ">&-", 3),
        ("status", "2>&-", 3),
        ("status", "2>/dev/full", 3),
    ],
)
def test_command_without_streams_or_with_full_ones_says_what_it_can(
    command: str, streams: str, code: int, tmp_path: Path
) -> None:
    program = f"{sys.executable} -m peers.cli {command} {streams}"
    environment = {**os.environ, "SWARM_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3])}
    found = subprocess.run(["sh", "-c", program], capture_output=True, text=True, env=environment, timeout=300)
    assert (found.returncode, "Traceback" in found.stderr, "Exception" in found.stderr) == (code, False, False)
    if streams == ">/dev/full":
        assert "what it prints cannot be written: No space left on device" in found.stderr
