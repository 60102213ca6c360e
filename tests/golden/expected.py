"""What is meant to differ from the base commit, each with the reason. Weights have no such table.

    EXPECTED = (Expected("events", "kill-*", "HopMoved", "abc1234: a hop that was moved is told once, by its trainer"),)

An entry is added by the commit that changes what it names, and goes when :data:`BASE` moves past that commit.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

BASE = "7257448"
"""The commit that everything is compared with: the last that changed what peers do, whose trainers choose replicas by
compute and link. ``names_of_base.txt`` has what is called what in it."""


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
        "counts", "tests", "test_find_run_nobody_answers_names_every_address",
        "ef8fbd38: errors name one address of many; the test says so in its name",
    ),
    Expected(
        "counts", "tests", "test_new_whose_run_has_begun_comes_back_as_a_stage_host",
        "24027831: a founder comes back as what it was; the test says so in its name",
    ),
    *(
        Expected("counts", "tests", name, "f4c4074d: replaced by those of the decision in test_comeback.py")
        for name in (
            "test_home_of_somebody_else_has_no_past",
            "test_past_of_a_founder_whose_run_had_not_begun_is_its_manifest",
        )
    ),
    *(
        Expected(what, "checkpoints", "CheckpointWritten",
                 "c05ea21f: a peer writes at each tenth of the run, whatever it is told beside that")
        for what in ("events", "counts")
    ),
    Expected(
        "events", "leave-*", "Draining",
        "the commit of this line: by when a peer ends that leaves is a field of the event, and no longer in its reason",
    ),
)  # fmt: skip
