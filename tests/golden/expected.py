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


_OF_TWO_TRANSFERS = {
    "test_snapshot_survives_its_bytes": "a state has no bytes of its own any more; test_checkpoint_round_trip_is_exact",
    "test_bytes_with_a_flipped_bit_are_refused": "test_bit_flipped_anywhere_is_found, in a file",
    "test_bytes_cut_short_are_refused": "test_file_cut_anywhere_is_found_without_reading_the_tensors",
    "test_donor_that_has_another_step_or_part_says_so": "test_donor_that_has_another_step_digest_or_part_says_so",
    "test_download_from_a_donor_that_lies_about_the_hashes_asks_it_for_nothing": "it claims neither size nor digest",
    "test_shelf_offers_lists_records_and_files": "test_shelf_offers_lists_records_and_the_chunks_of_the_state_itself",
    "test_fetch_part_larger_than_the_model_is_not_begun": "test_fetch_part_of_another_model_is_not_begun",
    "test_fetch_part_keeps_what_came_whatever_size_another_claims": "the size follows from the model, nobody claims it",
    "test_fetch_part_keeps_two_begun_files_at_most_whatever_sizes_are_claimed": (
        "test_fetch_part_keeps_two_begun_files_at_most_and_none_that_nobody_proved"
    ),
    "test_fetch_part_throws_away_what_a_liar_sent_and_asks_another": (
        "test_fetch_part_keeps_what_a_liar_sent_rightly_and_asks_another_for_the_rest"
    ),
    "test_fetch_part_whose_disk_cannot_be_read_keeps_what_came": (
        "test_fetch_part_whose_disk_fails_says_so_and_keeps_what_came"
    ),
}
"""Tests of what went when states and checkpoints came to be transferred alike, and what asks for it now."""

_OF_OTHER_SETTINGS = {
    "test_join_stage_that_the_run_does_not_have_is_wrong_usage": (
        "renamed, test_join_stage_that_the_run_does_not_have_is_wrong_usage_of_who_named_it"
    ),
    "test_listen_on_a_taken_port_is_about_the_option_that_was_given": (
        "renamed, test_port_that_is_taken_is_about_the_option_that_was_given"
    ),
    "test_listen_on_port_is_short_for_all_interfaces": (
        "renamed, test_port_is_short_for_all_interfaces_and_wins_over_a_variable"
    ),
}
"""Tests that were renamed when an option came to be written once."""

_OF_SOURCES = {
    "test_read_corpus_directory_is_refused": "test_read_corpus_takes_a_directory_and_the_texts_of_records",
    "test_text_files_links_lead_nowhere_outside": "test_source_files_follow_links_to_files_and_not_to_directories",
    "test_directory_of_links_to_files_elsewhere_is_no_empty_one": (
        "test_directory_of_links_to_files_elsewhere_is_read"
    ),
}
"""Tests of what was refused of sources before they could be directories of links, as data sets are stored."""

_OF_COPYING = ("copies", "kill-copy", "kill-stage")
_ENDS_APART = "stage hosts keep no copy of private ends: the founder has the one there is, and others' copies move"
_OF_COPIES = (
    *(Expected("events", story, "CopyHeld", _ENDS_APART) for story in _OF_COPYING),
    Expected("events", "kill-copy", "DonorDropped", f"{_ENDS_APART}: other copies lose a donor with the one that dies"),
    Expected("counts", "kill-copy", "DonorDropped", f"{_ENDS_APART}: other copies lose a donor with the one that dies"),
    *(
        Expected("counts", story, name, _ENDS_APART)
        for story in _OF_COPYING
        for name in ("CopyHeld", "* observe/1/*", "* state/1/*")
    ),
)
"""What tells of copies, in the stories that keep some."""

EXPECTED: tuple[Expected, ...] = (
    Expected(
        "events",
        "*hosted*",
        "(record)",
        "the roster says when who holds no part has worked last, for only then it votes",
    ),
    Expected(
        "events",
        "kill-stage",
        "*",
        "the voters are asked whether the part is lost, and the founder, who holds nothing, is none of them any more",
    ),
    *(
        Expected(
            what,
            "cut-few",
            name,
            "the founder, who holds nothing, is no voter any more: three of six are left, and are not enough",
        )
        for what, name in (("events", "*"), ("counts", "QuorumLost"), ("counts", "QuorumBack"))
    ),
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
    *(Expected("counts", "tests", name, f"3263914: {why}") for name, why in _OF_TWO_TRANSFERS.items()),
    *(
        Expected("counts", "tests", name, f"an option is written once: {why}")
        for name, why in _OF_OTHER_SETTINGS.items()
    ),
    *(Expected("counts", "tests", name, f"sources of any kind: {why}") for name, why in _OF_SOURCES.items()),
    *_OF_COPIES,
    Expected(
        "counts",
        "tests",
        "test_part_graph_from_before_a_swap_gives_the_old_weights_gradient",
        "a step is taken in place, and nothing goes back to one that is closed: "
        "test_part_graph_from_before_a_swap_is_refused",
    ),
)
