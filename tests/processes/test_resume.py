"""A run whose peers are all killed goes on from what their disks hold, bit for bit as if nothing had happened."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from peers.exit_codes import EXIT_DRAINED
from peers.home.run_directory import RunDirectory
from swarm.state.checkpoints.files import held, steps
from tests.harness.by_hand import LOCAL, RUN, ByHand, Started, by_hand, some_text
from tests.harness.expect import LONG_S

pytestmark = [pytest.mark.process, pytest.mark.long]
EVERY = 5

REPRODUCIBLE = RUN.format(steps=100_000).replace("[run]", "[run]\nreproducible = true")


AS_TRAINER = ("--role", "trainer", "--data")


def join_all(hand: ByHand, invite: str, text: Path, *, trainer: str = "c") -> list[Started]:
    """Two stage hosts and a trainer, each with a home of its own, as on three machines."""
    often = ("--checkpoint-every", str(EVERY), *LOCAL)
    roles = {
        "a": ("--role", "stage", "--stage", "0"),
        "b": ("--role", "stage", "--stage", "1"),
        trainer: (*AS_TRAINER, str(text)),
    }
    return [hand.start("join", invite, *role, *often, home=hand.home.parent / name) for name, role in roles.items()]


def kill_all(peers: list[Started]) -> None:
    for one in peers:
        one.process.send_signal(signal.SIGKILL)
    for one in peers:
        one.process.wait(LONG_S)


def end_all(founder: Started, peers: list[Started]) -> int:
    """Ask everybody to leave; the step with which the run ended. The founder holds nothing and may leave before."""
    for one in (founder, *peers):
        one.process.send_signal(signal.SIGTERM)
    assert founder.end()[0] == EXIT_DRAINED
    ends = [one.end() for one in peers]
    last = max(closed(peers[0]))
    assert [code for code, _ in ends] == [EXIT_DRAINED] * len(peers)
    assert all(f"the run was ended with step {last}, as all its peers were asked" in reason for _, reason in ends), ends
    return last


def closed(peer: Started) -> dict[int, dict[str, Any]]:
    return {event["step"]: event for event in peer.events("StepClosed")}


def kept(home: Path) -> RunDirectory:
    (found,) = (home / "runs").iterdir()
    return RunDirectory(found)


def test_run_of_which_every_peer_was_killed_goes_on_bit_for_bit(tmp_path: Path) -> None:
    text = some_text(tmp_path)
    (tmp_path / "run.toml").write_text(REPRODUCIBLE)
    with by_hand(tmp_path) as hand:
        bootstrap = hand.start("new", str(tmp_path / "run.toml"), *LOCAL)
        invite = bootstrap.wait_event("Invited")["invite"]
        first = join_all(hand, invite, text)
        trainer = first[2]
        for peer in first:
            peer.wait_event("CheckpointWritten", step=2 * EVERY)
        run = trainer.wait_event("RunFound")["run"]

        # Each machine has its own part; this one fetches them all while the run goes on.
        assert held(kept(tmp_path / "a").checkpoints, EVERY).missing == ("ends", "stage-1")
        pulled = hand.run("ckpt", "pull", "--from", invite, "--json")
        assert pulled.returncode == 0, pulled.stderr
        document = json.loads(pulled.stdout)
        assert document["run"] == run
        assert sorted(document["fetched"]) == ["ends", "stage-0", "stage-1"]
        begin = document["step"]
        assert begin >= 2 * EVERY
        # Once more, through the peer that runs here: what is new since.
        for peer in first:
            peer.wait_event("CheckpointWritten", step=begin + EVERY)
        begin = json.loads(hand.run("ckpt", "pull", "--json").stdout)["step"]
        assert begin > document["step"]
        verified = hand.run("ckpt", "verify", "--json")
        assert verified.returncode == 0, verified.stderr
        checked = json.loads(verified.stdout)["steps"]
        assert [(one["complete"], one["proof"]) for one in checked] == [(True, "decided")] * 2

        trainer.wait_step(begin + 2 * EVERY)
        kill_all([bootstrap, *first])
        before = closed(trainer)

        # The home of a host lacks parts, and says so.
        alone = hand.run("new", "--resume", "--home", str(tmp_path / "a"))
        assert alone.returncode == 1
        assert "lacks" in alone.stderr

        founder = hand.start("new", "--resume", *LOCAL)
        second = join_all(hand, founder.wait_event("Invited")["invite"], text)
        second[2].wait_step(begin + EVERY)
        assert second[2].wait_event("RunFound")["run"] == run
        assert second[2].wait_event("PeerReady")["step"] == begin
        assert {event["peer"] for event in second[2].events()} == {event["peer"] for event in trainer.events()}
        after = closed(second[2])
        for step in range(begin + 1, begin + EVERY + 1):
            assert after[step]["digests"] == before[step]["digests"], f"step {step} is another than it was"

        # It goes on being kept, and may be resumed again; what was kept of the steps that are done again is set aside.
        again = (begin // EVERY + 1) * EVERY
        for peer, name in zip(second, ("a", "b", "c"), strict=True):
            assert min(peer.wait_event("CheckpointsSetAside", step=begin)["steps"]) > begin
            peer.wait_event("CheckpointWritten", step=again)
            assert max(steps(kept(tmp_path / name).checkpoints)) >= again

        # The whole run is asked to leave: it ends with the open step, of which everybody keeps its part.
        last = end_all(founder, second)
        for name, part in (("a", "stage-0"), ("b", "stage-1"), ("c", "ends")):
            assert list(held(kept(tmp_path / name).checkpoints, last).parts) == [part]
        shown = hand.run("history", "--verify", "--home", str(tmp_path / "c"))
        assert shown.returncode == 0, shown.stderr
        assert "the run was ended" in shown.stdout
        others = [word for name in ("b", "c") for word in ("--from", str(kept(tmp_path / name).root))]
        gathered = hand.run("ckpt", "pull", str(kept(tmp_path / "a").root), *others, "--json")
        assert json.loads(gathered.stdout)["step"] == last, gathered.stderr
        third = hand.start("new", "--resume", str(kept(tmp_path / "a").root), *LOCAL, home=tmp_path / "again")
        third.wait_event("Invited")
