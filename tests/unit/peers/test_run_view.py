from __future__ import annotations

import dataclasses

import pytest

from peers.local.progress import RunView, row
from swarm.disk import size_text
from swarm.events import HopMoved, LinkUsage, Participation, PeerLost, PeerStarted, StateDownloaded
from swarm.ids import PartName, PeerId
from swarm.monitoring.reader import RecordedEvent
from tests.harness.rigs.peers import batch, closed, told


def _view(*told: RecordedEvent) -> RunView:
    view = RunView()
    for one in told:
        view.add(one)
    return view


def test_view_step_closed_by_many_is_one_step_with_all_its_peers() -> None:
    view = _view(closed(1, "a", 1.0), closed(1, "b", 1.2), closed(2, "a", 2.0), closed(2, "b", 2.1))
    assert view.steps.last == 2
    assert view.steps[1].swapped == {"peera", "peerb"}
    assert view.steps[1].closed_at == 1.0
    assert view.tokens_per_s == pytest.approx(100.0)
    assert not view.digests.mismatches()


def test_view_notes_a_replica_that_was_left_out_once() -> None:
    left_out = Participation(
        step=1, part=PartName("stage-0"), live=3, participating=2, averaged=2,
        why={PeerId("peerc"): "left out: it fails"}, whole=False,
    )  # fmt: skip
    started = PeerStarted(role="stage", name="c", pid=1, addresses=(), seconds=0.1)
    view = _view(told(started, "c"), told(left_out, "a"), told(left_out, "b"), closed(1))
    assert view.notes.by_step == {1: ("stage-0: 2 of 3 averaged (c: left out: it fails)",)}


def test_view_one_step_only_takes_its_own_duration() -> None:
    assert _view(closed(1)).tokens_per_s == pytest.approx(200.0)
    assert _view().tokens_per_s is None


def test_view_initial_weights_are_no_steps_bytes() -> None:
    def download(step: int) -> StateDownloaded:
        return StateDownloaded(part=PartName("stage-0"), step=step, donor=PeerId("d"), bytes_received=100, seconds=1.0)

    view = _view(
        told(download(0), "a"),
        told(download(0), "b"),
        told(download(2), "c"),
        *(closed(step) for step in (1, 2)),
        told(LinkUsage(step=1, bytes_sent=210, bytes_received=0)),
        told(LinkUsage(step=2, bytes_sent=20, bytes_received=0)),
    )
    assert (view.bytes_at_start, view.bytes_per_step) == (200, 15)


def test_view_what_happened_between_steps_is_noted_at_the_next() -> None:
    old, new = PeerId("peerstage01"), PeerId("P2abcdef")
    view = _view(
        told(PeerStarted(role="stage", name="stage-0-1", pid=1, addresses=("x",), seconds=1.0), "stage-0-1"),
        closed(1),
        told(HopMoved(step=2, microbatch=batch(0), stage=0, old=old, new=new, reason="3 s are over", late=True)),
        told(HopMoved(step=2, microbatch=batch(0), stage=0, old=old, new=new, reason="deadline: it says")),
        told(PeerLost(peer=old, name="stage-0-1", reason="no answer")),
        closed(2),
    )
    assert view.addresses == {"stage-0-1": ("x",)}
    assert view.notes.by_step == {
        2: (
            "stage 0: stage-0-1 was slow, abcdef does some of its work",
            "stage 0: work of stage-0-1 continues on abcdef (deadline: it says)",
            "stage-0-1 lost: no answer",
        )
    }
    assert view.lost_peers == {"stage-0-1": "no answer"}
    noted = row(dataclasses.replace(view.steps[2], tokens=512, computed=2048), None, view.notes.by_step[2])
    assert "  512 learnt of 2,048 tokens; stage 0: " in noted
    assert noted.endswith("stage-0-1 lost: no answer")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_600, "1 MB"),
        (86_300_000, "86.3 MB"),
        (367e6, "367 MB"),
        (5e13, "50 TB"),
    ],
)
def test_size_any_count_has_its_unit(count: int, text: str) -> None:
    assert size_text(count) == text
