"""Every option is written once: in the command, the environment and a file it is the same, and so on the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from peers.cli.app import run
from peers.cli.options import Home, _annotated
from peers.dashboard.place import TOKEN_VARIABLE
from peers.options.fields import settings_of
from peers.options.foundation import Foundation, Invocation
from peers.options.local import LocalOptions
from peers.options.model import PeerOptions
from peers.options.reading import read_foundation, read_peer_options
from swarm.errors import ConfigError
from tests.harness.sources import ROOT

pytestmark = pytest.mark.usefixtures("clean_environment")

PEER = settings_of(PeerOptions)
SAID: dict[str, Any] = {
    "invite": ["/ip4/1.2.3.4/tcp/5", "swarm1:abc"],
    "role": "trainer",
    "data": "texts",
    "data_field": "story.text",
    "data_template": "model",
    "data_special_tokens": True,
    "data_allow_bad": True,
    "eval": "held-out",
    "eval_every": 5,
    "model_files": "model",
    "from_hub": True,
    "stage": 3,
    "domain": "legal",
    "name": "brave-otter",
    "place": "2",
    "home": "/h",
    "listen": ["/ip4/1.2.3.4/tcp/5", "/ip6/::1/tcp/6"],
    "announce": ["/ip4/1.2.3.4/tcp/5"],
    "relay": "off",
    "through": ["/ip4/1.2.3.4/tcp/5"],
    "region": "eu-west",
    "dial_out_only": True,
    "device": "cuda:1",
    "max_memory": 8.5,
    "max_upload": "20mbit",
    "max_download": "2.5MB",
    "threads": 7,
    "state": "disk",
    "activation_checkpointing": "on",
    "deferred_weights": "off",
    "checkpoints": "kept/{run}",
    "checkpoint_every": 9,
    "max_in_flight": 4,
    "grace": 2.5,
    "preemption": "auto",
    "preemption_url": "http://127.0.0.1:5",
    "pause_when": ["hours:22-07"],
    "resume_after": 30.0,
    "retry": True,
    "dashboard": "7301",
    "invite_file": "invite",
    "report_to": "tensorboard,mlflow",
    "report_dir": "reports",
}
"""A value of each that is not its default, as a file has it."""
BESIDE = {"eval": {"role": "trainer"}, "state": {"role": "all"}, "preemption_url": {"preemption": "auto"}}
"""What a setting needs that others have said."""
WRONG: dict[str, Any] = {
    "invite": "x" * 9000,
    "role": "boss",
    "data": "",
    "data_field": "x" * 9000,
    "data_template": "",
    "data_special_tokens": "perhaps",
    "data_allow_bad": "perhaps",
    "eval": "",
    "eval_every": "0",
    "model_files": "",
    "from_hub": "perhaps",
    "stage": "512",
    "domain": "",
    "name": "No Name",
    "place": "x" * 9000,
    "home": "",
    "listen": "/" * 2000,
    "announce": "/" * 2000,
    "relay": "on",
    "through": "/" * 2000,
    "region": "A B",
    "dial_out_only": "perhaps",
    "device": "tpu",
    "max_memory": 0,
    "max_upload": "20Mb",
    "max_download": "64kbit",
    "threads": "0",
    "state": "tape",
    "activation_checkpointing": "yes",
    "deferred_weights": "auto",
    "checkpoints": "",
    "checkpoint_every": "0",
    "max_in_flight": "1.5",
    "grace": "nan",
    "preemption": "file:",
    "preemption_url": "ftp://x",
    "pause_when": "sunny",
    "resume_after": "0",
    "retry": "perhaps",
    "dashboard": "0.0.0.0:x",
    "invite_file": "",
    "report_to": "tensorboard,comet",
    "report_dir": "",
}


def typed(key: str, value: Any) -> Any:
    """A value as the parser hands it on: text, lists of it, and flags."""
    if PEER[key].flag:
        return value
    return [str(one) for one in value] if isinstance(value, list) else str(value)


def in_toml(value: Any) -> str:
    """A value as a file has it."""
    if isinstance(value, list):
        return f"[{', '.join(map(in_toml, value))}]"
    return str(value).lower() if isinstance(value, bool | int | float) else f'"{value}"'


def test_said_names_every_setting() -> None:
    assert list(SAID) == list(PEER) == list(WRONG)


@pytest.mark.parametrize("key", SAID)
def test_setting_is_the_same_by_option_variable_and_file(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, setting, beside = SAID[key], PEER[key], BESIDE.get(key, {})
    by_option = read_peer_options("join", {**beside, key: typed(key, value)})
    config = tmp_path / "peer.toml"
    config.write_text(f"# mine\n{key} = {in_toml(value)}\n")
    by_file = read_peer_options("join", beside, Invocation(config=config))
    for separator in (",", " ", ", "):
        joined = separator.join(value) if isinstance(value, list) else str(value)
        monkeypatch.setenv(setting.variable, joined)
        by_variable = read_peer_options("join", beside)
        assert by_option == by_file == by_variable
    assert getattr(by_option, key) not in (None, setting.default)
    origins = [one.origins[key] for one in (by_option, by_variable, by_file)]
    assert origins == [setting.names[0], setting.variable, f"{config}:2: {key}"]


@pytest.mark.parametrize("key", SAID)
def test_setting_by_option_wins_over_its_variable_and_that_over_the_file(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who wins is asked for; the others are of the wrong kind, and nobody looks at them."""
    value, setting, beside = SAID[key], PEER[key], BESIDE.get(key, {})
    config = tmp_path / "peer.toml"
    config.write_text(f'{key} = "{WRONG[key]}"\n')
    monkeypatch.setenv(setting.variable, ",".join(value) if isinstance(value, list) else str(value))
    by_variable = read_peer_options("join", beside, Invocation(config=config))
    monkeypatch.setenv(setting.variable, WRONG[key] or "?")
    by_option = read_peer_options("join", {**beside, key: typed(key, value)}, Invocation(config=config))
    assert by_variable == by_option


