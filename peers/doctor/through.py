"""``swarm doctor --through``: does this machine need a relay to be called, and does that relay serve?

Asks the relay alone, as a guest of no run, with an identity made for this. Imports hivemind: seconds.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from peers.console.words import command_name, short_id
from peers.doctor.contacts import no_relay, probe_addresses
from peers.doctor.results import CheckResult, refused
from swarm.clock import Clock
from swarm.errors import SwarmError
from swarm.network.addresses import is_relayed, parse_address
from swarm.network.endpoint import EndpointConfig, LibP2PEndpoint
from swarm.network.libp2p.identity import load_or_create
from swarm.network.reach.reachability import Finding, ask_how_reached, judge

STARTUP_S = 8.0


async def check_relays(through: Sequence[str], listen: Sequence[str], clock: Clock) -> CheckResult:
    """Ask the relays how they reach this machine. Takes some seconds; never raises a SwarmError."""
    probes = await probe_addresses(through)
    answering = [probe.address for probe in probes if probe.may_answer]
    if not answering:
        error = no_relay(probes)
        return CheckResult(name="relay", found="none answers").fails(error.cause, check=error.check, next_=error.next)
    try:
        own, findings = await _ask(answering, listen, clock)
    except SwarmError as error:
        return refused("relay", "it cannot be asked", error)
    return judge_need(through[0], own, findings)


async def _ask(through: Sequence[str], listen: Sequence[str], clock: Clock) -> tuple[list[str], list[Finding]]:
    with tempfile.TemporaryDirectory(prefix="swarm-doctor-") as scratch:
        config = EndpointConfig(
            run_dir=Path(scratch),
            listen=tuple(parse_address(text, key="--listen", use="listen") for text in listen),
            relays=tuple(parse_address(text, key="--through") for text in through),
            startup_timeout_s=STARTUP_S,
        )
        endpoint = await LibP2PEndpoint.open(config, load_or_create(Path(scratch) / "identity.key"), clock)
        try:
            own = [text for text in endpoint.addresses if not is_relayed(parse_address(text))]
            asked = (ask_how_reached(endpoint, relay, own) for relay in endpoint.standing)
            return own, await asyncio.gather(*asked)
        finally:
            await asyncio.shield(endpoint.close())


def judge_need(through: str, own: Sequence[str], findings: Sequence[Finding]) -> CheckResult:
    """Say whether the machine needs a relay, and what to type. Pure."""
    how, why = judge(own, findings)
    for finding in findings:
        why = why.replace(finding.asked, short_id(finding.asked))
    base = CheckResult(name="relay", found=f"{how}: {why}", facts={"how": how, "relays": [f.asked for f in findings]})
    swarm = command_name()
    if all(finding.error for finding in findings):
        return base.fails(
            "what answers there is no relay for all, or does not answer in time",
            check="is it the address that the relay prints? swarm status, on its machine",
            next_=f"start one there: {swarm} relay",
        )
    commands = f"{swarm} new --preset tiny --through {through}, or {swarm} join INVITE --through {through}"
    if how == "direct":
        return CheckResult(name="relay", found=f"none is needed, this machine can be called: {why}", facts=base.facts)
    if how == "local":
        return base.warns("it listens on this machine only", next_=f"Leave out --listen, or use the relay: {commands}")
    return CheckResult(name="relay", found=f"needed: {why}; {commands}", facts=base.facts)
