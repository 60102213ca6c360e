from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from data_shards.build import build_shard
from data_shards.shard import Shard
from data_shards.tokenize import tokenizer_digest, train_tokenizer
from peers.cli.app import run
from peers.data.files import source_files
from peers.data.trainer_data import DataGiven, check_data, check_tokenizer, data_opened, domain_of, shard_for
from peers.exit_codes import EXIT_INCOMPATIBLE, EXIT_OK, EXIT_USAGE, exit_code_of
from peers.settings import Role
from swarm.config import Manifest, parse_manifest
from swarm.errors import ConfigError, Incompatible, StateError
from swarm.security.credentials import Credential, Grant, SignedGrant

TEXT = "\n\n".join(f"Paragraph {n} of a text about nothing in particular, long enough to count." for n in range(60))
VOCABULARY = 300


@pytest.fixture(scope="module")
def tokenizer() -> bytes:
    return train_tokenizer([TEXT], VOCABULARY)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    (root / "inner").mkdir(parents=True)
    (root / "a.txt").write_text(TEXT)
    (root / "inner" / "b.MD").write_text(TEXT.upper())
    (root / "empty.rst").touch()
    (root / ".hidden.txt").write_text("secret")
    (root / "picture.png").write_bytes(b"\x89PNG\xff")
    return root


def _manifest(tokenizer: bytes, **model: int) -> Manifest:
    sections = {
        "model": {"vocab_size": VOCABULARY, "dim": 32, "layers": 2, "heads": 2, "context": 16} | model,
        "batch": {"microbatch_size": 2},
        "tokenizer": {"digest": tokenizer_digest(tokenizer)},
    }
    return parse_manifest(sections, "the test")


# --- what it is of ---------------------------------------------------------------------------------------------------


def _of(organisation: str) -> Credential:
    grant = Grant(run="0" * 64, serial="0" * 16, name="p", organisation=organisation, role="any", until_step=9, key="K")
    return Credential(signed=SignedGrant(grant=grant, signatures={"F": "0" * 128}), peer="p")


@pytest.mark.parametrize("role", ["stage", "trainer"])
def test_domain_that_an_organisation_keeps_to_itself_is_for_its_hosts_and_trainers(role: Role) -> None:
    split = {"stages": 2, "variants": (1, 2), "route_by": "domain", "domains": ("law", "code"), "own": {"code": "acme"}}
    issuer = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    sections = {"split": split, "run": {"start_when": {"stage_hosts": 3}}, "tokenizer": {"digest": "0" * 64}}
    manifest = parse_manifest(sections | {"admission": {"mode": "token", "issuers": (issuer,)}}, "the test")
    for shown in (None, _of("acme")):  # an issuer shows none, and others look at what it is of
        assert domain_of(manifest, "code", role, shown) == 1
    assert domain_of(manifest, "law", role, _of("mary")) == 0
    with pytest.raises(ConfigError, match="Ask an issuer for an invite that names acme"):
        domain_of(manifest, "code", role, _of("mary"))
    with pytest.raises(ConfigError, match="Did you mean code"):
        domain_of(manifest, "cod", role, _of("mary"))


# --- before anybody is called ----------------------------------------------------------------------------------------


def test_check_data_says_what_there_is(tmp_path: Path, texts: Path, tokenizer: bytes) -> None:
    shard = build_shard(tmp_path / "shard", [TEXT], tokenizer)
    assert check_data(DataGiven(tmp_path / "shard")).words == f"a shard of {shard.tokens:,} tokens"
    assert check_data(DataGiven(texts)).words.startswith("3 text files, ")
    assert check_data(DataGiven(texts / "a.txt")).words.startswith("1 text file, ")


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (None, "no such path"),
        ({}, "It is empty"),
        ({"picture.png": b"x"}, "None of its files has such an ending"),
        ({"a.txt": b"", "b.txt": b""}, "Every one of them is empty"),
        ({"a.txt": b"caf\xe9"}, "another encoding"),
        ({"shard.json": b"{}"}, "a whole shard"),
        ({"shard.json": b"", "tokens.bin": b""}, "a whole shard"),
    ],
)
def test_check_data_unusable_is_explained(tmp_path: Path, made: dict[str, bytes] | None, words: str) -> None:
    data = tmp_path / "data"
    if made is not None:
        data.mkdir()
        for name, content in made.items():
            (data / name).write_bytes(content)
    with pytest.raises(ConfigError, match="(?i)" + words) as caught:
        check_data(DataGiven(data))
    assert caught.value.key == "--data"
    assert str(data) in str(caught.value.value)


