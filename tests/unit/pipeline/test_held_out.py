"""What a trainer measures beside its steps, as people are shown it."""

from __future__ import annotations

from typing import Any, cast

from swarm.pipeline.trainer.held_out import HeldOut, HeldOutRows


def test_what_was_measured_of_steps_before_the_run_went_back_counts_no_more() -> None:
    rows = HeldOutRows(source=cast(Any, None), every=5, newest=(15, 2.5))
    HeldOut(cast(Any, None), rows).open_step(17, "after")
    assert rows.newest == (15, 2.5)
    HeldOut(cast(Any, None), rows).open_step(12, "after")
    assert rows.newest is None