@pytest.mark.parametrize("source", ["option", "variable", "file"])
@pytest.mark.parametrize("key", SAID)
def test_wrong_value_is_refused_with_who_gave_it_and_what_to_do(
    key: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting, wrong = PEER[key], WRONG[key]
    config, given, named = tmp_path / "peer.toml", {}, f"{tmp_path}/peer.toml:1: {key}"
    config.write_text(f'{key} = "{wrong}"\n' if source == "file" else "")
    if source == "variable":
        if not wrong:
            return  # an empty one says nothing
        monkeypatch.setenv(setting.variable, wrong)
        named = setting.variable
    if source == "option":
        given, named = {key: [wrong] if setting.many else wrong}, setting.names[0]
    with pytest.raises(ConfigError) as caught:
        read_peer_options("join", given, Invocation(config=config))
    error = caught.value
    assert error.key == named
    assert error.allowed
    assert {"option": "--help", "variable": f"unset {named}", "file": "remove it"}[source] in error.remedy
    assert (repr(error.value) == "(not shown)") is setting.option.secret


def test_secrets_are_in_no_text_of_a_model() -> None:
    secret = {key for key, one in PEER.items() if one.option.secret}
    assert secret == {"invite"}
    assert not any(f"{key}=" in repr(PeerOptions(invite=("hush",))) for key in secret)


def test_home_of_a_command_that_only_looks_is_as_the_model_has_it() -> None:
    (kind, shown), (wanted, made) = get_args(Home), get_args(_annotated(PEER["home"]))
    assert (kind, shown.param_decls, shown.metavar, shown.help) == (
        wanted, made.param_decls, made.metavar, made.help
    )  # fmt: skip


@pytest.mark.parametrize("command", ["join", "new", "quickstart"])
def test_help_of_a_command_has_what_the_models_offer_of_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    shown = capsys.readouterr().out
    models = (PeerOptions, Invocation, Foundation, LocalOptions)
    offered = [one for model in models for one in settings_of(model).values() if command in one.option.of]
    for setting in offered:
        assert re.search(rf"^  (-\w, )?{re.escape(setting.names[0])}\b", shown, re.MULTILINE), setting.names[0]
    assert len(re.findall(r"^  (?:-\w, )?--", shown, re.MULTILINE)) == 1 + sum(not one.is_argument for one in offered)


@pytest.mark.parametrize(
    ("given", "key", "allowed"),
    [
        ({"steps": "x"}, "--steps", "a whole number"),
        ({"tokenizer": ""}, "--tokenizer", "a path"),
        ({"text": ["a", ""]}, "--text", "a path"),
    ],
)
def test_wrong_value_of_a_foundation_names_the_option(given: dict[str, Any], key: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_foundation(given)
    assert (caught.value.key, caught.value.allowed.removeprefix("a list, each ")) == (key, allowed)


# --- pages -----------------------------------------------------------------------------------------------------------


def test_dashboard_s_token_is_no_setting_and_still_may_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "only-in-the-environment")
    assert "only-in" not in repr(read_peer_options("join", {}))


def test_containers_set_no_variable_that_is_none() -> None:
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8"))["services"].values()
    used = {name for service in services for name in service.get("environment", ())}
    assert {"SWARM_INVITE_FILE", "SWARM_DASHBOARD"} <= used
    assert used <= {setting.variable for setting in PEER.values()} | {TOKEN_VARIABLE}
