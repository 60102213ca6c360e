from __future__ import annotations

from pathlib import Path

import pytest

from peers.settings import PeerSettings, exact_settings, load_settings
from swarm.errors import ConfigError

STAGE = {"home": Path("h"), "role": "stage", "bootstrap": ("/ip4/127.0.0.1/tcp/1/p2p/x",)}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in PeerSettings.model_fields:
        monkeypatch.delenv(f"SWARM_{key.upper()}", raising=False)


def test_settings_every_source_ranks_as_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "peer.toml"
    config.write_text('threads = 2\ndevice = "cuda"\nname = "from-file"\nlisten = "/ip4/0.0.0.0/tcp/0"\n')
    monkeypatch.setenv("SWARM_DEVICE", "cuda:1")
    monkeypatch.setenv("SWARM_NAME", "from-environment")
    settings = load_settings(STAGE | {"name": "from-flag", "threads": None}, config)
    assert (settings.name, settings.device, settings.threads) == ("from-flag", "cuda:1", 2)
    assert settings.listen == "/ip4/0.0.0.0/tcp/0"
    assert settings.max_in_flight is None


def test_settings_bootstrap_from_environment_is_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_BOOTSTRAP", "/ip4/1.2.3.4/tcp/1/p2p/a, /ip4/1.2.3.4/tcp/2/p2p/b")
    settings = load_settings({"home": Path("h"), "role": "stage"})
    assert settings.bootstrap == ("/ip4/1.2.3.4/tcp/1/p2p/a", "/ip4/1.2.3.4/tcp/2/p2p/b")


def test_settings_foreign_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_TEST_ID", "17")
    assert load_settings(STAGE).role == "stage"


def test_settings_written_as_json_come_back_the_same() -> None:
    settings = load_settings(STAGE | {"stage": 1, "checkpoints": Path("c"), "checkpoint_every": 5})
    assert PeerSettings(**settings.model_dump(mode="json")) == settings


@pytest.mark.parametrize(
    ("source", "named"), [("flag", "--threads"), ("environment", "SWARM_THREADS"), ("file", "peer.toml")]
)
def test_settings_bad_value_names_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, named: str
) -> None:
    config = tmp_path / "peer.toml"
    config.write_text("threads = 0\n" if source == "file" else "")
    if source == "environment":
        monkeypatch.setenv("SWARM_THREADS", "0")
    with pytest.raises(ConfigError) as caught:
        load_settings(STAGE | ({"threads": 0} if source == "flag" else {}), config)
    assert caught.value.key == "threads"
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ({"home": Path("h")}, "role"),
        ({"home": Path("h"), "role": "stage"}, "bootstrap"),
        ({"home": Path("h"), "role": "bootstrap"}, "manifest"),
        (STAGE | {"role": "trainer"}, "shard"),
        (STAGE | {"role": "trainer", "shard": Path("s"), "stage": 0}, "stage"),
        (STAGE | {"role": "leader"}, "role"),
        (STAGE | {"device": "tpu"}, "device"),
        (STAGE | {"run": "abc"}, "run"),
        (STAGE | {"checkpoint_every": 5}, "checkpoint_every"),
    ],
)
def test_settings_unusable_name_the_key(flags: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(flags)
    assert caught.value.key == key


def test_settings_unknown_key_in_file_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "peer.toml"
    config.write_text("thread = 2\n")
    with pytest.raises(ConfigError, match="no such key"):
        load_settings(STAGE, config)


@pytest.mark.parametrize("content", [None, "threads = ", "\xff"])
def test_settings_unreadable_file_is_a_config_error(tmp_path: Path, content: str | None) -> None:
    config = tmp_path / "peer.toml"
    if content is not None:
        config.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match="config"):
        load_settings(STAGE, config)


def test_exact_settings_ignore_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_STAGE", "nonsense")
    monkeypatch.setenv("SWARM_LISTEN", "/ip4/0.0.0.0/tcp/0")
    settings = exact_settings(home=Path("h"), role="bootstrap")
    assert (settings.stage, settings.listen) == (None, "/ip4/127.0.0.1/tcp/0")


def test_exact_settings_unusable_name_the_key() -> None:
    with pytest.raises(ConfigError) as caught:
        exact_settings(home=Path("h"), role="stage", device="banana")
    assert (caught.value.key, caught.value.value) == ("device", "banana")
