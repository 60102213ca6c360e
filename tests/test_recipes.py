"""Recipes parse, and every command line in them and in the pages for users is one that the real parser takes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from peers.cli.app import app
from peers.commands.start import to_found, to_join
from peers.options.fields import settings_of
from peers.options.model import PeerOptions
from swarm.errors import SwarmError
from tests.harness.sources import ROOT

PAGES = (
    "README.md",
    "docker/README.md",
    *(page.relative_to(ROOT).as_posix() for page in sorted((ROOT / "docs").glob("*.md"))),
)
NO_COMMANDS = {"docs/plans.md", "docs/python.md"}
COMPOSE, KUBERNETES = "docker/gpus.yaml", "examples/kubernetes.yaml"
SLURM, SKYPILOT, CLOUD_INIT = "examples/slurm.sbatch", "examples/skypilot.yaml", "examples/cloud-init.yaml"
RECIPES = (COMPOSE, KUBERNETES, SLURM, SKYPILOT, CLOUD_INIT)
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`(swarm [^`]+)`")
VARIABLE = re.compile(r"\$\{\w+:-([^}]*)\}")
"""Of compose: its default is what is checked."""
ROOT_COMMAND: Any = typer.main.get_command(app)


# --- command lines ---------------------------------------------------------------------------------------------------


def command_lines(text: str) -> Iterator[list[str]]:
    """Yield the words of each ``swarm …`` in a shell's text, also within a pipe, a list or ``$(…)``."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, "#"
        try:
            words = list(lexer)
        except ValueError:  # prose of a block that is no shell
            continue
        while words:
            first = next((at for at, word in enumerate(words) if _is_command(words, at)), None)
            if first is None:
                break
            words = words[first + 1 :]
            end = next((at for at, word in enumerate(words) if set(word) <= set("();<>|&")), len(words))
            yield words[:end]
            words = words[end:]


def _is_command(words: Sequence[str], at: int) -> bool:
    """Whether a word is our command and not an argument of another: its own options or a subcommand follow."""
    name = words[at].removeprefix("ExecStart=")
    if name != "swarm" and not name.endswith("/bin/swarm"):
        return False
    return at + 1 < len(words) and (words[at + 1] in ROOT_COMMAND.commands or words[at + 1].startswith("--"))


def parse(words: Sequence[str]) -> None:
    """Have the parser take a command line, and of join and new the settings, too. Raises its errors."""
    if {"--help", "--version"} & set(words):
        check_words(words)
        return
    command, context, left = ROOT_COMMAND, None, list(words)
    path = []
    while True:
        context = command.make_context(command.name or "swarm", list(left), parent=context)
        if not getattr(command, "commands", None):
            break
        left = [*context._protected_args, *context.args]
        if not left:
            return
        name, command, left = command.resolve_command(context, left)
        path.append(name)
    read = {"join": to_join, "new": to_found}.get(path[0])
    if read is not None:
        read(context.params)


