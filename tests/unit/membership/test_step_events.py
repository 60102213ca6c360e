"""What a member tells of the steps that close: a rate only of those that it saw open."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from swarm.consensus.records import CloseRecord
from swarm.events import DeviceUsed, StepClosed
from swarm.ids import stage_part
from swarm.membership import step_events
from swarm.membership.rules import spec_of
from swarm.membership.status import PeerStatus
from swarm.membership.status_types import DeviceUse
from swarm.membership.step_events import StepEvents
from swarm.planning.costs import palm_part_flops
from swarm.planning.devices import DEVICES
from swarm.step.boundary_codecs import FIXED
from swarm.step.moves import MoveRules
from tests.harness.rigs.membership import COMMITTED, GENESIS, A, B, EventList, FakeClock, record
from tests.harness.rigs.peers import kept_run


class Told:
    """One peer's step events; ``close`` closes a step so many seconds after the one before."""

    def __init__(self) -> None:
        self.events, self.clock = EventList(), FakeClock()
        self.situation = PeerStatus(self.events)
        endpoint = SimpleNamespace(peer=A, statistics=lambda: SimpleNamespace(total=(0, 0)))
        self.gone: dict[str, str] = {}
        around = SimpleNamespace(
            manifest=kept_run().manifest,
            events=self.events,
            clock=self.clock,
            endpoint=endpoint,
            watch=SimpleNamespace(gone=self.gone),
            device=SimpleNamespace(torch_device=torch.device("cpu"), torch_devices=(torch.device("cpu"),)),
        )
        rules = SimpleNamespace(codecs=FIXED, moves=MoveRules())
        run = SimpleNamespace(around=around, situation=self.situation, rules=rules)
        self.steps = StepEvents(cast(Any, run))

    def close(self, closed: CloseRecord, *, took_part: bool, after_s: float = 2.0) -> float | None:
        """The rate that the peer shows then."""
        self.clock.now += after_s
        self.steps.closed(closed, took_part=took_part)
        return self.situation.tokens_per_s


def test_peer_that_joins_shows_no_rate_of_a_step_that_was_open_before_it_came() -> None:
    told = Told()
    observed = record(record(GENESIS))
    assert told.close(observed, took_part=False) is None
    naming = record(observed)
    assert told.close(naming, took_part=False, after_s=0.001) is None  # it catches up: these come at once
    joined = record(naming)
    assert told.close(joined, took_part=True, after_s=0.001) is None
    after = record(joined)
    assert told.close(after, took_part=True) == after.tokens / 2.0
    assert [(event.step, event.whole) for event in told.events.of(StepClosed)] == [(4, False), (5, True)]
    assert told.situation.loss == after.loss


@pytest.mark.parametrize(("gpu", "peak"), [("", None), ("NVIDIA L4", DEVICES["l4"].float32)])
def test_device_use_counts_the_microbatches_that_went_through_this_peer(
    monkeypatch: pytest.MonkeyPatch, gpu: str, peak: float | None
) -> None:
    monkeypatch.setattr(step_events, "device_name", lambda device: gpu)
    told = Told()
    told.close(GENESIS, took_part=False)
    first = record(GENESIS)
    told.close(first, took_part=True)
    [event] = told.events.of(DeviceUsed)
    model = kept_run().manifest.model
    mine = sum(one.route[0] == A for one in first.committed)
    spec = spec_of(kept_run().manifest, stage_part(0))
    flops = (
        mine * kept_run().manifest.batch.microbatch_size * model.context * palm_part_flops(model, spec, model.context)
    )
    assert (event.part, event.microbatches) == ("stage-0", mine)
    assert event.flops_per_s == flops / 2.0 > 0
    assert event.mfu == (None if peak is None else flops / 2.0 / peak)
    assert told.situation.device_use == DeviceUse(flops_per_s=event.flops_per_s, mfu=event.mfu)


def test_turnout_of_one_step_says_nothing_of_the_next() -> None:
    told = Told()
    told.close(GENESIS, took_part=False)
    told.steps.left_out(1, {B: "it fails"})
    first = record(GENESIS)
    told.close(first, took_part=True)
    told.close(record(first).model_copy(update={"committed": COMMITTED[:1], "absent": (B,)}), took_part=True)
    assert told.situation.averaging[1].why == {"b": "left out by the step's leader"}
