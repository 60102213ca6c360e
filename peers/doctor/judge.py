"""What the measurements of ``swarm doctor`` say about joining one run. Pure: numbers in, results out.

:class:`Gain` is the arithmetic behind its last question: is the swarm better off with this machine, and this machine
with the swarm?
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from peers.console.words import amount, command_name, count, listed, named, wish_for
from peers.doctor.results import CheckResult, Level
from swarm.disk import size_text
from swarm.ids import ENDS, PartName

if TYPE_CHECKING:
    from peers.doctor.compute import BlockSpeed, DeviceSeen, PlannedPart
    from peers.doctor.network import RunSeen
    from swarm.membership.vitals import Vitals
    from swarm.network.reach.probe import ProbedLink
    from swarm.network.reach.reachability import Reach

MAX_SKEW_S, DOUBTFUL_SKEW_S = 10.0, 3.0
"""Of clocks: the directory refuses records of a peer whose clock differs by more (``swarm.network.discovery.records``);
and what is no accident of the measurement, which is good to a second."""
LONG_TRIP_S = 0.5
THIN_LINK = 125_000.0
"""Bytes a second: 1 Mbit/s."""


def judge_device(seen: DeviceSeen) -> CheckResult:
    """The device that was tried."""
    memory = f"{size_text(seen.free)} of {size_text(seen.total)}" if seen.total else f"{size_text(seen.free)} of memory"
    return CheckResult(
        name="computes",
        found=f"{seen.device}: {seen.title} computes, {memory} free",
        facts={"device": seen.device, "title": seen.title, "free": seen.free, "total": seen.total, "torch": seen.torch},
    )


def judge_run(seen: RunSeen) -> CheckResult:
    """Return what the contact says of its run."""
    manifest, standing = seen.manifest, seen.standing
    run, closed = manifest.run, standing.closed
    title = f"{run.name} ({manifest.run_id[:12]})"
    waits = standing.waiting_for or "it gathers its peers"
    where = (
        f" has not begun: {waits}" if closed is None else f", step {closed} of {run.steps}, {len(seen.members)} peers"
    )
    base = CheckResult(
        name="run",
        found=title + where,
        facts={
            "run": manifest.run_id, "name": run.name, "step": closed, "steps": run.steps, "contact": seen.contact,
            "peers": len(seen.members),
        },
    )  # fmt: skip
    swarm = command_name()
    if closed is not None and (closed >= run.steps or (seen.head is not None and seen.head.ended)):
        remedy = f"Found another: {swarm} new; or, where its checkpoints are, go on with it: {swarm} new --resume"
        return base.fails("the run is over: nobody can join it", next_=remedy)
    if closed is not None and standing.lost:
        remedy = "It goes on when somebody with a copy, or a checkpoint, comes back."
        return base.warns(f"as its contact sees it, nobody holds {listed(standing.lost)} now", next_=remedy)
    if closed is not None and standing.lacking:
        home, part = standing.lacking[0]
        start = f"{swarm} join INVITE {wish_for(PartName(part))}"
        cause = f"microbatches stay in one organisation, and {home} has no host of {part}: its trainers wait"
        return base.warns(cause, next_=f"at {home}, with an invite that names it: {start}")
    return base


def judge_clock(offsets: Sequence[float]) -> CheckResult:
    """This clock beside the peers': seconds by which each of theirs is ahead."""
    if not offsets:
        return CheckResult(name="clock", found="no peer says what time it has", level="skipped")
    ahead, peers = max(-1e9, min(1e9, median(offsets))), count(len(offsets), "peer")  # a peer may say anything
    off = f"{abs(ahead):.1f} s {'behind' if ahead > 0 else 'ahead of'}"
    base = CheckResult(
        name="clock",
        found=f"within a second of {peers}" if abs(ahead) < 1 else f"{off} {peers}",
        facts={"offset_s": ahead, "peers": len(offsets)},
    )
    if abs(ahead) < DOUBTFUL_SKEW_S:
        return base
    cause = f"others refuse what a peer announces whose clock differs from theirs by more than {MAX_SKEW_S:g} s"
    check, remedy = "timedatectl", "sudo timedatectl set-ntp true (on the other machines, if this clock is right)"
    if abs(ahead) > MAX_SKEW_S:
        return base.fails(cause, check=check, next_=remedy)
    return base.warns(cause, check=check, next_=remedy)