def check_words(words: Sequence[str]) -> None:
    """Have a command in the text of a page, which may lack values and arguments, be a command, and its options its own.
    Raises AssertionError."""
    command, left = ROOT_COMMAND, list(words)
    while left and left[0] in (getattr(command, "commands", None) or {}):
        command = command.commands[left.pop(0)]
    context = typer.Context(command)
    known = {name for one in command.get_params(context) for name in (*one.opts, *one.secondary_opts)}
    assert {word.partition("=")[0] for word in left if re.match("--?[a-z]", word)} <= known, shlex.join(words)


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no setting from outside, and every port free."""
    for name in [name for name in os.environ if name.startswith("SWARM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("peers.options.reading.check_port", lambda port: None)


def test_command_lines_are_found_wherever_a_shell_runs_one() -> None:
    text = 'swarm a # swarm join\nx | .venv/bin/swarm join "$I" \\\n --retry > f; swarm drain --all\n'
    text += "cd swarm\nENV=1 swarm invite\n$(docker exec c swarm status)\nit's\nExecStart=/opt/swarm/bin/swarm relay"
    found = list(command_lines(text))
    assert found == [["join", "$I", "--retry"], ["drain", "--all"], ["invite"], ["status"], ["relay"]]


@pytest.mark.parametrize(
    "words", [["jion", "x"], ["join", "x", "--rool", "stage"], ["join", "x", "--role", "host"], ["drain", "--peer"]]
)
def test_command_line_that_the_command_refuses_is_refused_here(words: list[str]) -> None:
    with pytest.raises(Exception) as refused:  # noqa: PT011 - the parser's have no common name
        parse(words)
    assert isinstance(refused.value, SwarmError) or "UsageError" in str(type(refused.value).__mro__)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_line_of_a_page_is_taken(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = [words for block in BLOCK.findall(text) for words in command_lines(block)]
    refused = {shlex.join(words): str(error) for words in lines if (error := _refusal(words)) is not None}
    assert refused == {}
    assert bool(lines) is (page not in NO_COMMANDS)
    for span in SPAN.findall(BLOCK.sub("", text)):
        check_words(re.split(r"[\s|]+", " ".join(span.split()))[1:])


def _refusal(words: Sequence[str]) -> Exception | None:
    try:
        parse(words)
    except Exception as error:  # noqa: BLE001 - the parser's have no common name
        return error
    return None


# --- recipes ---------------------------------------------------------------------------------------------------------


def documents(recipe: str) -> list[Any]:
    """Return what a recipe in YAML holds."""
    return list(yaml.safe_load_all((ROOT / recipe).read_text(encoding="utf-8")))


def check_variables(environment: Mapping[str, Any]) -> None:
    """Have every variable of a recipe be a setting: a peer refuses others."""
    known = {one.variable for one in settings_of(PeerOptions).values()} | {"SWARM_HOME"}
    assert {name for name in environment if name.startswith("SWARM_")} <= known


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.stem)
def test_every_command_line_above_an_example_is_taken(example: Path) -> None:
    said = "\n".join(line[1:].strip() for line in example.read_text().splitlines() if line.startswith("#   "))
    lines = list(command_lines(said))
    assert lines
    for words in lines:
        parse(words)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_command_line_in_the_text_of_a_recipe_is_taken(recipe: str) -> None:
    text = (ROOT / recipe).read_text(encoding="utf-8")
    lines = list(command_lines(re.sub("^# ?", "", text, flags=re.MULTILINE)))
    assert {shlex.join(words): str(error) for words in lines if (error := _refusal(words))} == {}


def test_compose_gives_each_peer_the_gpus_and_bounds_it() -> None:
    (compose,) = documents(COMPOSE)
    for service in compose["services"].values():
        parse(shlex.split(VARIABLE.sub(r"\1", service["command"])))
        check_variables(service["environment"])
        (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (devices["driver"], devices["capabilities"]) == ("nvidia", ["gpu"])
        assert {volume.split(":")[0] for volume in service["volumes"]} & compose["volumes"].keys()


def test_kubernetes_manifest_is_of_one_piece() -> None:
    service, stateful = documents(KUBERNETES)
    assert [(one["apiVersion"], one["kind"]) for one in (service, stateful)] == [
        ("v1", "Service"),
        ("apps/v1", "StatefulSet"),
    ]
    spec, pod = stateful["spec"], stateful["spec"]["template"]["spec"]
    assert set(spec) <= {
        "serviceName",
        "replicas",
        "podManagementPolicy",
        "selector",
        "template",
        "volumeClaimTemplates",
    }
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    assert spec["serviceName"] == service["metadata"]["name"] != "swarm", "variables SWARM_SERVICE_… would be set"
    (container,) = pod["containers"]
    parse(container["args"])
    environment = {one["name"]: one for one in container["env"]}
    check_variables(environment)
    assert pod["terminationGracePeriodSeconds"] > float(environment["SWARM_GRACE"]["value"])
    for probe in ("startupProbe", "livenessProbe"):
        name, *words = container[probe]["exec"]["command"]
        assert name == "swarm"
        parse(words)
    volumes = [*pod["volumes"], *(one["metadata"] for one in spec["volumeClaimTemplates"])]
    assert {one["name"] for one in volumes} == {one["name"] for one in container["volumeMounts"]}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert container["ports"][0]["containerPort"] == service["spec"]["ports"][0]["port"]


def test_slurm_script_is_a_script_whose_directives_slurm_has() -> None:
    text = (ROOT / SLURM).read_text(encoding="utf-8")
    assert subprocess.run(["bash", "-n", str(ROOT / SLURM)], capture_output=True, text=True).stderr == ""
    directives = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)$", text, re.MULTILINE))
    assert len(directives) == text.count("#SBATCH")
    assert set(directives) <= {"job-name", "nodes", "ntasks", "gpus-per-node", "cpus-per-task", "mem", "time", "signal",
                               "requeue", "open-mode", "output"}  # fmt: skip
    (words,) = command_lines(text[text.index("swarm join --invite") - 1 :])
    seconds = int(directives["signal"].rpartition("@")[2])
    assert float(words[words.index("--grace") + 1]) < seconds, "it has left before its time is up"


def test_skypilot_task_has_the_keys_of_one() -> None:
    (task,) = documents(SKYPILOT)
    assert set(task) <= {"name", "resources", "secrets", "file_mounts", "setup", "run"}
    assert task["resources"]["use_spot"] is True
    check_variables(task["secrets"])
    (words,) = command_lines(task["run"])
    parse(words)


def test_cloud_init_writes_a_unit_that_leaves_before_the_machine_goes() -> None:
    text = (ROOT / CLOUD_INIT).read_text(encoding="utf-8")
    assert text.startswith("#cloud-config\n"), "or it is taken for something else"
    data = yaml.safe_load(text)
    assert set(data) == {"packages", "users", "write_files", "runcmd"}
    files = {one["path"]: one for one in data["write_files"]}
    secret = files["/etc/swarm/environment"]
    assert secret["permissions"] == "0600"
    check_variables(dict(line.split("=", 1) for line in secret["content"].splitlines()))
    unit = files["/etc/systemd/system/swarm.service"]["content"]
    (words,) = command_lines(unit)
    parse(words)
    settings = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line and not line.startswith("#"))
    assert settings["EnvironmentFile"] == secret["path"]
    assert "75" in settings["RestartPreventExitStatus"].split(), "a machine that goes starts nobody again"
    assert float(words[words.index("--grace") + 1]) < 30, "the shortest notice that clouds give"
    assert float(settings["TimeoutStopSec"]) > float(words[words.index("--grace") + 1])
