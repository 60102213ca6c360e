"""The pages of the reference say what the code says."""

from __future__ import annotations

import pytest

from tests.harness.reference import FOLDER, pages

PAGES = pages()


def test_reference_has_no_other_pages() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_page_is_what_the_code_says(page: str) -> None:
    assert (FOLDER / page).read_text(encoding="utf-8") == PAGES[page], "python -m tests.harness.reference"
