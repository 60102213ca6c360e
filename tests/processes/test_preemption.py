"""Machines that are taken back: each peer of a running swarm is told in another way, and leaves in time."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from peers.exit_codes import EXIT_DRAINED
from tests.harness.by_hand import LOCAL, RUN, Started, by_hand, digests_differ
from tests.harness.metadata_server import metadata_server
from tests.harness.processes import assert_nothing_left, take_snapshot

pytestmark = [pytest.mark.process, pytest.mark.long]
NOON = 1_767_268_800.0
"""2026-01-01T12:00:00Z."""


def leaves(peer: Started, source: str) -> str:
    """Why a peer ended that was given notice, once it has; the notice is told before anything else is done about it."""
    code, reason = peer.end()
    assert code == EXIT_DRAINED, reason
    (notice,) = peer.events("PreemptionNotice")
    (draining,) = peer.events("Draining")
    assert notice["source"] == source
    assert draining["reason"].startswith(f"{source}: this machine is taken back")
    kinds = [event["kind"] for event in peer.events()]
    assert kinds.index("PreemptionNotice") < kinds.index("Draining")
    return reason


def test_every_notice_is_acted_on_in_time(tmp_path: Path) -> None:
    before = take_snapshot()
    run, going = tmp_path / "run.toml", tmp_path / "going"
    run.write_text(RUN.format(steps=100_000))
    with (
        by_hand(tmp_path) as hand,
        metadata_server("aws") as aws,
        metadata_server("gcp") as gcp,
    ):
        founder = hand.start("new", str(run), *LOCAL, "--preemption", f"file:{tmp_path}/founder")
        invite = str(founder.wait_event("Invited")["invite"])
        stay = [hand.start("join", invite, "--role", "stage", "--stage", stage, *LOCAL) for stage in ("0", "1")]
        by_command = f"command:cat {shlex.quote(str(going))}"
        trainer = hand.start("join", invite, "--role", "trainer", *LOCAL, "--preemption", by_command)
        trainer.wait_step(2)
        told = {
            "AWS": hand.start(
                "join", invite, "--stage", "0", *LOCAL, "--preemption", "aws", "--preemption-url", aws.url
            ),
            "GCP": hand.start(
                "join", invite, "--stage", "0", *LOCAL, "--preemption", "auto", "--preemption-url", gcp.url
            ),
        }
        for source, peer in told.items():
            peer.wait_event("PreemptionWatch", source=source, problem="")
            peer.wait_event("PeerReady")

        # Both machines at once, as it happens; AWS says when by a clock that is not at all this machine's.
        aws.date, aws.action = NOON, {"action": "terminate", "time": "2026-01-01T12:02:00Z"}
        gcp.preempt()
        for source, peer in told.items():
            assert "left in order" in leaves(peer, source)
        assert [told[source].events("PreemptionNotice")[0]["deadline_s"] for source in told] == [120.0, 30.0]

        # A file appears: the founder goes, the run goes on.
        (tmp_path / "founder").touch()
        assert "left in order" in leaves(founder, f"the file {tmp_path}/founder")
        trainer.wait_step(max(event["step"] for event in trainer.events("StepClosed")) + 3)

        # The only trainer cannot be spared: it waits as long as it may, and not longer.
        going.write_text("3")
        reason = leaves(trainer, f"the command cat {going}")
        assert "could not leave in order in time" in reason
        for host in stay:
            lost = host.wait_event("PeerLost", peer_=trainer.events("PeerStopped")[0]["peer"])
            assert "could not leave in order in time" in lost["reason"]
    assert_nothing_left(before)
    assert not digests_differ([founder, trainer, *stay, *told.values()])
