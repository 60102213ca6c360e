"""What looks like a running peer to ``swarm status`` and its sisters, without torch, libp2p or a swarm.

``serving`` has one in this process, with a thread of its own; ``running`` has one in a process of its own.

``python -m tests.harness.standing_peer HOME`` takes a place, serves real standings on its control socket, prints
``serving`` and ends in order on SIGTERM, or when it was drained and has then been asked how it stands once more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.control.server import ControlServer
from peers.control.status import AdmissionReport, MemberReport, Revocation, StatusReport
from peers.exit_codes import EXIT_DRAINED
from peers.home.places import take_place
from peers.invites.invite import Granted, invite_to, parse_invite
from swarm.clock import SystemClock
from swarm.ids import RunId
from swarm.security.credentials import Grant, new_serial, sign_grant
from swarm.security.signing import PrivateIdentity, peer_of

RUN = "9f2c41" + "0" * 58
PEER = "12D3KooWLbT7iWNTNKLbPXXdHbmWBVPvnxhVFBTj4yMJSJ1Hkv{:02d}"
INVITE = invite_to(RunId(RUN), "tiny", [f"/ip4/127.0.0.1/tcp/4001/p2p/{peer_of(bytes(32))}"]).text()


def standing(name: str, number: int = 1) -> StatusReport:
    """What a stage host says in the middle of a run."""
    return StatusReport(
        name=name,
        peer=PEER.format(number),
        pid=os.getpid(),
        role="stage",
        phase="ready",
        waiting_for="",
        run=RUN,
        run_name="tiny",
        part="stage-0",
        reason="it has the fewest replicas",
        step=12,
        steps=60,
        loss=5.0312,
        tokens_per_s=2612.0,
        members=3,
        addresses=(f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER.format(number)}",),
        reachability="direct: dialled by 2 peers",
        started=1_700_000_000.0,
    )


def members(name: str, count: int) -> list[MemberReport]:
    """This peer, a trainer, and stage hosts up to ``count``, the last of them still waiting for a part."""
    parts = ["stage-0", "ends", *(f"stage-{number % 12}" for number in range(2, count - 1)), None]
    return [
        MemberReport(
            name=name if number == 1 else f"peer-{number}",
            peer=PEER.format(number),
            role="trainer" if part == "ends" else "stage",
            part=part,
            state="member" if part else "waiting",
            link="self" if number == 1 else "direct",
            addresses=(f"/ip4/203.0.113.{number}/tcp/4001/p2p/{PEER.format(number)}",),
        )
        for number, part in enumerate(parts[:count], 1)
    ]


def _admission(name: str, used: bool) -> AdmissionReport:
    """Of a run that has given that name an invite that nobody has used, and one that was ``used``, if one was."""
    return AdmissionReport(
        mode="token",
        issuers=(PEER.format(1),),
        admitted=((name, "stage", PEER.format(1)),) if used else (),
        revoked=(),
        invited=((name, "stage", 60, 1_700_000_000),),
    )


class StandingPeer:
    """The commands of such a peer; ``over`` is set when it is to end."""

    def __init__(self, name: str, chosen: argparse.Namespace) -> None:
        self.over = asyncio.Event()
        self.drained = False
        self.killed = False
        self._until = chosen.grants_until
        self._standing = dataclasses.replace(
            standing(name, chosen.number),
            run=chosen.run,
            tokens_per_s=chosen.tokens_per_s,
            admission=_admission(chosen.given_to, chosen.used) if chosen.given_to else None,
        )
        self._members = members(name, chosen.members)

    async def status(self, request: Mapping[str, Any]) -> StatusReport:
        """As a peer does; the first after a drain is the last."""
        if not self.drained:
            return self._standing
        self.over.set()
        return dataclasses.replace(self._standing, phase="draining", waiting_for="step 13 to close")

    async def peers(self, request: Mapping[str, Any]) -> list[MemberReport]:
        """The swarm."""
        return self._members

    async def drain(self, request: Mapping[str, Any]) -> str:
        """Begin to leave."""
        self.drained = True
        return "leaves when step 13 closes"

    async def revoke(self, request: Mapping[str, Any]) -> Revocation:
        """Ask first; then say that it is done."""
        return Revocation(said=f"{request['name']} is revoked") if request["sure"] else Revocation(asks="nobody else")

    async def invite(self, request: Mapping[str, Any]) -> str:
        """A text of the right form; for one peer where this grants until some step."""
        if self._until is None:
            return INVITE
        grant = Grant(
            run=RUN,
            serial=new_serial(),
            name=request["for"],
            role=request["role"],
            until_step=self._until,
            key=peer_of(bytes(32)),
        )
        granted = Granted(grant=sign_grant(grant, PrivateIdentity(bytes(32))), seed=None)
        return dataclasses.replace(parse_invite(INVITE), granted=granted).text()


@contextlib.contextmanager
def running(home: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Such a process, serving; ended with SIGTERM where the caller has not ended it."""
    command = [sys.executable, "-m", "tests.harness.standing_peer", str(home), *arguments]
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "serving\n"
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()


