"""Pages lead to all modules, in rows of their folder, and to nothing that is gone.

A page is a package's README, or the engineers' map for the modules of ``swarm`` that belong to no package. It names the
modules of its own folder, and those of each subfolder without a page in rows that begin with the subfolder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.sources import PACKAGES, ROOT

NAMED = re.compile(r"`(\w+\.py)`")
HEADING = re.compile(r"#+ .*")
ROW = re.compile(r"\| (?:`([\w/]+)/`: )?([^|]*) \|")
LINK = re.compile(r"(?:\]\(|\bsrc=\")([^)\s\"]+)")
PATH = re.compile(r"`((?:swarm|peers|data_shards|tests)/[\w./-]*\w)`")

MAP = ROOT / "docs" / "engineer" / "map.md"
READMES = [page for package in PACKAGES for page in sorted((ROOT / package).rglob("README.md"))]
PAGES = [MAP, *READMES]
LONGEST = 60
"""Lines of a package's page: what is longer belongs into the manual."""
LINKING = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *READMES,
    *sorted((ROOT / "docker").rglob("README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "tests").rglob("README.md")),
]

TOY_PAGE = """# toy

`a.py` is the page to read; a shell would say:

```
# no heading here
```

| files | task |
|---|---|
| `b.py`, `d.py` | as `elsewhere.py` has it |
| `inner/`: `c.py` | c |

## Why
"""


def rows(text: str) -> dict[str, list[str]]:
    """Return the modules that a page's rows begin with, by the subfolder that they name, "" for the page's own."""
    found: dict[str, list[str]] = {"": []}
    for line in text.splitlines():
        if row := ROW.match(line):
            found.setdefault(row[1] or "", []).extend(NAMED.findall(row[2]))
    return found


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as they are made of their words."""
    headings = [line.lstrip("#").strip().lower() for line in text.splitlines() if HEADING.fullmatch(line)]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def modules(folder: Path) -> set[str]:
    """Return the names of a folder's modules; those that begin with ``_`` need no description."""
    return {path.name for path in folder.glob("*.py") if not path.name.startswith("_")}


def home(page: Path) -> Path:
    """Return the folder whose modules a page names."""
    return ROOT / "swarm" if page == MAP else page.parent


def covered(page: Path) -> Iterator[str]:
    """Return the folders that a page has to describe, relative to its own."""
    yield ""
    if page == MAP:
        return
    for below in sorted(path for path in page.parent.rglob("*") if path.is_dir()):
        owner = next(folder for folder in (below, *below.parents) if (folder / "README.md").exists())
        if owner == page.parent and modules(below):
            yield below.relative_to(page.parent).as_posix()


def name(page: Path) -> str:
    """Return a page's path, for people."""
    return page.relative_to(ROOT).as_posix()


def test_rows_of_a_toy_page_go_by_the_folder_that_they_begin_with() -> None:
    assert rows(TOY_PAGE) == {"": ["b.py", "d.py"], "inner": ["c.py"]}


def test_anchors_of_a_toy_page_are_its_headings() -> None:
    assert {"toy", "why"} <= anchors(TOY_PAGE)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_page_names_the_modules_of_its_folders_in_their_rows_and_no_others(page: Path) -> None:
    found = rows(page.read_text(encoding="utf-8"))
    there = {folder: modules(home(page) / folder) for folder in covered(page)}
    missing = {folder: sorted(names - set(found.get(folder, []))) for folder, names in there.items()}
    foreign = {folder: sorted(set(names) - modules(home(page) / folder)) for folder, names in found.items()}
    assert {folder: names for folder, names in missing.items() if names} == {}, "not named"
    assert {folder: names for folder, names in foreign.items() if names} == {}, "not there"


@pytest.mark.parametrize("page", READMES, ids=name)
def test_package_s_page_is_one_page(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= LONGEST


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_page_names_no_module_that_is_nowhere(page: Path) -> None:
    everywhere = {path.name for top in (*PACKAGES, "tests") for path in (ROOT / top).rglob("*.py")}
    assert set(NAMED.findall(page.read_text(encoding="utf-8"))) - everywhere == set()


def test_every_folder_with_modules_has_a_page() -> None:
    described = {home(page) / folder for page in PAGES for folder in covered(page)}
    folders = {path.parent for top in PACKAGES for path in (ROOT / top).rglob("*.py")}
    assert sorted(name(folder) for folder in folders - described if modules(folder)) == []


@pytest.mark.parametrize("page", LINKING, ids=name)
def test_links_and_paths_of_a_page_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    lost = [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    for link in LINK.findall(text):
        if re.match(r"\w+:", link):
            continue
        target, _, anchor = link.partition("#")
        there = page.parent / target if target else page
        if not there.exists() or (anchor and anchor not in anchors(there.read_text(encoding="utf-8"))):
            lost.append(link)
    assert lost == []


def test_promises_of_the_tests_page_are_those_that_tests_are_marked_with() -> None:
    rows = re.findall(
        r"^\| (.+?) \| `(tests/\S+)` \|$", (ROOT / "tests" / "README.md").read_text(encoding="utf-8"), re.M
    )
    marked = [
        (promise, str(path.relative_to(ROOT)))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for promise in re.findall(
            r"^(?:@|Test\w+ = )pytest\.mark\.promise\(\"(.+?)\"\)", path.read_text(encoding="utf-8"), re.M
        )
    ]
    assert sorted(marked) == sorted((promise, test.partition("::")[0]) for promise, test in rows)
    for _, test in rows:
        file, _, name = test.partition("::")
        assert re.search(rf"^(?:(?:async )?def )?{name}\b", (ROOT / file).read_text(encoding="utf-8"), re.M), test
