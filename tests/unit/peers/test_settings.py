from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from peers.cli.app import run
from peers.home.places import home_directory
from peers.options.foundation import Invocation
from peers.options.model import ANY_PORT, PeerOptions
from peers.options.reading import blamed, read_invocation, read_peer_options
from peers.settings import PeerSettings, exact_settings
from swarm.errors import ConfigError
from tests.harness.rigs.peers import checked_settings

pytestmark = pytest.mark.usefixtures("clean_environment")

STAGE = {"home": Path("h"), "role": "stage", "bootstrap": ("/ip4/127.0.0.1/tcp/1/p2p/x",)}


# --- what a peer is started with -------------------------------------------------------------------------------------


def refused(command: str, flags: dict[str, object], invocation: Invocation | None = None) -> ConfigError:
    """Why these are no options of a command."""
    with pytest.raises(ConfigError) as caught:
        read_peer_options(command, flags, invocation)
    return caught.value


def test_exact_settings_written_as_json_come_back_the_same() -> None:
    settings = checked_settings(
        **STAGE, stage=1, run_directory=Path("c"), checkpoint_every=5, patience_s=None, control=Path("s")
    )
    assert PeerSettings(**settings.model_dump(mode="json")) == settings


@pytest.mark.parametrize("variable", ["SWARM_STAGE", "SWARM_LISTEN", "SWARM_BANANA"])
def test_exact_settings_ignore_the_environment(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "nonsense")
    settings = exact_settings(**STAGE)
    assert settings.options == PeerOptions()


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"home": Path("h")}, "role"),
        ({"home": Path("h"), "role": "stage"}, "bootstrap"),
        ({"home": Path("h"), "role": "bootstrap"}, "manifest"),
        (STAGE | {"role": "trainer", "stage": 0}, "stage"),
        (STAGE | {"data": Path("d")}, "data"),
        (STAGE | {"role": "leader"}, "role"),
        (STAGE | {"device": "banana"}, "device"),
        (STAGE | {"run": "abc"}, "run"),
        (STAGE | {"listen": ()}, "listen"),
        (STAGE | {"patience_s": 0}, "patience_s"),
        (STAGE | {"checkpoint_every": 5}, "checkpoint_every"),
        (STAGE | {"shard": Path("s")}, "shard"),
    ],
)
def test_exact_settings_unusable_name_the_key(given: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked_settings(**given)
    assert caught.value.key.removeprefix("--") == key


# --- what a person says about it -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ({}, "stage"),
        ({"data": Path("d")}, "trainer"),
        ({"role": "auto", "data": Path("d")}, "trainer"),
        ({"role": "trainer"}, "trainer"),
        ({"role": "stage", "stage": 1}, "stage"),
    ],
)
def test_join_settings_auto_trains_where_there_is_data(flags: dict[str, object], part: str) -> None:
    assert read_peer_options("join", flags).part_taken == part


@pytest.mark.parametrize(
    ("variable", "meant"),
    [("SWARM_NAMES", "SWARM_NAME?"), ("SWARM_CHECKPOINT", "SWARM_CHECKPOINTS?"), ("SWARM_BANANA", "SWARM_THREADS")],
)
def test_join_settings_unknown_variable_is_refused_with_what_there_is(
    monkeypatch: pytest.MonkeyPatch, variable: str, meant: str
) -> None:
    monkeypatch.setenv(variable, "hush")
    error = refused("join", {})
    assert error.key == variable
    assert meant in str(error)
    assert "hush" not in str(error), "it may be a secret of another program's"


def test_join_settings_unusable_name_the_flag_and_what_fits_in_words(snapshot: Any) -> None:
    flags: list[dict[str, object]] = [
        {"role": "leader"}, {"device": "tpu"}, {"role": "trainer", "stage": 0}, {"data": Path("d"), "stage": 0},
        {"role": "stage", "data": Path("d")}, {"name": "No Spaces"}, {"threads": 0},
    ]  # fmt: skip
    assert [str(refused("join", one)) for one in flags] == snapshot


def test_join_settings_unknown_key_in_file_is_refused_with_the_nearest(tmp_path: Path) -> None:
    config = tmp_path / "peer.toml"
    config.write_text("thread = 2\n")
    with pytest.raises(ConfigError, match=r"Did you mean threads\?"):
        read_peer_options("join", {}, Invocation(config=config))


