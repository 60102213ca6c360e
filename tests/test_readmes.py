"""Pages lead to all modules, in the section of their folder, and to nothing that is gone.

A page is a package's README, or ``swarm/ARCHITECTURE.md`` for the modules that belong to no package. It names the
modules of its own folder, and those of each subfolder without a page, in a section whose heading names the subfolder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.sources import PACKAGES, ROOT

NAMED = re.compile(r"`(\w+\.py)`")
HEADING = re.compile(r"#+ .*")
FOLDER = re.compile(r"`([\w/]+)/`")
FIRST_CELL = re.compile(r"\| ([^|]*) \|")
LINK = re.compile(r"(?:\]\(|\bsrc=\")([^)\s\"]+)")
PATH = re.compile(r"`((?:swarm|peers|data_shards|tests)/[\w./-]*\w)`")

PAGES = [
    ROOT / "swarm" / "ARCHITECTURE.md",
    *(page for package in PACKAGES for page in sorted((ROOT / package).rglob("README.md"))),
]
LINKING = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *PAGES,
    *sorted((ROOT / "docker").rglob("README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "tests" / "README.md",
]

TOY_PAGE = """# toy

`a.py` is the page to read; a shell would say:

```
# `inner/` is no heading here
```

| file | what |
|---|---|
| `b.py` | as `elsewhere.py` has it |

## `inner/`: below

| `c.py` | c |

## Why

See `other.py`.
"""


def sections(text: str) -> dict[str, list[str]]:
    """Return the lines of a page by the subfolder that their heading names, "" for the page's own folder."""
    found: dict[str, list[str]] = {"": []}
    folder, code = "", False
    for line in text.splitlines():
        if line.startswith("```"):
            code = not code
        elif not code and HEADING.fullmatch(line):
            named = FOLDER.search(line)
            folder = named[1] if named else ""
            found.setdefault(folder, [])
        elif not code:
            found[folder].append(line)
    return found


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as they are made of their words."""
    headings = [line.lstrip("#").strip().lower() for line in text.splitlines() if HEADING.fullmatch(line)]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def modules(folder: Path) -> set[str]:
    """Return the names of a folder's modules; those that begin with ``_`` need no description."""
    return {path.name for path in folder.glob("*.py") if not path.name.startswith("_")}


def covered(page: Path) -> Iterator[str]:
    """Return the folders that a page has to describe, relative to its own."""
    yield ""
    if page.name != "README.md":
        return
    for below in sorted(path for path in page.parent.rglob("*") if path.is_dir()):
        owner = next(folder for folder in (below, *below.parents) if (folder / "README.md").exists())
        if owner == page.parent and modules(below):
            yield below.relative_to(page.parent).as_posix()


def name(page: Path) -> str:
    """Return a page's path, for people."""
    return page.relative_to(ROOT).as_posix()


def test_sections_of_a_toy_page_go_by_the_folder_in_the_heading() -> None:
    found = {folder: NAMED.findall("\n".join(lines)) for folder, lines in sections(TOY_PAGE).items()}
    assert found == {"": ["a.py", "b.py", "elsewhere.py", "other.py"], "inner": ["c.py"]}


def test_anchors_of_a_toy_page_are_its_headings() -> None:
    assert {"toy", "inner-below", "why"} <= anchors(TOY_PAGE)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_page_names_every_module_of_its_folders_where_they_are_described(page: Path) -> None:
    found = sections(page.read_text(encoding="utf-8"))
    missing = {
        folder: sorted(modules(page.parent / folder) - set(NAMED.findall("\n".join(found.get(folder, [])))))
        for folder in covered(page)
    }
    assert {folder: names for folder, names in missing.items() if names} == {}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_page_describes_no_module_that_is_not_in_its_folder(page: Path) -> None:
    for folder, lines in sections(page.read_text(encoding="utf-8")).items():
        rows = [row[1] for line in lines if (row := FIRST_CELL.match(line))]
        there = {path.name for path in (page.parent / folder).glob("*.py")}
        assert set(NAMED.findall("\n".join(rows))) - there == set(), folder or "own folder"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_page_names_no_module_that_is_nowhere(page: Path) -> None:
    everywhere = {path.name for top in (*PACKAGES, "tests") for path in (ROOT / top).rglob("*.py")}
    assert set(NAMED.findall(page.read_text(encoding="utf-8"))) - everywhere == set()


def test_every_folder_with_modules_has_a_page() -> None:
    described = {page.parent / folder for page in PAGES for folder in covered(page)}
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
