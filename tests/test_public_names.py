"""Everything public says what it gives."""

from __future__ import annotations

from tests.harness.house import undocumented
from tests.harness.sources import our_sources, parse

TOY = '''
def told():
    """Something."""

def untold(): ...

def _private(): ...

class Told:
    """Something."""

    @property
    def told(self):
        """Something."""

    @told.setter
    def told(self, value): ...

    def untold(self): ...

    def __init__(self): ...

if True:
    class Untold: ...
'''


def test_undocumented_in_a_toy_finds_what_is_public_and_silent() -> None:
    found = [line.rpartition(" ")[2] for line in undocumented([parse("toy", TOY)])]
    assert found == ["module", "untold", "Told.untold", "Untold"]


def test_undocumented_in_an_empty_package_finds_nothing() -> None:
    assert undocumented([parse("toy", "", package=True), parse("toy._private", "x = 1")]) == []


def test_undocumented_in_our_sources_finds_nothing() -> None:
    assert undocumented(our_sources()) == []
