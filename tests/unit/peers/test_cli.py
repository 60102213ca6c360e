from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from peers.cli.app import Commands, app, run
from peers.exit_codes import EXIT_USAGE
from swarm import __version__
from tests.harness.rigs.peers import HEAVY, PROBE

ADDRESS = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWMrSnzaXRF41zHeiKFu6JxTnmWJGKBmEmoW2LsquAx6zW"


def _swarm(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    program = PROBE.format(heavy=HEAVY)
    path = os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path]))
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True, text=True, timeout=300, cwd=cwd, env=os.environ | {"PYTHONPATH": path, "COLUMNS": "80"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--help",), 0, "130  interrupted by Ctrl-C"),
        (("-h",), 0, "quickstart"),
        (("--version",), 0, __version__),
        ((), 2, "quickstart"),
        (("quickstart", "--help"), 0, "3    a peer failed or cannot be reached"),
        (("sample", "--help"), 0, "--temperature"),
        (("export", "--help"), 0, "swarm export my-model --run out/first"),
        (("eval", "--help"), 0, "--stride"),
        (("new", "--help"), 0, "--preset"),
        (("join", "--help"), 0, "--data"),
        (("data", "build", "--help"), 0, "--tokenizer"),
        (("sample", "--tokens", "0"), 2, ""),
        (("nonsense",), 2, ""),
    ],
)
def test_cli_parsing_imports_nothing_heavy(arguments: tuple[str, ...], code: int, words: str) -> None:
    result = _swarm(*arguments)
    assert result.returncode == code
    assert words in result.stdout
    assert "heavy: \n" in result.stderr
    assert "Traceback" not in result.stderr
    assert max(map(len, result.stdout.splitlines()), default=0) <= 80


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--help", "Start a run that others join, and serve it in the foreground until it is over."),
        ("ckpt --help", "Check every byte of a run's checkpoints against its digest, and each record against its"),
        ("data --help", "shard"),
    ],
)
def test_cli_help_cuts_no_description_off(arguments: str, sentence: str) -> None:
    shown = _swarm(*arguments.split()).stdout
    assert sentence in " ".join(shown.split())
    assert "..." not in shown.replace("[ARGS]...", "")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("join",), "INVITE is missing"),
        (("join", "nonsense", "--role", "stage"), "INVITE"),
        (("join", "--config", "/nonexistent.toml"), "/nonexistent.toml"),
        (("join", ADDRESS, "--device", "banana"), "--device"),
        (("join", ADDRESS, "--listen", "/ip4/127.0.0.1"), "--listen"),
        (("sample", "/nonexistent"), "does not exist"),
        (("sample", "/dev/null"), "is a file"),
        (("sample", "/"), "no run.toml"),
        (("sample",), "quickstart"),
        (("export", "/dev/null"), "it is a file"),
        (("eval", "/nonexistent"), "no such file"),
        (("eval", "/dev/null", "--device", "banana"), "--device"),
        (("sample", "--model", "/"), "holds no config.json"),
        (("sample", "x", "--model", "y"), "nothing beside --model"),
        (("export", "new", "--run", "/"), "no run.toml"),
    ],
)
def test_cli_wrong_setting_is_explained_before_anything_heavy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], named: str
) -> None:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "home"))  # whoever plays this may have runs of their own
    result = _swarm(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert named in result.stderr
    assert "next:" in result.stderr
    assert "heavy: \n" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "cause", "check", "next_"),
    [
        ("join --thread 3", "swarm join has no option --thread", "did you mean --relay or --threads?", "join --help"),
        (
            "join --banana",
            "swarm join has no option --banana",
            "usage: swarm join [OPTIONS] [INVITE]...",
            "join --help",
        ),
        (
            "new --pause-when battery",
            "--pause-when is for peers that join: a founder stays until its run has begun",
            "start this one without --pause-when; the peer that does the work is another",
            "join INVITE --pause-when …; once the run has begun the founder may go: ",
        ),
        (
            "new --preset tiny --retry",
            "--retry is for peers that join: a founder stays until its run has begun",
            "start this one without --retry",
            "join INVITE --retry",
        ),
        ("join x --threads", "option '--threads' requires an argument", "what follows it", "join --help"),
        ("data build", "TEXT is missing", "expected a value: UTF-8 files, or directories", "data build --help"),
        ("data build x", "--tokenizer is missing", "expected a value: The run's tokenizer.json", "data build --help"),
        ("statu", "no such command 'statu'", "id you mean 'status'?", "--help"),
        ("status x", "got unexpected extra argument(s) (x)", "usage: swarm status [OPTIONS]", "status --help"),
        (
            "sample --tokens 0",
            "--tokens = '0' cannot be used",
            "expected a number greater than or equal",
            "sample --help",
        ),
        ("sample --tokens x", "--tokens = 'x' cannot be used", "expected a valid integer", "sample --help"),
        ("quickstart --ends x", "--ends = 'x' cannot be used", "one of 'private', 'hosted'", "quickstart --help"),
        ("sample", "no run is kept here", "runs are looked for in", "quickstart"),
        ("new --resume", "no run is kept here", "runs are looked for in", "ckpt pull --from INVITE"),
    ],
)
def test_cli_usage_errors_are_cause_check_and_next_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    cause: str,
    check: str,
    next_: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "home"))
    assert run(arguments.split()) == EXIT_USAGE
    first, second, third = capsys.readouterr().err.splitlines()
    assert first == f"error: {cause}"
    assert second.startswith("  check: ")
    assert check in second
    assert third.startswith("  next:  ")
    assert next_ in third


@pytest.mark.parametrize("command", ["data", "ckpt"])
def test_cli_group_without_a_command_prints_its_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command]) == EXIT_USAGE
    assert capsys.readouterr().err.startswith(f"Usage: swarm {command} ")


def test_cli_help_of_commands_with_a_model_loads_no_pydantic() -> None:
    program = PROBE.format(heavy=(*HEAVY, "pydantic", "pydantic_core", "asyncio", "numpy"))
    for command in ("join", "new"):
        ran = subprocess.run([sys.executable, "-c", program, command, "--help"], capture_output=True, text=True)
        assert ran.stderr == "heavy: \n"


def test_cli_list_says_of_each_command_what_its_own_help_says() -> None:
    group = typer.main.get_group(app)
    for name, entry in Commands.entries.items():
        assert group.commands[name].name == name
        assert group.commands[name].get_short_help_str(1000) == entry.said, name


def test_cli_imports_the_command_that_is_typed_and_no_other() -> None:
    program = PROBE.format(heavy=tuple(entry.module for entry in Commands.entries.values()))
    for words, imported in ((["--help"], ""), (["status", "--help"], "peers.cli.running"), (["nope"], "")):
        ran = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
        assert ran.stderr.splitlines()[-1] == f"heavy: {imported}"


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