def judge_round_trip(contact_s: float, others_s: Sequence[float]) -> CheckResult:
    """The median of some calls to the contact, and one of each of other members."""
    members = f", median of {count(len(others_s), 'other member')} {_seconds(median(others_s))}" if others_s else ""
    base = CheckResult(
        name="round trip",
        found=f"{_seconds(contact_s)} to the contact{members}",
        facts={"contact_s": contact_s, "members_s": median(others_s) if others_s else None, "members": len(others_s)},
    )
    if min([contact_s, *others_s]) > LONG_TRIP_S:
        cause = "each microbatch goes this way there and back at every stage"
        return base.warns(cause, check="ping the machine of the invite: is it far, or this link busy?")
    return base


def judge_bandwidth(link: ProbedLink, swarm: Sequence[float]) -> CheckResult:
    """A short measurement with the contact, beside what members measured: bytes a second."""
    said = {
        "up": link.up, "down": link.down, "up_bytes": link.up_bytes, "down_bytes": link.down_bytes,
        "members": median(swarm) if swarm else None,
    }  # fmt: skip
    if not link.up:
        return CheckResult(name="bandwidth", found=f"not measured: {link.problem}", level="skipped", facts=said)
    others = f"; members measured {_rate(median(swarm))} between them" if swarm else ""
    down = f"{_rate(link.down)} down" if link.down else "down not measured"
    probe = f"{size_text(link.up_bytes)} there{f' and {size_text(link.down_bytes)} back' if link.down else ''}"
    base = CheckResult(
        name="bandwidth",
        found=f"at least {_rate(link.up)} up, {down} (measured with {probe}, with the contact){others}",
        facts=said,
    )
    if link.up < THIN_LINK or 0 < link.down < THIN_LINK:
        cause = "less than 1 Mbit/s: hardly a microbatch gets through in time"
        return base.warns(cause, check="does something else use this link?")
    return base


def _rate(bytes_s: float) -> str:
    number, space, unit = amount(8 * bytes_s).partition(" ")
    return f"{number}{space or ' '}{unit}bit/s"


def judge_reach(reach: Reach, way: str, *, near: bool) -> CheckResult:
    """Return how others reach this machine, and the way in which it calls the contact; ``near``: on this very
    machine."""
    ways = {"direct": "directly", "relayed": "through a relay", "hole-punched": "directly, through a punched hole"}
    base = CheckResult(
        name="reachable",
        found=f"{reach.how}: {named(reach.detail, {})}; it calls the contact {ways.get(way, 'in an unknown way')}",
        facts={"how": reach.how, "contact": way, "addresses": list(reach.addresses)},
    )
    swarm = command_name()
    port = f"{swarm} join INVITE --port N, with port N opened in the firewall, or forwarded by the router"
    relay = f"{swarm} relay, on a machine that everybody can call, and here: {swarm} join INVITE --through ADDRESS"
    either = f"{port}; or {relay}"
    match reach.how:
        case "direct":
            return base
        case "local" if near:
            return base
        case "local":
            remedy = f"Listen on all interfaces: {swarm} join INVITE, without --listen"
            return base.fails("its run is on other machines, whose peers cannot call it", next_=remedy)
        case "relayed":
            return base.warns("nobody can dial it: all that others send passes other peers' links", next_=port)
        case "unknown":
            return base.warns("no peer could tell whether this machine can be called", next_=either)
    return base.fails("a peer that nobody can call, and for which nobody relays, cannot take part", next_=either)


