"""Modules are not entangled and names have one meaning, and what finds those that are is tested too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.house import ambiguous_classes, circles, code_lines, main
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


def test_ambiguous_classes_are_public_and_in_several_modules() -> None:
    texts = {"a": "class One: ...\nclass Two: ...\nclass _Own: ...", "b": "class Two: ...\nclass _Own: ..."}
    assert ambiguous_classes([parse(name, text) for name, text in texts.items()]) == {"Two": ["a", "b"]}


def test_code_lines_are_those_without_docstrings_comments_and_emptiness() -> None:
    head = '"""Tells."""\n\n# Why.\nx = """one\ntwo"""\n\n\n'
    text = head + 'def f(\n    a,  # of f\n):\n    """Tells\n    more.\n    """\n    return a\n'
    assert code_lines(parse("toy", text)) == 6
    assert code_lines(parse("toy", "")) == 0


def test_house_prints_the_figures_of_another_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "swarm" / "deep" / "down").mkdir(parents=True)
    (tmp_path / "swarm" / "a.py").write_text("import swarm.b\n")
    (tmp_path / "swarm" / "b.py").write_text("import swarm.a\n\n\nclass B: ...\n")
    (tmp_path / "swarm" / "deep" / "down" / "c.py").write_text("# Nothing.\n")
    main([str(tmp_path)])
    assert [line.split() for line in capsys.readouterr().out.splitlines()[:4]] == [
        ["modules", "lines", "code", "classes"],
        ["2", "5", "3", "1", "swarm"],
        ["1", "1", "0", "0", "swarm.deep"],
        ["3", "6", "3", "1", "all"],
    ]
    main([str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["circles"] == [["swarm/a.py", "swarm/b.py"]]


def test_circles_of_our_sources_are_none() -> None:
    assert names(circles(our_sources())) == []


def test_classes_of_our_sources_have_one_meaning() -> None:
    assert ambiguous_classes(our_sources()) == {}
