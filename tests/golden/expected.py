"""What is meant to differ from the base commit, each with the reason. Weights have no such table.

    EXPECTED = (Expected("events", "kill-*", "HopMoved", "abc1234: a hop that was moved is told once, by its trainer"),)

An entry is added by the commit that changes what it names, and goes when :data:`BASE` moves past that commit.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

BASE = "fda2cc9"
"""The commit that everything is compared with. ``names_of_base.txt`` has what is called what in it."""


@dataclass(frozen=True, slots=True)
class Expected:
    """A named difference. Stories and names are patterns as for files.

    ``events``: events of the kind ``name`` are left out of both sides' sequences; of ``*`` none is compared.
    ``counts``: another number of ``name`` is allowed, a kind of event or message; a lower one, a figure of the sweeps
    (story "sweeps") or a test function (story "tests"), of which there may be more anyway.
    """

    what: Literal["events", "counts"]
    story: str
    name: str
    reason: str

    def covers(self, what: str, story: str, name: str) -> bool:
        """Whether it names this difference."""
        return self.what == what and fnmatchcase(story, self.story) and fnmatchcase(name, self.name)


EXPECTED: tuple[Expected, ...] = (
    Expected(
        "counts",
        "tests",
        "test_scenario_is_kept",
        "62b8f8a: three scenarios a run, by commit; all are in `scenarios`",
    ),
    Expected(
        "counts",
        "tests",
        "test_group_stop_during_preload_is_immediate",
        "6fff45d: renamed, test_group_stop_during_preload_asks_nobody_and_waits_for_nothing",
    ),
    Expected(
        "counts",
        "tests",
        "test_readme_names_every_module_of_its_package",
        "9ab1fd8: test_page_names_every_module_of_its_folders_where_they_are_described asks for more",
    ),
    Expected(
        "counts",
        "tests",
        "test_request_with_a_wrong_envelope_is_a_violation",
        "fd8a617: an envelope is a head with fixed fields now, test_request_with_a_wrong_head_is_a_violation",
    ),
)