def judge_parts(parts: Sequence[PlannedPart], disk_free: int) -> CheckResult:
    """Which parts of the model fit into the memory here, and their checkpoints onto the disk."""
    fitting = [one for one in parts if not one.lacking]
    said = {"parts": {one.part: {"bytes": one.bytes, "fits": not one.lacking} for one in parts}}
    if not fitting:
        small = min(parts, key=lambda one: one.bytes)
        return CheckResult(name="parts", found=f"none of {len(parts)} fits", facts=said).fails(
            small.lacking,
            check=f"the smallest, {small.part}, takes {size_text(small.bytes)} and activations",
            next_="Join where there is more memory, or found a run with more stages: swarm new --stages N",
        )
    largest, all_fit = size_text(max(one.bytes for one in fitting)), len(fitting) == len(parts)
    which = f"all {len(parts)} fit" if all_fit else f"{listed([o.part for o in fitting])} fit, of {len(parts)}"
    base = CheckResult(name="parts", found=f"{which}; the largest takes {largest} and activations", facts=said)
    kept = 3 * 12 * max(one.parameters for one in fitting)
    if kept > disk_free:
        cause = f"three checkpoints of it take {size_text(kept)}, and {size_text(disk_free)} of disk are free"
        return base.warns(cause, next_=f"Name a directory on another disk: {command_name()} join --checkpoints DIR")
    if not all_fit:
        wish = wish_for(next((one.part for one in fitting if one.part != ENDS), ENDS))
        lacking = next(one.lacking for one in parts if one.lacking)
        return base.warns(lacking, next_=f"{command_name()} join INVITE {wish}")
    return base


def judge_speed(part: str, own: BlockSpeed, replicas: Sequence[float]) -> CheckResult:
    """Seconds of one microbatch in a stage here, beside those of its replicas."""
    found = f"{part} takes {_seconds(own.stage_s)} a microbatch here ({own.measured})"
    typical = median(replicas) if replicas else 0.0
    if typical:
        ratio = own.stage_s / typical
        beside = f"{ratio:.3g} times as long" if ratio >= 1 else f"{1 / ratio:.3g} times as fast"
        found += f"; {_seconds(typical)} at {count(len(replicas), 'replica')}: {beside}"
    else:
        found += "; no replica says how long it takes there"
    said = {"part": part, "stage_s": own.stage_s, "whole_s": own.whole_s, "replicas": len(replicas),
            "replicas_s": typical or None}  # fmt: skip
    return CheckResult(name="speed", found=found, facts=said)


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


# --- is it worth it? -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What is known of a swarm and of a machine that would be one more replica of ``part``.

    ``replicas`` are its replicas now, of ``parameters`` each, of which ``bytes_a_parameter`` travel in each of a step's
    ``rounds`` of averaging. ``step_s`` is a step's time, 0.0 where nobody knows it, ``watched`` whether it was seen and
    not reckoned. ``whole_s`` are a microbatch's seconds through the whole model here, ``link`` bytes a second, each 0.0
    where unknown. With ``alone_fits`` this machine's memory holds the whole model.
    """

    part: str
    replicas: int
    parameters: int
    bytes_a_parameter: float
    rounds: int
    tokens_a_step: int
    tokens_a_microbatch: int
    step_s: float
    watched: bool
    whole_s: float
    link: float
    alone_fits: bool

    @property
    def averaged_bytes(self) -> float:
        """Bytes that this machine would send in a step, and get: of a reduce-scatter and an all-gather among
        ``replicas`` + 1 of them."""
        return 2 * self.rounds * self.bytes_a_parameter * self.parameters * self.replicas / (self.replicas + 1)

    @property
    def averaging_s(self) -> float:
        """Seconds for that; 0.0 where the link is not known."""
        return self.averaged_bytes / self.link if self.link else 0.0

    @property
    def swarm_tokens_s(self) -> float:
        """Tokens a second of the swarm now; 0.0 where a step's time is not known."""
        return self.tokens_a_step / self.step_s if self.step_s else 0.0

    @property
    def alone_tokens_s(self) -> float:
        """Tokens a second of this machine alone; 0.0 where the model does not fit, or nothing was measured."""
        return self.tokens_a_microbatch / self.whole_s if self.alone_fits and self.whole_s else 0.0


