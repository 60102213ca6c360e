"""A whole fake swarm: peers that write the events a real run would, and the bootstrap its checkpoints.

How it goes is read from the environment: ``FAKE_FAULT``, ``<peer> kill``, has that peer die in step 2, and the others
give up; with ``no-checkpoint`` none is written.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from peers.settings import PeerSettings
from swarm.config import load_manifest

MICROBATCHES = 2


class _Told(Exception):
    """SIGTERM."""


def run(settings: PeerSettings) -> int:
    """Stand in for ``peers.node.run_peer``."""
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        return _Fake(settings).live()
    except _Told:
        _Fake(settings).emit("PeerStopped", reason="stopped by SIGTERM", exit_code=143)
        return 143


def _on_sigterm(*_: object) -> None:
    raise _Told


class _Fake:
    def __init__(self, settings: PeerSettings) -> None:
        self.settings = settings
        self.root = settings.home.parent.parent
        self.peer = f"12D3{settings.name.replace('-', '')}"

    def emit(self, kind: str, **fields: Any) -> None:
        """Append one event in the recorder's format."""
        now = {"t": time.clock_gettime(time.CLOCK_REALTIME), "m": time.monotonic()}
        with (self.settings.home / "events.jsonl").open("a") as file:
            file.write(json.dumps(now | {"peer": self.peer, "kind": kind} | fields) + "\n")

    def live(self) -> int:
        """All steps, unless a fault ends it."""
        manifest = load_manifest(self.root / "run.toml")
        address = f"/ip4/127.0.0.1/tcp/4001/p2p/{self.peer}"
        name, role = self.settings.name, self.settings.role
        self.emit("PeerStarted", role=role, name=name, pid=os.getpid(), addresses=[address], seconds=0.1)
        self.emit("RunStarted", run=manifest.run_id, stages=2, roster=[], parameters=1000)
        for step in range(1, manifest.run.steps + 1):
            if step == 2 and (code := self.misbehave()) is not None:
                return code
            self.close(step)
        if role == "bootstrap" and os.environ.get("FAKE_FAULT") != "no-checkpoint":
            write_checkpoints(self.root)
        self.emit("PeerStopped", reason="every step is closed", exit_code=0)
        return 0

    def misbehave(self) -> int | None:
        """What the environment asks for."""
        fault = os.environ.get("FAKE_FAULT", "")
        name, killed, _ = fault.partition(" kill")
        if name == self.settings.name:
            (self.root / "struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if killed:
            while not (self.root / "struck").exists():
                signal.sigtimedwait([], 0.01)
            self.emit("PeerStopped", reason=f"cannot do without {name}", exit_code=3)
            return 3
        return None

    def close(self, step: int) -> None:
        """The events of one step."""
        batches = [[f"12D3trainer{n}", "0" * 16, 0, step] for n in range(MICROBATCHES)]
        if self.settings.name == "trainer-0":
            for batch in batches:
                self.emit("JourneyStarted", step=step, microbatch=batch, route=[])
        if self.settings.role == "bootstrap":
            self.emit("Committed", step=step, microbatches=batches)
        self.emit(
            "StepClosed", step=step, loss=8.0 - step, tokens=4096, microbatches=MICROBATCHES, grad_norm=1.0, clip=1.0,
            lr=0.001, digests={"stage-0": "a" * 64}, leader=self.peer, record="b" * 64, seconds=0.1,
        )  # fmt: skip
        self.emit("LinkUsage", step=step, bytes_sent=1000, bytes_received=1000)


def write_checkpoints(root: Path) -> None:
    """Step 0 with random weights and the last step with other ones, as real peers would leave them."""
    from swarm.models.registry import family_of
    from swarm.state.checkpoints.parts import CheckpointManifest, write_manifest, write_part
    from swarm.state.snapshot import Snapshot, digest

    manifest = load_manifest(root / "run.toml")
    for step in (0, manifest.run.steps):
        weights = family_of(manifest.model).initial_weights(seed=step)
        digests = {}
        for spec in family_of(manifest.model).parts(manifest.split):
            layout = family_of(manifest.model).layout(family_of(manifest.model).build(spec))
            params = layout.flatten(weights)
            snapshot = Snapshot(part=spec.name, step=step, layout=layout, vectors=(params, params * 0, params * 0))
            write_part(root / "checkpoints", snapshot, {"run": manifest.run_id})
            digests[spec.name] = digest(snapshot)
        write_manifest(root / "checkpoints", CheckpointManifest(run=manifest.run_id, step=step, parts=digests))


def main() -> None:
    """``swarm quickstart`` with this swarm: arguments as the command's, behind its usual entry."""
    import functools

    import peers.commands.quickstart
    from peers.cli import main as swarm
    from peers.local.launch import PeerGroup

    make_group = functools.partial(PeerGroup, entry="tests.harness.fake_swarm:run", preload=())
    peers.commands.quickstart.quickstart.__kwdefaults__["make_group"] = make_group
    swarm()


if __name__ == "__main__":
    main()
