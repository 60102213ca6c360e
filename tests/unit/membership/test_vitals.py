"""What members say about themselves, and who asks them."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from swarm.device import MeteredDevice
from swarm.errors import PeerError, Unreachable
from swarm.events import NullSink
from swarm.ids import PeerId
from swarm.membership.status import PeerStatus
from swarm.membership.vitals import FRESH_S, MAX_LINKS, Vitals, VitalsBoard, VitalsService
from swarm.network.protocols import LinkStatistics
from swarm.pipeline.activity import PipelineActivity, Probation
from tests.harness.rigs.clocks import FakeClock
from tests.harness.rigs.common import InlineDevice

ME, OTHER, SILENT = PeerId("12D3KooWme"), PeerId("12D3KooWother"), PeerId("12D3KooWquiet")


class _Endpoint:
    """Counts bytes, and asks others, of whom one is silent."""

    peer = ME

    def __init__(self, clock: FakeClock, said: Vitals | None = None) -> None:
        self.clock, self.said, self.asked = clock, said, list[PeerId]()
        self.failure: PeerError | None = None
        self.traffic = LinkStatistics(bytes_sent={OTHER: 70, SILENT: 1}, bytes_received={OTHER: 5})

    def statistics(self) -> LinkStatistics:
        return self.traffic

    async def call(self, peer: PeerId, *question: Any, timeout_s: float) -> tuple[Vitals, bytes]:
        self.asked.append(peer)
        self.clock.now += 0.25
        if self.failure is not None:
            raise self.failure
        if peer == SILENT or self.said is None:
            raise Unreachable("nobody answers", peer=peer)
        return self.said, b""


class _Rig:
    """A service whose peer does what the test says."""

    def __init__(self) -> None:
        self.clock, self.inner = FakeClock(), InlineDevice()
        self.device = MeteredDevice(self.inner, self.clock)
        self.endpoint = _Endpoint(self.clock)
        self.status = PeerStatus(NullSink(), phase="ready", step=7, reachability="direct (port 1)")
        self.kinds: dict[PeerId, str] | PeerError = {OTHER: "relayed"}
        self.service = VitalsService(self.status, self.device, cast(Any, self.endpoint), self.clock, self._kinds)

    async def _kinds(self) -> dict[PeerId, str]:
        if isinstance(self.kinds, PeerError):
            raise self.kinds
        return self.kinds

    def does(self, **doing: Any) -> None:
        self.status.activity = lambda: PipelineActivity(**doing)

    async def after(self, seconds: float) -> Vitals:
        self.clock.now += seconds
        return await self.service.now()


async def test_time_without_work_is_waiting_while_something_is_under_way_and_idle_else() -> None:
    rig = _Rig()
    rig.does(under_way=2, queued=1, compute_s=0.5, microbatches=3)
    first = await rig.after(4.0)
    assert (first.busy_s, first.waiting_s, first.idle_s) == (0.0, 4.0, 0.0)
    assert (first.queued, first.under_way, first.microbatches, first.compute_s) == (1, 2, 3, 0.5)
    rig.does(averaging=True)
    assert (await rig.after(1.0)).waiting_s == 5.0
    rig.does()
    second = await rig.after(2.0)
    assert (second.busy_s, second.waiting_s, second.idle_s) == (0.0, 5.0, 2.0)
    assert (second.phase, second.step, second.reachability, second.part) == ("ready", 7, "direct", None)


async def test_device_counts_the_time_in_which_it_has_work_once_and_up_to_now() -> None:
    rig = _Rig()
    rig.inner.gate = asyncio.Event()
    works = [asyncio.create_task(rig.device.run(lambda: None)) for _ in range(2)]
    await asyncio.sleep(0)
    rig.clock.now += 3.0
    assert rig.device.busy_s == 3.0
    assert (await rig.service.now()).busy_s == 3.0
    rig.inner.gate.set()
    await asyncio.gather(*works)
    rig.clock.now += 9.0
    assert rig.device.busy_s == 3.0
    said = await rig.service.now()
    assert (said.busy_s, said.idle_s) == (3.0, 9.0)


async def test_links_are_those_with_the_most_bytes_and_of_unknown_kind_where_the_daemon_is_silent() -> None:
    rig = _Rig()
    links = (await rig.after(1.0)).links
    assert [(link.peer, link.kind, link.bytes_sent, link.bytes_received) for link in links] == [
        (OTHER, "relayed", 70, 5),
        (SILENT, "unknown", 1, 0),
    ]
    rig.kinds = Unreachable("it restarts")
    rig.endpoint.traffic = LinkStatistics({PeerId(f"12D3{n}"): n for n in range(100)}, {PeerId(""): 9})
    links = (await rig.after(1.0)).links
    assert len(links) == MAX_LINKS
    assert links[0].bytes_sent == 99
    assert {link.kind for link in links} == {"unknown"}


async def test_trainer_says_whom_it_leaves_out_and_why_within_limits() -> None:
    rig = _Rig()
    rig.does(probation=tuple(Probation(peer=OTHER, left_s=1.5, reason="x" * 999) for _ in range(99)))
    probation = (await rig.after(1.0)).probation
    assert len(probation) == 64
    assert (probation[0].peer, probation[0].left_s, len(probation[0].reason)) == (OTHER, 1.5, 200)


async def test_many_who_ask_at_once_cost_one_look() -> None:
    rig = _Rig()
    first = await rig.after(5.0)
    assert await rig.service.now() is first
    assert await rig.after(FRESH_S) is not first


async def test_board_asks_every_member_but_itself_and_shows_who_answered_and_how_fast() -> None:
    rig = _Rig()
    own = await rig.after(1.0)
    rig.endpoint.said = own
    board = VitalsBoard(cast(Any, rig.endpoint), rig.clock, rig.service)
    said = await board.look([ME, OTHER, SILENT])
    assert set(said) == {ME, OTHER}
    assert rig.endpoint.asked == [OTHER, SILENT]
    assert board.round_trips == {OTHER: 0.25}
    assert board.unanswered == {SILENT: "away"}
    assert await board.look([ME, OTHER, SILENT]) is said
    assert rig.endpoint.asked == [OTHER, SILENT]
    rig.clock.now += FRESH_S
    assert set(await board.look([SILENT])) == set()
    assert board.round_trips == {}


def test_vitals_without_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="busy_s"):
        Vitals(
            phase="ready", waiting_for="", part=None, step=0, queued=0, under_way=0, microbatches=0, compute_s=0.0,
            averaging=False, busy_s=-1.0, waiting_s=0.0, idle_s=0.0, bytes_sent=0, bytes_received=0, reachability="",
            wall=0.0,
        )  # fmt: skip
