"""A package's README leads to each of its modules, and to none that is gone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.sources import ROOT

NAMED = re.compile(r"`(\w+\.py)`")
READMES = [path for top in ("swarm", "peers", "data_shards") for path in sorted((ROOT / top).rglob("README.md"))]


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_readme_names_every_module_of_its_package(readme: Path) -> None:
    modules = {path.name for path in readme.parent.glob("*.py") if not path.name.startswith("_")}
    named = set(NAMED.findall(readme.read_text(encoding="utf-8")))
    assert modules - named == set()
    everywhere = {
        path.name for top in ("swarm", "peers", "data_shards", "tests") for path in (ROOT / top).rglob("*.py")
    }
    assert named - everywhere == set()
