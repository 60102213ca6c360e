"""Shards of conversations: tokenizers as models come with them, and the limits of hostile templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_shards.packing import counted_between
from data_shards.shard import Shard
from data_shards.tokenize import Tokenizer, tokenizer_digest
from peers.cli.app import run
from peers.data.building import BuildReport, build_from_files
from peers.data.records import chat_without_template
from peers.data.tokenizer_files import read_encoding
from peers.data.trainer_data import DataGiven, check_data, data_given, shard_for
from peers.exit_codes import EXIT_INCOMPATIBLE, EXIT_OK, EXIT_USAGE
from peers.options.model import PeerOptions
from swarm.config import parse_manifest
from swarm.errors import ConfigError
from tests.harness.rigs.chat import CHAT, CHATML, END, THINKS, chat_tokenizer, write_model
from tests.harness.swarm import small_manifest

pytestmark = pytest.mark.usefixtures("encoded_here")


def build(tokenizer: Path, out: Path, source: Path, template: Path | None = None) -> BuildReport:
    encoding = read_encoding(tokenizer, key="TEXT", template=template)
    return build_from_files([source], out, encoding, allow_bad=True)


def learnt(path: Path) -> str:
    shard = Shard.open(path)
    assert shard.counted is not None
    kept = shard.tokens[counted_between(shard.counted, 0, shard.manifest.tokens)]
    return Tokenizer(chat_tokenizer())._backend.decode(kept.tolist(), skip_special_tokens=False)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    lines: list[Any] = [{"messages": CHAT}, {"messages": CHAT[:2]}, {"conversations": CHAT[1:3]}, {"text": "plain"}]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path / "chats.jsonl"


def test_conversations_and_text_become_one_shard(tmp_path: Path, chats: Path) -> None:
    tokenizer = write_model(tmp_path / "model")
    report = build(tokenizer, tmp_path / "shard", chats)
    assert learnt(tmp_path / "shard") == f"fine, thanks.{END}four{END}fine, thanks.{END}plain{END}"
    assert report.shard.documents == 3
    assert report.left_out.first == [f"{chats}:2: it has no answer of the assistant to learn from"]
    assert report.shard.template is not None
    other = build(write_model(tmp_path / "other", template=CHATML + " "), tmp_path / "again", chats).shard
    assert other.digest != report.shard.digest


@pytest.mark.parametrize("where", ["config", "list", "jinja", "option"])
def test_template_is_found_where_models_have_it(tmp_path: Path, chats: Path, where: str) -> None:
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    given = {"config": CHATML, "list": named}.get(where, "{{ wrong }}")
    tokenizer = write_model(tmp_path / "model", template=given)
    option = None
    if where == "jinja":
        (tmp_path / "model" / "chat_template.jinja").write_text(CHATML)
    elif where == "option":
        option = tmp_path / "mine.jinja"
        option.write_text(CHATML)
    build(tokenizer if where == "config" else tmp_path / "model", tmp_path / "shard", chats, option)
    assert learnt(tmp_path / "shard").startswith("fine, thanks.")


def test_conversation_without_a_template_is_an_error_with_the_command(tmp_path: Path, chats: Path) -> None:
    tokenizer = write_model(tmp_path / "model", template=None)
    with pytest.raises(ConfigError, match=r"chats\.jsonl:1.*--template PATH"):
        build(tokenizer, tmp_path / "shard", chats)
    check_data(DataGiven(chats, allow_bad=True))  # the run may have a template: nobody knows yet
    document = (tokenizer / "tokenizer.json").read_bytes() if tokenizer.is_dir() else tokenizer.read_bytes()
    with pytest.raises(ConfigError, match="--data-template PATH"):
        shard_for(
            DataGiven(chats),
            document,
            small_manifest(document, 2, 1, {"model": {"vocab_size": 400}}),
            tmp_path / "shard",
            "seed",
        )
    assert not list(tmp_path.glob(".shard*"))


def test_template_that_rewrites_earlier_turns_names_the_conversation(tmp_path: Path, chats: Path) -> None:
    with pytest.raises(ConfigError, match=r"rewrites earlier turns.*chats\.jsonl:1"):
        build(write_model(tmp_path / "model", template=THINKS), tmp_path / "shard", chats)


# --- what ends a text ------------------------------------------------------------------------------------------------


def test_end_token_is_the_one_that_the_config_names(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    for token in ("</s>", END):
        tokenizer = write_model(tmp_path / "model", eos_token=token)
        build(tokenizer, tmp_path / token.strip("</|>"), tmp_path / "a.txt")
        last = int(Shard.open(tmp_path / token.strip("</|>")).tokens[-1])
        assert last == Tokenizer(chat_tokenizer()).special_tokens[token]


def test_end_token_that_the_tokenizer_lacks_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(ConfigError, match="one with the token <no>"):
        build(write_model(tmp_path / "model", eos_token="<no>"), tmp_path / "shard", tmp_path / "a.txt")


@pytest.mark.parametrize("config", ["{", "[]", "\xff"])
def test_config_that_is_none_is_an_error(tmp_path: Path, config: str) -> None:
    tokenizer = write_model(tmp_path / "model")
    tokenizer.with_name("tokenizer_config.json").write_bytes(config.encode("latin-1"))
    with pytest.raises(ConfigError, match="a JSON object"):
        read_encoding(tokenizer, key="TEXT")


def test_command_builds_from_conversations(tmp_path: Path, chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "model", template=None)
    arguments = ["data", "build", str(chats), "--tokenizer", str(tmp_path / "model"), "--out", str(tmp_path / "shard")]
    assert run(arguments) == EXIT_USAGE
    assert "--template PATH" in capsys.readouterr().err
    (tmp_path / "mine.jinja").write_text(CHATML)
    assert run([*arguments, "--allow-bad", "--template", str(tmp_path / "mine.jinja")]) == EXIT_OK
    assert "3 documents" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["model/tokenizer_config.json", "chats.jsonl"])
def test_json_is_no_template(tmp_path: Path, chats: Path, name: str) -> None:
    tokenizer = write_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"a model's directory; it is JSON"):
        read_encoding(tokenizer, key="TEXT", template=tmp_path / name)


def test_refusals_name_options_that_the_command_has(
    tmp_path: Path, chats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "This command reads none" in str(chat_without_template("FILE", "chats.jsonl:1"))
    assert "--template" not in str(chat_without_template("FILE", "chats.jsonl:1"))
    (tmp_path / "other.jsonl").write_text('{"story": "a"}\n{"messages": "b"}\n')
    tokenizer = write_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="with --field"):
        build(tokenizer, tmp_path / "shard", tmp_path / "other.jsonl")
    options = PeerOptions(role="trainer", data=tmp_path / "other.jsonl")
    with pytest.raises(ConfigError, match="with --data-field"):
        check_data(data_given(options))


def test_commands_show_numbers_and_documents(tmp_path: Path, chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, shard = write_model(tmp_path / "model"), str(tmp_path / "shard")
    arguments = ["data", "build", str(chats), "--tokenizer", str(tokenizer), "--out", shard, "--context", "8"]
    assert run([*arguments, "--allow-bad"]) == EXIT_OK
    assert "packed as documents: " in capsys.readouterr().out
    assert run(["data", "stats", shard, "--context", "8"]) == EXIT_OK
    said = capsys.readouterr().out
    assert "of 3 documents" in said
    assert "tokens a byte" in said
    assert "% of tokens are learnt" in said
    assert run(["data", "stats", shard, "--context", "8", "--json"]) == EXIT_OK
    facts = json.loads(capsys.readouterr().out)
    assert facts["documents"] == 3
    assert [one["packing"] for one in facts["packing"]] == ["stream", "documents"]
    assert run(["data", "sample", shard, "--tokenizer", str(tokenizer)]) == EXIT_OK
    shown = capsys.readouterr()
    assert f"assistant\n«fine, thanks.{END}»" in shown.out
    assert "private" in shown.err
    assert run(["data", "sample", shard, "--tokenizer", str(tokenizer), "--tokens", "2", "--json"]) == EXIT_OK
    documents = json.loads(capsys.readouterr().out)["documents"]
    assert sorted(one["document"] for one in documents) == [0, 1, 2]
    assert all(one["more_tokens"] >= 0 for one in documents)
    (tmp_path / "other.json").write_text(tokenizer.read_text() + " ")
    assert run(["data", "sample", shard, "--tokenizer", str(tmp_path / "other.json")]) == EXIT_INCOMPATIBLE


def test_join_takes_conversations_with_a_template(tmp_path: Path, chats: Path) -> None:
    model = write_model(tmp_path / "model")
    manifest = parse_manifest(
        {
            "model": {"vocab_size": 400, "dim": 32, "layers": 2, "heads": 2, "context": 8},
            "batch": {"microbatch_size": 2},
            "tokenizer": {"digest": tokenizer_digest(model.read_bytes())},
        },
        "the test",
    )
    given = DataGiven(chats, template=tmp_path / "model", allow_bad=True)
    said = "1 of 4 records (102 of 475 bytes) left out: "
    assert said in check_data(given).words, "before anybody is called"
    with pytest.raises(ConfigError, match=r"chats\.jsonl:2: it has no answer of the assistant"):
        check_data(DataGiven(chats, template=tmp_path / "model"))
    other = DataGiven(chats, template=model_template(tmp_path), allow_bad=True)
    assert check_data(given).digest != check_data(other).digest
    made = shard_for(given, model.read_bytes(), manifest, tmp_path / "new", "me")
    assert made.unused.startswith(f"; of 83 tokens in 3 documents; {said}")
    assert learnt(made.path).startswith(f"fine, thanks.{END}four")
    with pytest.raises(ConfigError, match="neither chat_template.jinja"):
        check_data(DataGiven(chats, template=tmp_path))


def model_template(root: Path) -> Path:
    """A template in a file of its own."""
    (root / "mine.jinja").write_text(CHATML)
    return root / "mine.jinja"


def test_options_that_say_how_to_read_data_need_data() -> None:
    assert data_given(PeerOptions()) is None
    given = data_given(PeerOptions(data=Path("x"), data_allow_bad=True))
    assert given is not None
    assert given.allow_bad
    needing = (
        {"data_field": "x"},
        {"data_template": Path("x")},
        {"data_special_tokens": True},
        {"data_allow_bad": True},
    )
    for options in (PeerOptions(**one) for one in needing):
        with pytest.raises(ConfigError, match="only together with --data"):
            data_given(options)
