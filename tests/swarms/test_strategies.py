"""Replicas that only dial out; what each strategy gives and survives is in the table of stories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swarm.ids import PeerId
from swarm.network.protocols import Rpc
from swarm.security.signing import PrivateIdentity
from swarm.step.calls import first_leaf
from tests.harness.swarm import LocalSwarm, OpenEndpoint

SHAPE: dict[str, Any] = {
    "hosts": 4,
    "split": {"stages": 1},
    "run": {"steps": 1},
    "model": {"layers": 1, "dim": 16, "context": 8},
    "batch": {"microbatch_size": 1, "microbatches_per_step": 4},
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


async def test_replica_that_only_dials_out_is_called_by_nobody(tmp_path: Path) -> None:
    swarm = CalledSwarm(tmp_path, averaging={"strategy": "server"}, sites={"host-1": {"dial_out_only": True}}, **SHAPE)
    await swarm.run()
    behind = swarm.peers["host-1"].endpoint.peer
    assert {swarm.peers[name].endpoint.peer for name in ("host-0", "host-2", "host-3")} & {to for _, to in swarm.called}
    assert behind in {caller for caller, _ in swarm.called}
    assert behind not in {target for _, target in swarm.called}


async def test_run_in_which_no_replica_of_a_part_can_be_called_is_not_founded_with_a_server(tmp_path: Path) -> None:
    sites = {f"host-{number}": {"dial_out_only": True} for number in range(4)}
    swarm = LocalSwarm(tmp_path, averaging={"strategy": "server"}, sites=sites, **SHAPE)
    with pytest.raises(ExceptionGroup) as raised:
        await swarm.run()
    assert "no replica of stage-0 can be called by others" in str(first_leaf(raised.value))