async def _live(chosen: argparse.Namespace, begun: Callable[[StandingPeer], None]) -> int:
    with take_place(chosen.home, chosen.place, clock=SystemClock()) as place:
        place.open_session(
            name=chosen.name, peer=PEER.format(chosen.number), role="stage", run=chosen.run, run_name="tiny"
        )
        peer = StandingPeer(chosen.name, chosen)
        named = ("status", "peers", "drain", "invite", "revoke")
        table = {name: getattr(peer, name) for name in named}
        server = ControlServer(place.control, table)
        await server.start()
        begun(peer)
        await peer.over.wait()
        for _ in range(20):  # who called while it stood still, and is gone
            await asyncio.sleep(0)
        await server.close()
        if not peer.killed:
            place.ended("it was drained" if peer.drained else "it was stopped by SIGTERM", EXIT_DRAINED)
    return EXIT_DRAINED


class Served:
    """Such a peer in this process."""

    def __init__(self, *arguments: str) -> None:
        self._chosen = _chosen(arguments)
        self._begun, self._go_on = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(_live(self._chosen, self._begin)))

    @property
    def lives(self) -> bool:
        """Return whether it has its place."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Serve, in a thread."""
        self._thread.start()
        assert self._begun.wait(60)

    def be_silent(self) -> None:
        """Stand still, as one that is stopped, until it is ended."""
        self._loop.call_soon_threadsafe(self._go_on.wait)

    def end(self, *, killed: bool = False) -> None:
        """End as by SIGTERM, or without a word."""
        if self.lives:
            self._peer.killed = killed
            with contextlib.suppress(RuntimeError):  # its loop is closed: it ends by itself
                self._loop.call_soon_threadsafe(self._peer.over.set)
        self._go_on.set()
        self._thread.join()

    def _begin(self, peer: StandingPeer) -> None:
        self._peer, self._loop = peer, asyncio.get_running_loop()
        self._begun.set()


@contextlib.contextmanager
def serving(home: Path, *arguments: str) -> Iterator[Served]:
    """One in this process, serving; ended where the caller has not ended it."""
    served = Served(str(home), *arguments)
    served.start()
    try:
        yield served
    finally:
        served.end()


def _serve_until_stopped(peer: StandingPeer) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, peer.over.set)
    print("serving", flush=True)


def _chosen(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("home", type=Path)
    parser.add_argument("--place")
    parser.add_argument("--name", default="brave-otter")
    parser.add_argument("--number", type=int, default=1)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--run", default=RUN)
    parser.add_argument("--tokens-per-s", type=float, default=2612.0)
    parser.add_argument("--grants-until", type=int)
    parser.add_argument("--given-to")
    parser.add_argument("--used", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run one."""
    return asyncio.run(_live(_chosen(arguments), _serve_until_stopped))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
