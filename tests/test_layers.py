"""Imports go downwards only (see ``[tool.layers]`` in pyproject.toml), and the test that says so is tested too."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from tests.harness.layers import Rules, load_rules, violations
from tests.harness.sources import ROOT, Source, our_sources, parse

TOY_RULES = Rules(
    order=(
        ("toy.ids",),
        ("toy.models", "toy.codecs"),
        ("toy.network.protocols",),
        ("toy.network", "private"),
        ("app",),
    ),
    sideways={"toy.codecs": ["toy.models"]},
    sees={"private": ["toy.ids"]},
    foreign={"hivemind": ["toy.network"], "pickle": []},
    banned={"time.time": ["toy.ids"], "torch.load": []},
)

GUARDED = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from {} import X"


def toy(**changed: str) -> list[str]:
    """Violations of a toy tree in which some modules (dots written as ``__``) have other text."""
    texts = {
        "toy": "",
        "toy.ids": "import time\n\ndef now():\n    return time.time()\n",
        "toy.models": "from toy.ids import now\n",
        "toy.models.gpt": "from toy.models import split\nfrom . import split\n",
        "toy.models.split": "",
        "toy.codecs": "from toy.models.split import x\n",
        "toy.network": "",
        "toy.network.protocols": "from toy import ids\n",
        "toy.network.endpoint": "import hivemind\nfrom toy.network.protocols import x\n",
        "private": "",
        "private.source": "from toy.ids import now\nfrom private import tokens\n",
        "private.tokens": "",
        "app": "",
        "app.node": "from private.source import x\nfrom toy.network import endpoint\n",
    }
    texts |= {name.replace("__", "."): text for name, text in changed.items()}
    packages = {name.rpartition(".")[0] for name in texts}
    sources: list[Source] = [parse(name, text, package=name in packages) for name, text in texts.items()]
    return violations(sources, TOY_RULES)


def test_layers_of_a_sound_tree_find_nothing() -> None:
    assert toy() == []


@pytest.mark.parametrize(
    ("module", "text", "told"),
    [
        ("toy__ids", "from toy.models import gpt", "toy.ids (layer 0) imports toy.models.gpt (layer 1)"),
        ("toy__ids", "def f():\n    import toy.network.endpoint", "imports toy.network.endpoint (layer 3)"),
        ("toy__models__gpt", "from toy.codecs import x", "toy.models.gpt (layer 1) imports toy.codecs (layer 1)"),
        ("toy__models__gpt", "from ..network import endpoint", "imports toy.network.endpoint (layer 3)"),
        ("toy__network", "from toy.network import endpoint", "toy.network (layer 2) imports"),
        ("toy__network__protocols", "from .endpoint import x", "imports toy.network.endpoint (layer 3)"),
        ("toy__network__endpoint", "import private.source", "imports private.source (layer 3)"),
        ("private__source", "import toy.models.split", "private sees only toy.ids"),
        ("toy__models__gpt", "import hivemind.p2p", "toy.models.gpt imports hivemind, which only toy.network may"),
        ("app__node", "import importlib\nimportlib.import_module('hivemind')", "app.node imports hivemind"),
        ("app__node", "from pickle import dumps", "app.node imports pickle, which only nobody may"),
        ("app__node", "import time as t\nt.time()", "app.node uses time.time"),
        ("app__node", "from time import time\ntime()", "app.node uses time.time"),
        ("app__node", "import torch\ntorch.load('x')", "app.node uses torch.load"),
        ("app__node", "import random\nrandom.shuffle([])", "app.node uses random.shuffle"),
        ("app__node", "import numpy as np\nnp.random.rand(3)", "app.node uses numpy.random.rand"),
        ("app__node", "import random\nrandom.Random(1).shuffle([])", ""),
        ("app__node", "import numpy as np\nnp.random.default_rng(1).random()", ""),
        ("toy__lost", "import toy.ids", "toy.lost has no layer in pyproject.toml"),
        ("toy__models__gpt", GUARDED.format("toy.codecs"), ""),
        ("toy__ids", GUARDED.format("toy.models"), "imports toy.models"),
    ],
)
def test_layers_of_a_changed_tree_tell_what_broke(module: str, text: str, told: str) -> None:
    found = toy(**{module: text})
    if told:
        assert any(told in line for line in found), found
    else:
        assert found == []


def test_layers_of_our_sources_hold() -> None:
    assert violations(our_sources(), load_rules(ROOT / "pyproject.toml")) == []


_COMMANDS = "chaos|ckpt|data|doctor|drain|history|id|invite|join|new|peers|quickstart|sample|status"
_COMMAND_LINE = re.compile(rf"\bswarm ({_COMMANDS})\b|(?<![\w-])--[a-z]")


def test_layers_of_the_library_name_no_command() -> None:
    found = [
        f"{source.path}:{node.lineno}: {node.value!r}"
        for source in our_sources()
        if source.name.startswith("swarm")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _COMMAND_LINE.search(node.value)
    ]
    assert found == []


def test_layers_of_the_pretend_world_do_without_hivemind() -> None:
    script = "import sys, swarm.config, swarm.network.protocols, swarm.sim.network; print('hivemind' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"


def test_layers_of_our_packages_are_packages() -> None:
    folders = {source.path.parent for source in our_sources()}
    without = sorted(str(folder) for folder in folders if not (ROOT / folder / "__init__.py").exists())
    assert without == []
    assert not (ROOT / "docker" / "__init__.py").exists(), "it would shadow docker-py"
