"""Modules are not entangled, not in fragments and not too long, and what finds those that are is tested too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.house import (
    MAX_AMBIGUOUS_CLASSES,
    MAX_CIRCLES,
    MAX_FRAGMENTS,
    MAX_HEAVY_OBJECTS,
    MIN_MEAN_LINES,
    ambiguous_classes,
    circles,
    fragments,
    heavy_objects,
    main,
    mean_length,
    oversized,
)
from tests.harness.sources import Source, our_sources, parse


def toy(**changed: str) -> list[Source]:
    """A toy tree without circles in which some modules (dots written as ``__``) have other text."""
    texts = {
        "toy": "",
        "toy.ids": "class Id: ...\n",
        "toy.models": "from toy.models.gpt import Gpt as Gpt\n",
        "toy.models.gpt": "from toy.ids import Id\n",
        "toy.models.split": "from toy.ids import Id\nfrom ..models import gpt\n",
        "toy.app": "import json\nfrom toy import ids\nfrom toy.models import Gpt, split\n",
        "toy.__main__": "from toy.app import run\n",
    }
    texts |= {name.replace("__", "."): text for name, text in changed.items()}
    packages = {name.rpartition(".")[0] for name in texts}
    return [parse(name, text, package=name in packages) for name, text in texts.items()]


def names(found: list[list[Source]]) -> list[list[str]]:
    """Circles by the names of their modules."""
    return [[source.name for source in circle] for circle in found]


GPT_AND_SPLIT = ["toy.models.gpt", "toy.models.split"]


def test_circles_of_a_tree_without_any_finds_none() -> None:
    assert circles(toy()) == []
    assert circles([]) == []


@pytest.mark.parametrize(
    ("module", "text", "found"),
    [
        ("toy__models__gpt", "from toy.models.split import halve", [GPT_AND_SPLIT]),
        ("toy__models__gpt", "import toy.models.split", [GPT_AND_SPLIT]),
        ("toy__models__gpt", "from . import split", [GPT_AND_SPLIT]),
        ("toy__models__gpt", "def f():\n    from toy.models import split", [GPT_AND_SPLIT]),
        ("toy__models__gpt", "import importlib\nimportlib.import_module('toy.models.split')", [GPT_AND_SPLIT]),
        (
            "toy__models__gpt",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from toy.models.split import X",
            [GPT_AND_SPLIT],
        ),
        ("toy__ids", "from toy.app import x", [["toy.app", "toy.ids", "toy.models", *GPT_AND_SPLIT]]),
        ("toy__models__gpt", "from toy.models import Gpt", [["toy.models", "toy.models.gpt"]]),  # its own package
        ("toy__models__gpt", "from toy import ids, VERSION", []),  # an __init__ that imports nothing
        ("toy__models__gpt", "import toy.models.gpt", []),  # itself
    ],
)
def test_circles_of_a_changed_tree_name_who_is_in_them(module: str, text: str, found: list[list[str]]) -> None:
    assert names(circles(toy(**{module: text}))) == found


def test_circles_that_do_not_touch_are_several_the_largest_first() -> None:
    texts = {"a": "import b", "b": "import a", "c": "import d, a", "d": "import e", "e": "import c", "f": "import a"}
    assert names(circles([parse(name, text) for name, text in texts.items()])) == [["c", "d", "e"], ["a", "b"]]


def test_fragments_are_small_modules_that_one_other_imports() -> None:
    found = {(fragment.module.name, fragment.importer.name) for fragment in fragments(toy())}
    assert found == {("toy.models.split", "toy.app"), ("toy.app", "toy.__main__")}
    long = fragments(toy(toy__models__split="\n" * 60))
    assert "toy.models.split" not in {fragment.module.name for fragment in long}


def test_mean_length_counts_every_file() -> None:
    assert mean_length([parse("a", "x = 1\n" * 9), parse("b", "", package=True), parse("c", "\n" * 3)]) == 4
    assert mean_length([]) == 0


def test_ambiguous_classes_are_public_and_in_several_modules() -> None:
    texts = {"a": "class One: ...\nclass Two: ...\nclass _Own: ...", "b": "class Two: ...\nclass _Own: ..."}
    assert ambiguous_classes([parse(name, text) for name, text in texts.items()]) == {"Two": ["a", "b"]}


def test_heavy_objects_set_many_attributes_when_they_are_made() -> None:
    def made(name: str, count: int) -> str:
        names = ", ".join(f"self.a{index}" for index in range(count))
        return f"class {name}:\n    def __init__(self, x):\n        {names} = x\n        x.b = self.a0 = 1\n"

    assert heavy_objects([parse("toy", made("Light", 12) + made("Heavy", 13))]) == {"toy.Heavy": 13}


@pytest.mark.parametrize(
    ("head", "lines", "found"),
    [
        ('"""Tells."""\n', 401, ["401 lines without a stated reason"]),
        ('"""Tells."""\n# Over 400 lines: one table of all rules.\n', 401, []),
        ("# Over 400 lines: one table of all rules.\n", 600, []),
        ('"""Tells.\n\nOver 400 lines: one table of all rules.\n"""\n', 600, []),
        ('"""Tells."""\n# Over 400 lines:\n', 401, ["401 lines without a stated reason"]),
        ('"""Tells."""\nimport json\n# Over 400 lines: too late.\n', 401, ["401 lines without a stated reason"]),
        ('"""Tells."""\n# Over 400 lines: one table of all rules.\n', 601, ["601 lines"]),
        ('"""Tells."""\n', 400, []),
    ],
)
def test_oversized_lets_a_file_with_a_reason_be_longer_to_a_hard_stop(head: str, lines: int, found: list[str]) -> None:
    text = head + "x = 1\n" * (lines - head.count("\n"))
    assert [line.partition(": ")[2] for line in oversized([parse("toy", text)])] == found


def test_house_prints_the_figures_of_another_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "swarm").mkdir()
    (tmp_path / "swarm" / "a.py").write_text("import swarm.b\n")
    (tmp_path / "swarm" / "b.py").write_text("import swarm.a\n\n\nclass B: ...\n")
    main([str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 modules, 5 lines, 2.5 lines a module"
    assert "  swarm/a.py (1) ← swarm/b.py" in lines
    assert "  2 files: swarm/a.py, swarm/b.py" in lines
    main([str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["circles"] == [["swarm/a.py", "swarm/b.py"]]


def test_circles_of_our_sources_are_no_more_than_they_were() -> None:
    assert len(circles(our_sources())) <= MAX_CIRCLES, names(circles(our_sources()))


def test_fragments_of_our_sources_are_no_more_than_they_were() -> None:
    found = [f"{fragment.module.path} of {fragment.importer.path}" for fragment in fragments(our_sources())]
    assert len(found) <= MAX_FRAGMENTS, "\n".join(found)


def test_mean_length_of_our_sources_is_no_less_than_it_was() -> None:
    assert mean_length(our_sources()) >= MIN_MEAN_LINES


def test_classes_of_our_sources_have_one_meaning() -> None:
    found = ambiguous_classes(our_sources())
    assert len(found) <= MAX_AMBIGUOUS_CLASSES, found


def test_objects_of_our_sources_are_no_heavier_than_they_were() -> None:
    found = heavy_objects(our_sources())
    assert len(found) <= MAX_HEAVY_OBJECTS, found