def test_shard_is_refused_where_text_is_wanted_and_by_whom_it_is_read_is_said(tmp_path: Path, tokenizer: bytes) -> None:
    build_shard(tmp_path / "shard", [TEXT], tokenizer)
    with pytest.raises(ConfigError, match=r"it is a built shard.* join … --data"):
        source_files(tmp_path / "shard", "--text")


def test_check_data_altered_shard_is_refused(tmp_path: Path, tokenizer: bytes) -> None:
    build_shard(tmp_path / "shard", [TEXT], tokenizer)
    tokens = tmp_path / "shard" / "tokens.bin"
    data = bytearray(tokens.read_bytes())
    data[0] ^= 1
    tokens.write_bytes(data)
    with pytest.raises(ConfigError, match="sha256") as caught:
        check_data(DataGiven(tmp_path / "shard"))
    assert "swarm data build TEXT" in caught.value.remedy or "data build TEXT" in caught.value.remedy


def test_source_files_follow_links_to_files_and_not_to_directories(tmp_path: Path, texts: Path) -> None:
    (tmp_path / "outside.txt").write_text("linked")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "c.txt").write_text("not given")
    (texts / "link.txt").symlink_to(tmp_path / "outside.txt")
    (texts / "again.txt").symlink_to(texts / "a.txt")
    (texts / "directory").symlink_to(tmp_path / "elsewhere")
    names = [file.path.relative_to(texts).as_posix() for file in source_files(texts, "--data")]
    assert names == ["a.txt", "again.txt", "empty.rst", "inner/b.MD", "link.txt"]


# --- with the run's tokenizer ----------------------------------------------------------------------------------------


def test_shard_for_a_shard_of_the_runs_tokenizer_is_used_in_place(tmp_path: Path, tokenizer: bytes) -> None:
    build_shard(tmp_path / "shard", [TEXT], tokenizer)
    path = shard_for(DataGiven(tmp_path / "shard"), tokenizer, _manifest(tokenizer), tmp_path / "new", "me").path
    assert path == tmp_path / "shard"
    assert not (tmp_path / "new").exists()


def test_shard_for_another_tokenizer_says_both_and_how_to_rebuild(tmp_path: Path, tokenizer: bytes) -> None:
    other = train_tokenizer([TEXT.upper()], VOCABULARY)
    build_shard(tmp_path / "shard", [TEXT], other)
    with pytest.raises(Incompatible) as caught:
        shard_for(DataGiven(tmp_path / "shard"), tokenizer, _manifest(tokenizer), tmp_path / "new", "me")
    assert exit_code_of(caught.value) == EXIT_INCOMPATIBLE
    assert tokenizer_digest(tokenizer)[:16] in str(caught.value)
    assert tokenizer_digest(other)[:16] in str(caught.value)
    assert f"data build TEXT --tokenizer {tmp_path / 'tokenizer.json'}" in caught.value.remedy
    assert (tmp_path / "tokenizer.json").read_bytes() == tokenizer


def test_shard_for_records_is_made_of_their_texts_and_can_be_given_up(tmp_path: Path, tokenizer: bytes) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": TEXT}).encode() + b"\nbroken\n"))
    pattern = tmp_path / "*.gz"
    with pytest.raises(ConfigError, match="1 of 2 records .* with --data-allow-bad"):
        check_data(DataGiven(pattern))
    with pytest.raises(ConfigError, match="1 of 2 records .* with --data-allow-bad"):
        shard_for(DataGiven(pattern), tokenizer, _manifest(tokenizer), tmp_path / "new", "me")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl.gz"]
    given = DataGiven(pattern, allow_bad=True)
    assert "; 1 of 2 records (" in check_data(given).words
    assert f"left out: {tmp_path / 'a.jsonl.gz'}:2: it is no JSON: Expecting value" in check_data(given).words
    path = shard_for(given, tokenizer, _manifest(tokenizer), tmp_path / "new", "me").path
    assert Shard.open(path).manifest.documents == 1
    with pytest.raises(StateError, match="given up"):
        shard_for(given, tokenizer, _manifest(tokenizer), tmp_path / "other", "me", given_up=lambda: True)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.jsonl.gz", "new"]


