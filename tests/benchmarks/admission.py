"""What admission by invite keeps out, and what it costs: every service tried by every kind of caller, every route of
the dashboard and command of the control socket by strangers, a revocation, a connection, and a run whose issuer has
gone.

Services and the run without its issuer are played in virtual time, over the network in memory; the revocation in real
time.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tests.benchmarks._admission_http import tried_routes
from tests.benchmarks.runner import Cell, Result, Size

if TYPE_CHECKING:
    from swarm.ids import PeerId

BARS = {
    "services_answering_strangers": 0,
    "services_beyond_the_table": 0,
    "routes_answering_strangers": 0,
    "revoked_out_s": 60.0,
    "connect_cost_ms": 1.0,
    "steps_without_issuers": 50,
}
"""At most so much, but of the steps at least."""
KEYS = ("services_tried", "routes_tried", *BARS, *(f"{name}_bar" for name in BARS))
STRANGERS = ("none", "copied", "expired", "revoked", "another run's", "another issuer's")
TARGETS = ("bootstrap", "host-1", "trainer-0")
STEPS = {Size.SMOKE: 58, Size.DEFAULT: 120, Size.FULL: 400}
CONNECTIONS = {Size.SMOKE: 50, Size.DEFAULT: 1000, Size.FULL: 5000}

T = TypeVar("T")


def run(size: Size) -> Result:
    """What admission keeps out: every service by every kind of caller, a revocation, a connection, no issuers."""
    import torch

    from peers.dashboard.access import ROUTES

    torch.set_num_threads(1)
    rows, summary = list[list[Cell]](), dict[str, Any]()
    tried = _in_scratch(_services)
    for caller in dict.fromkeys(caller for caller, _, _ in tried):
        passed = sum(passed for who, passed, _ in tried if who == caller)
        rows.append([caller, "services that take its call", passed])
    strangers = [(passed, free) for who, passed, free in tried if who in STRANGERS]
    summary["services_tried"] = len(tried)
    summary["services_answering_strangers"] = sum(passed and not free for passed, free in strangers)
    summary["services_beyond_the_table"] = sum(passed and not free for _, passed, free in tried)
    routes = tried_routes()
    for caller in dict.fromkeys(caller for caller, *_ in routes):
        answered = len({route for who, route, answers, _ in routes if who == caller and answers})
        rows.append([caller, "routes that answer it", answered])
    summary["routes_tried"] = len(routes)
    summary["routes_answering_strangers"] = sum(answers and not public for _, _, answers, public in routes)
    summary["revoked_out_s"] = round(_in_scratch(_revoked_out_s), 3)
    summary["connect_cost_ms"] = round(_connect_cost_ms(CONNECTIONS[size]), 3)
    summary["steps_without_issuers"] = _in_scratch(lambda root: _steps_without_issuers(root, STEPS[size]))
    rows += [["member", "s from its revocation to a roster without it", summary["revoked_out_s"]]]
    rows += [["newcomer", "ms of the loop to take its credential, median", summary["connect_cost_ms"]]]
    rows += [["run", "steps after its issuer left", summary["steps_without_issuers"]]]
    notes = (
        "A caller's body cannot be decoded: a Violation shows that its call was let in. Observer, stage, trainer and "
        "any are what its credential allows; member and voter what the roster says.",
        "Routes public by intent: " + "; ".join(f"{path}: {reason}" for path, reason in ROUTES.items() if reason) + ".",
        "A dashboard of this machine alone has no token: whoever is on the machine may read it, by intent.",
    )
    summary |= {f"{name}_bar": bar for name, bar in BARS.items()}
    return Result(columns=("who", "figure", "value"), rows=rows, summary=summary, notes=notes)


def _in_scratch(play: Callable[[Path], T]) -> T:
    with tempfile.TemporaryDirectory(prefix="admission-") as root:
        return play(Path(root))


def _admitted() -> dict[str, Any]:
    from peers.simulate.local_swarm import founder_id

    return {"admission": {"mode": "token", "issuers": (str(founder_id()),)}}


# --- every service by every kind of caller ---------------------------------------------------------------------------


def _services(root: Path) -> list[tuple[str, bool, bool]]:
    """(caller, whether it was let in, whether the table allows that) for each service of three kinds of peers."""
    from peers.chaos.strangers.attacks import PlainBody
    from peers.simulate.local_swarm import _identity
    from peers.simulate.sim_swarm import SimSwarm
    from swarm.errors import PeerError, Violation
    from swarm.events import Event, StepClosed
    from swarm.membership.access import METHODS, CallerAccess
    from swarm.network.rpc.bodies import pack_request
    from swarm.security.credentials import Credential, Grant, Order, credential_for, sign_grant
    from swarm.sim.loop import run_world

    swarm = SimSwarm(root, hosts=4, trainers=1, run={"steps": 12}, **_admitted())
    found: list[tuple[str, bool, bool]] = []
    issuer, other = _identity(0), _identity(77)

    def shown(number: int, signer: Any = issuer, **changed: Any) -> Credential:
        peer = _identity(number).peer
        fields: dict[str, Any] = {
            "run": swarm.manifest.run_id, "serial": f"{number:016x}", "name": f"p{number}", "role": "any",
            "until_step": 12, "key": peer,
        }  # fmt: skip
        return credential_for(sign_grant(Grant(**(fields | changed)), signer), peer, None)

    callers: dict[str, tuple[int, Credential | None, CallerAccess]] = {
        "none": (500, None, CallerAccess.STRANGER),
        "copied": (501, shown(502), CallerAccess.STRANGER),
        "expired": (503, shown(503, until_step=1), CallerAccess.STRANGER),
        "revoked": (504, shown(504), CallerAccess.STRANGER),
        "another run's": (505, shown(505, run="b" * 64), CallerAccess.STRANGER),
        "another issuer's": (506, shown(506, other), CallerAccess.STRANGER),
        "observer": (507, shown(507, role="observer"), CallerAccess.OBSERVER),
        "stage": (508, shown(508, role="stage"), CallerAccess.JOINER),
        "trainer": (509, shown(509, role="trainer"), CallerAccess.JOINER),
        "any": (510, shown(510), CallerAccess.JOINER),
    }

    def attempt(caller: str, peer: PeerId, allowed: CallerAccess) -> None:
        for target in TARGETS:
            server: Any = swarm.peers[target].endpoint
            for name, needed in METHODS.items():
                request = b"".join(pack_request(name, 5.0, 0, PlainBody(content=1)))
                passed = False
                try:
                    server._admit(peer, request, 0)
                except Violation:  # its body was looked at
                    passed = True
                except PeerError as error:
                    if "no method" in error.reason:
                        continue
                found.append((caller, passed, allowed >= needed))

    def everybody() -> None:
        revoked = Order(verb="revoke", run=swarm.manifest.run_id, name="p504", serial=f"{504:016x}", until_step=12)
        gates = [swarm.peers[target].around.gate for target in TARGETS]
        for caller, (number, credential, allowed) in callers.items():
            peer = _identity(number).peer
            for gate in gates:
                assert gate is not None
                with contextlib.suppress(PeerError):
                    if credential is not None:
                        gate.show(peer, credential)
                if caller == "revoked":
                    gate.take(revoked.with_signature(issuer))
            attempt(caller, peer, allowed)

    def hear(event: Event) -> None:
        if isinstance(event, StepClosed) and event.step == 2:
            everybody()

    async def story() -> None:
        await swarm.open()
        swarm.peers["bootstrap"].events.listeners.append(hear)
        await swarm.run(timeout_s=600)

    run_world(story())
    return found


# --- a revocation, a connection, no issuers --------------------------------------------------------------------------


def _revoked_out_s(root: Path) -> float:
    """Seconds from an issuer's word to a decided roster without the member."""
    from peers.simulate.local_swarm import LocalSwarm, _identity
    from swarm.events import Event, StepClosed
    from swarm.security.credentials import Order

    swarm, at = LocalSwarm(root, hosts=4, trainers=1, run={"steps": 30}, **_admitted()), list[float]()

    def hear(event: Event) -> None:
        founder = swarm.peers["bootstrap"].around.admission
        if not isinstance(event, StepClosed) or founder is None:
            return
        peer = swarm.peers["host-3"].endpoint.peer
        if event.step == 3:
            grant = swarm.credential_of("host-3", "stage", peer)
            assert grant is not None
            serial = grant.grant.serial
            order = Order(verb="revoke", run=swarm.manifest.run_id, name="host-3", serial=serial, until_step=30)
            at.append(time.perf_counter())
            founder.give(order.with_signature(_identity(0)))
        elif len(at) == 1 and peer not in founder.gate.members:
            at.append(time.perf_counter())

    async def story() -> None:
        await swarm.open()
        swarm.peers["bootstrap"].events.listeners.append(hear)
        start = swarm._start
        swarm._start = lambda peer, **more: start(peer, may_fail=True)  # type: ignore[method-assign]
        await swarm.run(timeout_s=120)

    asyncio.run(story())
    return at[1] - at[0]