@pytest.mark.parametrize("content", [None, "threads = ", "\xff"])
def test_join_settings_unreadable_file_is_a_config_error(tmp_path: Path, content: str | None) -> None:
    config = tmp_path / "peer.toml"
    if content is not None:
        config.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match="--config"):
        read_peer_options("join", {}, Invocation(config=config))


def test_port_that_is_taken_is_about_the_option_that_was_given() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port} is taken .*pid {os.getpid()}") as caught:
            read_peer_options("join", {}, Invocation(port=port))
    assert (caught.value.key, caught.value.value) == ("--port", port)
    assert "--listen" not in str(caught.value)


def test_port_is_short_for_all_interfaces_and_wins_over_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_LISTEN", "/ip4/1.2.3.4/tcp/5")
    assert read_peer_options("join", {}).listen == ("/ip4/1.2.3.4/tcp/5",)
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        port = probe.getsockname()[1]
        # Bound and not listening: with SO_REUSEADDR on both sides another may bind it too, and here nobody else has it.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        options = read_peer_options("join", {}, read_invocation("join", {"port": str(port)}))
    assert (options.listen, options.origins) == ((f"/ip4/0.0.0.0/tcp/{port}",), {"listen": "--port"})
    with pytest.raises(ConfigError, match="one of --port and --listen"):
        read_peer_options("join", {"listen": [ANY_PORT]}, Invocation(port=4001))


def test_variable_that_is_empty_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As compose hands on what nobody has set; of an empty path the working directory would be what is read."""
    for variable in ("SWARM_DATA", "SWARM_HOME", "SWARM_STAGE", "SWARM_LISTEN"):
        monkeypatch.setenv(variable, "")
    assert read_peer_options("join", {}) == PeerOptions()


@pytest.mark.parametrize(("command", "used"), [("join", "otter"), ("new", None)])
def test_options_that_a_command_does_not_offer_are_not_its(command: str, used: str | None) -> None:
    """The name that new is given is the run's."""
    assert read_peer_options(command, {"name": "otter"}).name == used


def test_founder_uses_what_new_offers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {"SWARM_STAGE": "1", "SWARM_CHECKPOINT_EVERY": "5", "SWARM_GRACE": "7"}.items():
        monkeypatch.setenv(variable, value)
    assert read_peer_options("new", {}).of_founder() == PeerOptions(grace=7.0)


# --- who is to blame -------------------------------------------------------------------------------------------------


def test_error_between_settings_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_STAGE", "1")
    with pytest.raises(ConfigError, match="a trainer holds no stage") as caught:
        read_peer_options("join", {"role": "trainer"})
    assert caught.value.key == "SWARM_STAGE"


def test_secret_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_INVITE", "hush" * 3000)
    with pytest.raises(ConfigError, match="SWARM_INVITE") as caught:
        read_peer_options("join", {})
    assert "hush" not in str(caught.value)
    monkeypatch.setenv("SWARM_INVITE", "hush")
    options = read_peer_options("join", {})
    assert "hush" not in str(blamed(ConfigError("INVITE", "hush", "an invite", "Ask."), options))
    assert "is missing" not in str(blamed(ConfigError("INVITE", None, "an invite", "Ask."), options))


def test_variables_that_kubernetes_sets_beside_a_service_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SWARM_SERVICE_HOST": "10.0.0.1",
        "SWARM_SERVICE_PORT": "4001",
        "SWARM_SERVICE_PORT_P2P": "4001",
        "SWARM_PORT": "tcp://10.0.0.1:4001",
        "SWARM_PORT_4001_TCP": "tcp://10.0.0.1:4001",
        "SWARM_PORT_4001_TCP_ADDR": "10.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    assert read_peer_options("join", {}).listen == PeerOptions().listen


def test_unknown_variables_are_all_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_DATUM", "x")
    monkeypatch.setenv("SWARM_PORTS", "y")
    with pytest.raises(ConfigError, match=r"Did you mean SWARM_DATA\? If not: unset SWARM_DATUM SWARM_PORTS"):
        read_peer_options("join", {})


def test_user_without_a_home_directory_is_told_how_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "SWARM_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    with pytest.raises(ConfigError, match="--home or SWARM_HOME"):
        home_directory()


def test_machine_without_a_temporary_directory_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/']")

    monkeypatch.setattr("tempfile.gettempdir", nowhere)
    monkeypatch.setattr("peers.commands.quickstart.check_device", lambda device: nowhere())
    assert run(["quickstart"]) == 1
    assert "TMPDIR=DIR" in capsys.readouterr().err
