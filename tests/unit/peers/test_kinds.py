"""``swarm new --variants`` makes a run whose experts are for kinds of text that it learns."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from data_shards.build import build_shard
from data_shards.router import Router
from data_shards.tokenize import Tokenizer
from peers.cli.app import run
from peers.founding_files import Founded, load_foundation, make_run
from peers.manifest_file import render_manifest
from peers.options.foundation import Foundation
from swarm.config import load_manifest
from swarm.errors import ConfigError, Incompatible

TABLE = [";".join(str(random.Random(row).randint(0, 9999)) for row in range(at, at + 400)) for at in range(40)]
PROSE = [" ".join(random.Random(at).choices(["the", "owl", "sees", "a", "mouse"], k=400)) for at in range(40)]


def _founded(**said: Any) -> Founded:
    foundation = Foundation(**({"preset": "tiny", "variants": "2"} | said))
    return make_run(foundation, load_foundation(foundation))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("texts")
    for number, text in enumerate((*TABLE, *PROSE)):
        (directory / f"{number}.txt").write_text(text)
    return directory


def test_new_learns_kinds_from_text_and_a_histogram_and_its_file_names_the_same_run(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = _founded(text=(texts,))
    split, tokenizer = first.manifest.split, Tokenizer(first.files["tokenizer.json"])
    assert (split.variants, split.route_by, len(split.centres)) == ((1, 2), "text", 2)
    assert first.manifest.run.start_when.stage_hosts == 3
    found = [{Router(split.centres).choice_of(tokenizer.encode(text)) for text in kind} for kind in (TABLE, PROSE)]
    assert sorted(map(sorted, found)) == [[0], [1]]
    assert next(text for label, text in first.said if label == "kinds").startswith("2 of text, learnt from ")
    (tmp_path / "run.toml").write_text(render_manifest(first.manifest))
    assert load_manifest(tmp_path / "run.toml").run_id == first.manifest.run_id

    given, out, shard = tmp_path / "tokenizer.json", tmp_path / "mine.json", tmp_path / "shard"
    given.write_bytes(first.files["tokenizer.json"])
    build_shard(shard, [*TABLE, *PROSE], first.files["tokenizer.json"])
    assert run(["data", "histogram", str(shard), "--out", str(out), "--context", "128"]) == 0
    assert "40, 40" in capsys.readouterr().out
    other = _founded(text=(texts / "0.txt",), histogram=(out,), tokenizer=given)
    assert len(other.manifest.split.centres) == 2
    with pytest.raises(Incompatible, match="made with the run's tokenizer"):
        _founded(histogram=(out,))


def test_print_config_leaves_kinds_open(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["new", "--preset", "tiny", "--variants", "1,3", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "variants = [1, 3]" in printed
    assert "# centres has no value" in printed


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({}, "--text FILE of what will be trained on"),
        ({"variants": None, "histogram": (Path("a.json"),)}, "only where kinds of text are to be learnt"),
        ({"variants": "2,2,2"}, "2 numbers, one a stage"),
        ({"variants": "2", "route_by": "domain"}, "split.domains"),
        ({"histogram": (Path("/dev/null"),)}, "swarm data histogram"),
    ],
)
def test_experts_of_nothing_are_refused(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _founded(**said)
    assert words in str(caught.value)


def test_experts_of_domains_are_named_by_the_founder() -> None:
    split = _founded(domains=("legal", "code")).manifest.split
    assert (split.variants, split.route_by, split.domains, split.centres) == ((1, 2), "domain", ("legal", "code"), ())
