"""The same swarm over real libp2p daemons, still in one process, so that a test can see every byte that leaves it."""

from __future__ import annotations

from pathlib import Path

from swarm.clock import SystemClock
from swarm.network.addresses import parse_address
from swarm.network.endpoint import EndpointConfig, LibP2PEndpoint
from swarm.network.libp2p.identity import load_or_create
from swarm.security.signing import PrivateIdentity
from tests.harness.swarm import LocalSwarm


class LibP2PSwarm(LocalSwarm):
    """Each peer has a daemon of its own; the first one opened is everybody's bootstrap."""

    _bootstrap: tuple[str, ...] = ()

    async def _endpoint(self, home: Path, identity: PrivateIdentity) -> LibP2PEndpoint:
        key = home / "identity.key"
        key.write_bytes(identity.to_protobuf())
        key.chmod(0o600)
        config = EndpointConfig(run_dir=home, bootstrap=tuple(map(parse_address, self._bootstrap)))
        endpoint = await LibP2PEndpoint.open(config, load_or_create(key), SystemClock())
        self._bootstrap = self._bootstrap or endpoint.addresses
        return endpoint
