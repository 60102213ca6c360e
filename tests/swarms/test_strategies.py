"""Whole runs whose replicas average in groups that swap: the weights are those of one group of all, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from peers.chaos.faults import Kill
from peers.chaos.plan import FaultPlan, On, Strike
from peers.simulate.sim_swarm import SimSwarm
from swarm.events import DigestMismatch, Participation, RoundDone, StepClosed, Waiting
from swarm.ids import PeerId
from swarm.network.protocols import Rpc
from swarm.security.signing import PrivateIdentity
from swarm.sim.loop import run_world
from swarm.step.calls import first_leaf
from tests.harness.faults_memory import MemoryWorld
from tests.harness.swarm import LocalSwarm, OpenEndpoint
from tests.swarms.story import live_through

SHAPE: dict[str, Any] = {
    "hosts": 4,
    "trainers": 4,
    "split": {"stages": 1},
    "run": {"reproducible": True},
    "batch": {"microbatch_size": 1, "microbatches_per_step": 8},
}


class CalledSwarm(LocalSwarm):
    """Keeps who called whom to average."""

    def __init__(self, root: Path, **shape: Any) -> None:
        super().__init__(root, **shape)
        self.called: set[tuple[PeerId, PeerId]] = set()

    async def _endpoint(self, home: Path, identity: PrivateIdentity) -> OpenEndpoint:
        endpoint = await super()._endpoint(home, identity)
        call, called = endpoint.call, self.called

        async def noted(target: PeerId, rpc: Rpc[Any, Any], *args: Any, **more: Any) -> Any:
            if rpc.name.startswith("averaging/"):
                called.add((endpoint.peer, target))
            return await call(target, rpc, *args, **more)

        endpoint.call = noted  # type: ignore[method-assign]
        return endpoint


async def digests(
    root: Path, strategy: str, sites: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[list[dict[str, str]], CalledSwarm]:
    """The weights after each step, by part."""
    swarm = CalledSwarm(root, averaging={"strategy": strategy}, sites=sites, **SHAPE)
    await swarm.run()
    assert not swarm.events(DigestMismatch)
    return [record["digests"] for record in swarm.history()], swarm


@pytest.mark.parametrize("strategy", ["grid", "butterfly-groups"])
async def test_groups_that_swap_give_the_weights_of_one_group_of_all(
    tmp_path_factory: pytest.TempPathFactory, strategy: str
) -> None:
    expected, _ = await digests(tmp_path_factory.mktemp("everyone"), "everyone")
    found, swarm = await digests(tmp_path_factory.mktemp(strategy), strategy)
    assert found == expected
    rounds = swarm.events(RoundDone)
    assert {(event.round, event.members) for event in rounds} == {(0, 2), (1, 2)}
    assert len(rounds) == 2 * 8 * swarm.manifest.run.steps


async def test_hierarchy_averages_within_regions_first_and_gives_the_weights_of_one_group_of_all(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    expected, _ = await digests(tmp_path_factory.mktemp("everyone"), "everyone")
    sites = {f"{kind}-{number}": {"region": "ab"[number // 2]} for kind in ("host", "trainer") for number in range(4)}
    found, swarm = await digests(tmp_path_factory.mktemp("hierarchy"), "hierarchy", sites)
    assert found == expected
    members = {(event.round, event.members) for event in swarm.events(RoundDone)}
    assert members == {(0, 2), (1, 2), (2, 2)}
    across = [event for event in swarm.events(RoundDone) if event.round == 1]
    assert len(across) == 2 * 2 * swarm.manifest.run.steps, "one of each region, for each of two parts"


async def test_replica_that_only_dials_out_is_called_by_nobody_and_gets_the_weights_of_one_group_of_all(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    expected, everyone = await digests(tmp_path_factory.mktemp("everyone"), "everyone")
    behind = everyone.peers["host-1"].endpoint.peer
    assert behind in {target for _, target in everyone.called}
    found, swarm = await digests(tmp_path_factory.mktemp("server"), "server", {"host-1": {"dial_out_only": True}})
    assert found == expected
    assert behind in {caller for caller, _ in swarm.called}
    assert behind not in {target for _, target in swarm.called}
    rounds = [event for event in swarm.peers["host-1"].events.of(RoundDone)]
    assert [event.members for event in rounds] == [4] * swarm.manifest.run.steps
    listed = {member["name"]: member.get("outgoing", False) for member in swarm.history()[0]["roster"]}
    assert {name for name, outgoing in listed.items() if outgoing} == {"host-1"}


async def test_run_in_which_no_replica_of_a_part_can_be_called_is_not_founded_with_a_server(tmp_path: Path) -> None:
    sites = {f"host-{number}": {"dial_out_only": True} for number in range(4)}
    swarm = LocalSwarm(tmp_path, averaging={"strategy": "server"}, sites=sites, **SHAPE)
    with pytest.raises(ExceptionGroup) as raised:
        await swarm.run()
    assert "no replica of stage-0 can be called by others" in str(first_leaf(raised.value))


def test_replicas_that_lose_their_server_go_on_as_one_and_the_others_are_told_why(tmp_path: Path) -> None:
    sites = {"host-1": {"dial_out_only": True}, "host-2": {"dial_out_only": True}}
    shape = {**SHAPE, "hosts": 3, "run": {"reproducible": True, "steps": 5}}
    swarm = SimSwarm(tmp_path, averaging={"strategy": "server"}, sites=sites, may_fail=True, **shape)
    on = On(RoundDone, peer="host-0", where={"step": 2})
    with MemoryWorld(swarm) as world:
        plan = FaultPlan(Strike("death", on, Kill(("host-0",))), world=world)
        run_world(swarm.run(timeout_s=3600.0))
    plan.assert_fired()
    [told] = [event for event in swarm.events(Participation) if event.part == "stage-0" and event.why]
    assert (told.participating, told.averaged) == (1, 1)
    lost = swarm.peers["host-0"].endpoint.peer
    [left_out] = set(told.why) - {lost}
    assert "no answer to " in told.why[lost]  # the leader left it out before its loss was told to all
    assert told.why[left_out].startswith("left out: no replica of stage-0 that others can call is left")
    outside = next(peer for peer in swarm.peers.values() if peer.endpoint.peer == left_out)
    assert any("one that can must join" in event.what for event in outside.events.of(Waiting))
    last = swarm.history()[-1]
    assert last["step"] == 5
    assert [one["part"] for one in last["roster"]].count("stage-0") == 1


def test_replica_that_dies_between_two_rounds_costs_an_attempt_and_no_microbatch(tmp_path: Path) -> None:
    """Three are left then, which make no grid: all of them average at once."""
    swarm = SimSwarm(
        tmp_path, averaging={"strategy": "grid"}, may_fail=True, **{**SHAPE, "run": {"reproducible": True, "steps": 5}}
    )
    first = On(RoundDone, peer="host-1", where={"step": 2, "round": 0})
    plan = live_through(swarm, tmp_path, Strike("death", first, Kill(("host-1",))), steps=5, timeout_s=600.0)
    assert plan.counts == {"kill": 1}
    last = [event for event in swarm.events(RoundDone) if event.step == 5 and event.part == "stage-0"]
    assert {(event.round, event.members) for event in last} == {(0, 3)}
    assert max(event.step for event in swarm.events(StepClosed)) == 5