def judge_gain(gain: Gain) -> CheckResult:
    """Say whether the swarm would be slower with this machine, or is slower than this machine alone."""
    said = {
        "averaged_bytes": gain.averaged_bytes, "averaging_s": gain.averaging_s, "step_s": gain.step_s,
        "watched": gain.watched, "swarm_tokens_s": gain.swarm_tokens_s, "alone_tokens_s": gain.alone_tokens_s,
    }  # fmt: skip
    step = f"a step takes {'' if gain.watched else 'about '}{_seconds(gain.step_s)}" if gain.step_s else ""
    average = ""
    if gain.averaging_s:
        average = (
            f"to average {gain.part} takes {_seconds(gain.averaging_s)} of this link a step "
            f"({size_text(gain.averaged_bytes)} each way at {_rate(gain.link)})"
        )
    speeds = f"the swarm trains {amount(gain.swarm_tokens_s)} tokens a second" if gain.swarm_tokens_s else ""
    if gain.alone_tokens_s:
        alone = amount(gain.alone_tokens_s)
        speeds += f", this machine alone {alone}" if speeds else f"alone it trains {alone} tokens a second"
    found = "; ".join(filter(None, (speeds, step, average))) or "nobody knows yet what a step takes"
    level: Level = "ok" if gain.step_s else "skipped"
    causes, nexts = list[str](), list[str]()
    if not gain.step_s:
        causes.append("whether the run gains by this machine is not known: nobody says yet what a step takes there")
    if gain.step_s and gain.averaging_s > gain.step_s:
        level = "warn"
        causes.append(
            f"the swarm would be slower with it: each step would wait {_seconds(gain.averaging_s)} for averaging over "
            f"this link, and takes {_seconds(gain.step_s)} now"
        )
        nexts.append(
            'train text here instead (swarm join --role trainer), or found the run with averaging.mode = "local"'
        )
    if gain.swarm_tokens_s and gain.alone_tokens_s > gain.swarm_tokens_s:
        level = "warn"
        causes.append(
            f"this machine alone would be faster than the swarm: {amount(gain.alone_tokens_s)} tokens a second against "
            f"{amount(gain.swarm_tokens_s)}"
        )
        nexts.append("for speed alone, train here by itself (swarm quickstart); the swarm gains what it lacks")
    return CheckResult(
        name="worth it", found=found, level=level, cause="; ".join(causes), next="; or ".join(nexts), facts=said
    )


def claimed_seconds(vitals: Iterable[Vitals]) -> dict[str, list[float]]:
    """Return what the replicas of each stage say a microbatch takes there; claims that cannot be meant are left out."""
    found: dict[str, list[float]] = {}
    for one in vitals:
        if one.part not in (None, ENDS) and 1e-6 < one.compute_s < 1e6:
            found.setdefault(one.part, []).append(one.compute_s)
    return found


def step_seconds(
    watched: Sequence[tuple[float, int]], vitals: Iterable[Vitals], microbatches: int
) -> tuple[float, bool]:
    """Return a step's seconds, and whether they were seen: else they follow from what members say of their devices, the
    slowest stage's replicas together; (0.0, False) where neither is known.

    Args:
        watched: When, on one clock, which step was first seen closed; the first entry is from when the watch began.
        vitals: What members say.
        microbatches: Of a step.
    """
    if len(watched) >= 3:  # the first closed at an unknown time before
        (first, low), (last, high) = watched[1], watched[-1]
        return (last - first) / (high - low), True
    rates = {part: sum(1 / seconds for seconds in each) for part, each in claimed_seconds(vitals).items()}
    return (microbatches / min(rates.values()), False) if rates else (0.0, False)
