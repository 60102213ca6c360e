"""Which of these stories `make test` plays, and what whole swarms in one process need not wait for."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

TABLE = (
    "sync reproducible hosted narrow copies checkpoints everyone grid server hierarchy random push-sum tree auto "
    "kill-host kill-host-local kill-trainer kill-leader kill-leader-decided kill-founder kill-between-rounds "
    "kill-server kill-ring kill-stage kill-copy kill-many pause-short pause-trainer cut-few restart-host "
    "restart-host-bare twin join-host join-trainer join-donor-dies joiner-dies leave-host leave-founder"
)
QUICK = {
    "stories": ("names_of_what_is_quick", *(f"run_goes_on_exactly_whatever_happens[{name}]" for name in TABLE.split())),
    "admission": ("weights_are_those", "revoked_member"),
    "attacks": ("replica_that_hands_on_500_fold",),
    "churn": ("only_one_of_two", "order_to_leave"),
    "copying": ("copy_does_not_take_a_hostile_update",),
    "crash_points": ("life_that_is_not_whole",),
    "delink": ("hosts_part_with_one_record",),
    "donors": ("joiner_downloads",),
    "full_disk": ("disk_that_all_peers_share",),
    "going_back": ("run_goes_back_by_itself",),
    "last_holder": ("last_trainer_whose_copy_cannot_come",),
    "lineages": ("who_went_on_alone",),
    "local": ("replicas_mix_in_groups",),
    "moves": ("mover_keeps",),
    "overlap": ("trainer_that_is_given",),
    "partitions": ("link_that_works_one_way_only", "leader_cut_off"),
    "privacy": ("private_ends", "the_spy_sees"),
    "rescue": ("stage_whose_replicas_all_die",),
    "residuals": ("residual_of_a_replica_that_dies_is_lost_and_a_void_round_loses_none[together",),
    "routes": ("nothing_of_a_microbatch_goes_abroad_whoever", "without_own_routes", "organisation_that_lacks"),
    "stalled_leader": ("live_leader_that_stands_still_is_replaced_within_a_minute[never_closes",),
    "strategies": ("replica_that_only_dials_out",),
    "thin_links": ("round_of_150_s",),
    "trainer_trial": ("trainer_whose_gradients_are_turned_around",),
    "training": ("run_of_any_shape_counts_every_microbatch_once_everywhere[adapters]", "run_learns"),
    "trouble": ("members_refuse", "first_leaf"),
    "vetoes": ("rows_that_a_leader_changed",),
    "votes": ("majority_that_was_killed",),
}
"""By module, how names begin: of each kind of fault and promise what shows most in a second. The rest is for
`.ci/run`."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves out."""
    for item in items:
        if item.path.parent.name == "swarms" and not any(map(item.get_closest_marker, ("promise", "nemesis"))):
            quick = QUICK.get(item.path.stem.removeprefix("test_"), ())
            if not item.name.removeprefix("test_").startswith(quick):
                item.add_marker(pytest.mark.long)


@pytest.fixture(autouse=True)
def _no_time_for_disks_and_rubbish(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody reads these disks after a power cut, and what a story leaves is looked for once it is over: a quarter of
    its time otherwise."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    gc.disable()
    yield
    gc.enable()
