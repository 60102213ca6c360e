"""Nobody but ``swarm.models`` knows a parameter of a model by name, and what finds who does is tested too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

import pytest

from swarm.models.gpt_config import GptConfig
from swarm.models.registry import family_of
from tests.harness.layers import imports
from tests.harness.sources import ROOT, Source, our_sources, parse, read_tree

HOME = "swarm.models"
NO_MODELS = "data_shards"
"""Sees none: what is called ``weight`` there is a mark in other people's data."""
KNOWN_AT_HOME = ("swarm.models.gpt", "swarm.models.gpt_family")
"""Modules of one family. Its config is no secret: it is a section of the manifest."""

# A parameter's whole name, or the beginning of one as it is compared with: "embedding.", "blocks.3.".
_ENDING = re.compile(r"\w\.(weight|bias)$|^\.?(weight|bias)$")


def tellers(sources: Iterable[Source], roots: Iterable[str]) -> Iterator[str]:
    """Yield where a string is a parameter's name or begins like one, or a family's own module is imported."""
    beginning = re.compile(rf"^({'|'.join(sorted(roots))})\.(\d.*)?$")
    for source in sources:
        if source.name.startswith((f"{HOME}.", f"{NO_MODELS}.")):
            continue
        for item in imports(source):
            if any(item.target == known or item.target.startswith(known + ".") for known in KNOWN_AT_HOME):
                yield f"{source.path}: imports {item.target}"
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Constant) or not isinstance(text := node.value, str):
                continue
            if _ENDING.search(text) or beginning.match(text):
                yield f"{source.path}:{node.lineno}: {text!r}"


def roots() -> set[str]:
    """The first words of our own family's parameters."""
    family = family_of(GptConfig())
    return {name.partition(".")[0] for name, _ in family.build(family.whole).named_parameters()}


def test_roots_are_the_pieces_of_the_whole_model() -> None:
    assert roots() == {"embedding", "blocks", "norm", "head"}


@pytest.mark.parametrize(
    "text",
    [
        "decay = name != 'embedding.weight'",
        "name.startswith(('norm.', 'head.'))",
        "name.startswith('blocks.3.')",
        "f'{layer}.weight'",
        "from swarm.models.gpt import Stage",
        "def f():\n    import swarm.models.gpt_family",
    ],
)
def test_tellers_of_a_toy_are_found(text: str) -> None:
    assert len(list(tellers([parse("toy", text)], roots()))) in (1, 2)
    assert list(tellers([parse("swarm.models.toy", text)], roots())) == []


@pytest.mark.parametrize("text", ["'the norm. And the head.'", "'heads'", "from swarm.models.gpt_config import X"])
def test_tellers_of_a_toy_are_not_those_who_only_say_a_word(text: str) -> None:
    assert list(tellers([parse("toy", text)], roots())) == []


def test_tellers_there_are_none_among_our_sources_and_the_harness() -> None:
    assert list(tellers([*our_sources(), *read_tree(ROOT, ["tests/harness"])], roots())) == []