def _connect_cost_ms(connections: int) -> float:
    """Median milliseconds to decode, verify and take a newcomer's credential."""
    from peers.simulate.local_swarm import _identity
    from swarm.consensus.admissions import AdmissionConfig, AdmissionPolicy
    from swarm.ids import RunId
    from swarm.membership.gate import CallGate
    from swarm.network.rpc.bodies import decode, pack, unpack
    from swarm.security.credentials import Credential, Grant, credential_for, sign_grant
    from swarm.security.signing import PrivateIdentity, verify

    issuer, run = _identity(0), RunId("a" * 64)
    policy = AdmissionPolicy(run, AdmissionConfig(mode="token", issuers=(str(issuer.peer),)))
    gate, costs = CallGate(policy, issuer.peer, None, verify), list[float]()
    for number in range(1, connections + 1):
        seed, peer = number.to_bytes(32, "big"), _identity(number).peer
        key = PrivateIdentity(seed).peer
        grant = Grant(run=run, serial=f"{number:016x}", name="ana", role="any", until_step=9, key=key)
        packed = pack(credential_for(sign_grant(grant, issuer), peer, seed).to_wire())
        began = time.perf_counter()
        gate.show(peer, decode(Credential, unpack(packed)))
        costs.append(1e3 * (time.perf_counter() - began))
    return statistics.median(costs)


def _steps_without_issuers(root: Path, steps: int) -> int:
    """Steps that a run closes after its only issuer has left."""
    from peers.simulate.sim_swarm import SimSwarm
    from swarm.errors import Ending
    from swarm.events import Event, StepClosed
    from swarm.sim.loop import run_world

    swarm = SimSwarm(root, hosts=3, trainers=1, run={"steps": steps}, **_admitted())

    def hear(event: Event) -> None:
        founder = swarm.peers["bootstrap"].membership
        if isinstance(event, StepClosed) and event.step == 1 and founder is not None:
            founder.leave("its time is over", Ending.DONE)

    async def story() -> None:
        await swarm.open()
        swarm.peers["host-0"].events.listeners.append(hear)
        await swarm.run(timeout_s=600)

    run_world(story())
    history = swarm.history("host-0")
    names = {record["step"]: {member["name"] for member in record["roster"]} for record in history}
    return sum("bootstrap" not in names.get(step - 1, {"bootstrap"}) for step in names)