def test_shard_for_nothing_is_the_built_in_text_in_each_peers_order(
    tmp_path: Path, tokenizer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = tuple(f"Document {n} of what comes with Python." for n in range(50))
    monkeypatch.setattr("peers.data.trainer_data.built_in_corpus", lambda: _Corpus(documents))
    manifest = _manifest(tokenizer)
    paths = [
        shard_for(None, tokenizer, manifest, tmp_path / str(n), seed).path for n, seed in enumerate(("a", "a", "b"))
    ]
    first, again, other = (Shard.open(path).manifest for path in paths)
    assert first.digest == again.digest
    assert first.digest != other.digest
    assert first.tokens == other.tokens


def test_data_opened_says_how_often_the_run_reads_it(tokenizer: bytes) -> None:
    manifest = _manifest(tokenizer)
    told = data_opened(manifest, 5)
    rows = manifest.batch.microbatch_size
    assert (told.microbatches, told.tokens) == (5, 5 * rows * manifest.model.context)
    fed = manifest.run.steps * manifest.step_microbatches / max(1, manifest.run.start_when.trainers)
    assert told.times * 5 == pytest.approx(fed)


def test_shard_for_too_little_text_leaves_nothing(tmp_path: Path, tokenizer: bytes) -> None:
    (tmp_path / "short.txt").write_text("Too short.")
    with pytest.raises(ConfigError, match="at least 33 tokens") as caught:
        shard_for(DataGiven(tmp_path / "short.txt"), tokenizer, _manifest(tokenizer), tmp_path / "new", "me")
    assert exit_code_of(caught.value) == EXIT_USAGE
    assert not (tmp_path / "new").exists()


def test_check_tokenizer_with_more_ids_than_the_model_is_refused(tokenizer: bytes) -> None:
    check_tokenizer(_manifest(tokenizer), tokenizer)
    with pytest.raises(ConfigError, match="at least 300, the tokenizer's") as caught:
        check_tokenizer(_manifest(tokenizer, vocab_size=299), tokenizer)
    assert caught.value.key == "model.vocab_size"


def test_check_tokenizer_of_another_run_is_incompatible(tokenizer: bytes) -> None:
    with pytest.raises(Incompatible):
        check_tokenizer(_manifest(tokenizer), train_tokenizer([TEXT.upper()], VOCABULARY))


# --- swarm data ------------------------------------------------------------------------------------------------------


def test_data_build_verify_and_ls_agree(
    tmp_path: Path, texts: Path, tokenizer: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer)
    out = tmp_path / "shards" / "mine"
    arguments = [str(texts), "--tokenizer", str(tmp_path / "tokenizer.json"), "--out", str(out)]
    assert run(["data", "build", *arguments, "--json"]) == EXIT_OK
    built = json.loads(capsys.readouterr().out)
    assert built.pop("keys") == {"unused": {}, "refused": {}, "special": 0, "more": 0}
    left_out = built.pop("left_out")
    assert (left_out["records"], left_out["size"], left_out["files_not_read"]) == (0, 0, {".png": 1})
    assert run(["data", "verify", str(out), "--json"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out) == built
    assert run(["data", "ls", str(tmp_path), "--json"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "shards": [built]}
    assert run(["data", "build", *arguments]) == EXIT_USAGE
    assert "--out" in capsys.readouterr().err


def test_data_ls_tells_a_broken_shard_and_an_empty_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "ls", str(tmp_path)]) == EXIT_OK
    assert "no shard" in capsys.readouterr().err
    (tmp_path / "shard.json").write_text("{}")
    assert run(["data", "ls", str(tmp_path)]) == EXIT_OK
    assert "broken" in capsys.readouterr().out
    assert run(["data", "verify", str(tmp_path)]) == EXIT_USAGE
    assert "DIR" in capsys.readouterr().err


class _Corpus:
    def __init__(self, documents: tuple[str, ...]) -> None:
        self.documents = documents
