"""The checks of ``swarm doctor`` that take seconds, at the same time, all of them within a limit.

While torch is imported the addresses of the invite are probed; what asks the run and what computes go on at the
same time. What does not end in time is said to have not, and left behind: :class:`SlowChecks` is the page to read.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from peers.console.words import command_name, listed
from peers.doctor.machine import DoctorWishes, MachineFacts
from peers.doctor.results import CheckResult, DoctorReport, Level, refused
from swarm.clock import Clock
from swarm.errors import ConfigError, PeerError, SwarmError
from swarm.ids import ENDS

if TYPE_CHECKING:
    from peers.doctor.compute import BlockSpeed, DeviceBench, PlannedPart
    from peers.doctor.network import RunGuest, RunSeen
    from peers.invites.invite import Contacts
    from swarm.ids import PeerId
    from swarm.membership.vitals import Vitals
    from swarm.network.reach.probe import ProbedLink

T = TypeVar("T")
_THREAD, _MOMENT_S = "doctor", 0.2

CLOSING_S, LAST_S = 2.5, 0.4
"""Of the limit, what is left for the guest's daemon to end in order; and for the process itself."""
STARTUP_S, LINK_S, SPEED_S, WATCH_S = 6.0, 3.0, 2.5, 4.0
MAX_MEMBERS = 32
"""Of a run that are asked how they are."""
WORTH = "worth it"
OF_THE_RUN = {
    "round trip": "how long a message takes there and back",
    "clock": "how far the clocks are apart",
    "bandwidth": "how much goes over the links",
    "reachable": "how others reach this machine",
    "parts": "which parts of the model fit here",
    "speed": "how fast they are here",
    WORTH: "whether the run gains by this machine",
}
"""The checks that need the run, and what each would say."""


class SlowChecks:
    """What takes seconds. Work that does not end in time goes on in a thread that ends with the process."""

    def __init__(
        self,
        wishes: DoctorWishes,
        report: DoctorReport,
        facts: MachineFacts,
        contacts: Contacts | None,
        clock: Clock,
    ) -> None:
        self._wishes, self._report, self._facts, self._contacts, self._clock = wishes, report, facts, contacts, clock
        self._ends = clock.monotonic() + wishes.limit_s - _age_s(clock)

    async def run(self) -> None:
        """Do them all, and end in time: what has not ended by then is cancelled and, where that takes time, left."""
        work = asyncio.create_task(self._work())
        await asyncio.wait({work}, timeout=self._left_s - LAST_S)
        if work.done():
            work.result()
        if self._contacts is not None:
            self._say_what_is_missing()

    async def _work(self) -> None:
        probing = None if self._contacts is None else asyncio.create_task(self._probe(self._contacts))
        ready = await self._import()
        computing = ready and self._report.passed("device") and await self._try_device()
        reached = [] if probing is None else await probing
        if ready and self._contacts is not None and reached and self._report.passed("port"):
            await self._ask_run(self._contacts, reached, computing=computing)

    def _say_what_is_missing(self) -> None:
        """Of the checks that need the run, those without a result: in one line, where it could not be asked at all."""
        there = {result.name for result in self._report.results}
        missing = [name for name in OF_THE_RUN if name not in there]
        if not self._report.passed("run"):
            unknown = listed([name for name in missing if name != WORTH])
            found = f"it could not be asked, so nothing is known of {unknown}, nor {OF_THE_RUN[WORTH]}"
            self._report.add(CheckResult(name="of the run", found=found, level="skipped"))
            return
        for name in missing:
            found = f"not known is {OF_THE_RUN[name]}: something that it needs failed, or took too long"
            self._report.add(CheckResult(name=name, found=found, level="skipped"))

    @property
    def _left_s(self) -> float:
        return max(0.05, self._ends - self._clock.monotonic())

    @property
    def _device(self) -> str:
        """The first of several."""
        return re.split("[,+]", self._wishes.device)[0]

    async def _until(self, future: Awaitable[T]) -> T:
        """Raises TimeoutError where it does not end while there is time."""
        return await asyncio.wait_for(future, max(0.05, self._left_s - CLOSING_S))

    async def _import(self) -> bool:
        """Import what the rest needs. False where that is not here or does not end."""
        if self._facts.torch is None or self._facts.missing:
            return False

        def everything() -> None:
            import peers.doctor.compute
            import peers.doctor.network
            import swarm.membership.vitals

            del peers, swarm

        try:
            await self._until(in_thread(everything))
        except TimeoutError:
            self._report.add(CheckResult(
                name="imports", found="torch and hivemind take longer than there is time", level="warn",
                cause="a cold or slow disk, or a busy machine: a peer starts as slowly",
                next="repeat the command with more time: add --timeout 60"))  # fmt: skip
            return False
        except Exception as error:  # noqa: BLE001 - whatever a broken installation raises is what was looked for
            self._report.add(CheckResult(
                name="imports", found=f"{type(error).__name__}: {error}", level="fail",
                cause="a package that a peer needs is broken, or does not fit the others", check="pip check",
                next="Install swarm again."))  # fmt: skip
            return False
        return True

    async def _probe(self, contacts: Contacts) -> list[str]:
        """The addresses that are worth dialling."""
        from peers.doctor.contacts import judge_contacts, probe_addresses

        probes = await probe_addresses(contacts.addresses)
        self._report.add(judge_contacts(probes))
        return [probe.address for probe in probes if probe.may_answer]

    # --- with torch ----------------------------------------------------------------------------------------------

    async def _try_device(self) -> bool:
        from peers.doctor.compute import try_device
        from peers.doctor.judge import judge_device

        name = self._device
        try:
            seen = await self._until(in_thread(try_device, name))
        except TimeoutError:
            self._report.add(_late("computes", f"{name} does not answer", "fail"))
        except ConfigError as error:
            self._report.add(refused("computes", f"torch has no {name}", error))
        except RuntimeError as error:
            self._report.add(_no_device(name, error))
        else:
            self._report.add(judge_device(seen))
            return True
        return False

    async def _plan(self, seen: RunSeen) -> DevicePlan | None:
        """Which parts fit; with what their speed can be measured."""
        from peers.doctor.compute import DeviceBench
        from peers.doctor.judge import judge_parts

        def planned() -> DevicePlan:
            bench = DeviceBench(seen.manifest, self._device, self._wishes.threads, self._clock)
            return DevicePlan(bench=bench, parts=bench.parts())

        try:
            plan = await self._until(in_thread(planned))
        except TimeoutError:
            self._report.add(_late("parts", "the model takes long to be built"))
        except SwarmError as error:
            self._report.add(refused("parts", "the run's model cannot be built here", error))
        else:
            self._report.add(judge_parts(plan.parts, self._facts.disk_free))
            return plan
        return None

    async def _speed(self, plan: DevicePlan, stage: PlannedPart) -> BlockSpeed | None:
        limit_s = min(SPEED_S, self._left_s - CLOSING_S)
        try:
            return await self._until(in_thread(plan.bench.speed, stage.part, limit_s))
        except TimeoutError:
            self._report.add(_late("speed", f"a microbatch of {stage.part} takes longer than there is time"))
        except RuntimeError as error:
            self._report.add(CheckResult(
                name="speed", found=f"{stage.part} cannot be computed here: {_first_line(error)}", level="warn",
                cause="the memory that is free does not hold a microbatch, or the device fails",
                next=f"{command_name()} join INVITE --activation-checkpointing on, or --device cpu"))  # fmt: skip
        return None

    # --- with the run --------------------------------------------------------------------------------------------

    async def _ask_run(self, contacts: Contacts, reached: Sequence[str], *, computing: bool) -> None:
        from peers.doctor.network import guest_of

        welcome = False
        try:
            async with asyncio.timeout(self._left_s - CLOSING_S):
                startup_s = min(STARTUP_S, self._left_s - CLOSING_S)
                async with guest_of(contacts, reached, self._wishes.listen, self._clock, startup_s=startup_s) as guest:
                    welcome = True
                    await self._look_around(guest, computing=computing)
        except TimeoutError:
            if not welcome:
                self._report.add(_late("run", "no contact says in time what its run is", "fail"))
        except SwarmError as error:
            self._report.add(refused("run", "the contact cannot be asked", error))

    async def _look_around(self, guest: RunGuest, *, computing: bool) -> None:
        from peers.doctor.judge import judge_run

        seen = guest.seen
        self._report.add(judge_run(seen))
        ends = min(self._clock.monotonic() + WATCH_S, self._ends - CLOSING_S - 0.5)
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(guest.watch_steps(ends))
            planning = group.create_task(self._plan(seen)) if computing else None
            figures = await self._measure(guest)
            reaching = group.create_task(self._reach(guest))
            plan = None if planning is None else await planning
            stage = None if plan is None else plan.stage_to_join(seen)
            own = None if plan is None or stage is None else await self._speed(plan, stage)
            await reaching
        if plan is not None and stage is not None:
            self._judge_gain(seen, figures, plan, stage, own, watching.result())

    async def _measure(self, guest: RunGuest) -> RunFigures:
        """Return what the members say, and the link with the contact; one after the other, or one would measure the
        other."""
        from peers.doctor.judge import judge_bandwidth, judge_clock, judge_round_trip
        from swarm.membership.vitals import VitalsBoard
        from swarm.network.reach.probe import ProbedLink

        seen, add, board = guest.seen, self._report.add, VitalsBoard(guest.endpoint, self._clock)
        try:
            contact_s = await guest.round_trip()
        except PeerError as error:
            add(refused("round trip", "the contact is gone again", error))
            return RunFigures(vitals={}, link=ProbedLink(up=0.0, down=0.0, up_bytes=0, down_bytes=0))
        said = await board.look(seen.members[:MAX_MEMBERS])
        now = self._clock.wall()
        trips = [seconds for peer, seconds in board.round_trips.items() if peer != seen.contact]
        add(judge_round_trip(contact_s, trips), judge_clock([vitals.wall - now for vitals in said.values()]))
        link = await guest.link(min(LINK_S, self._left_s - CLOSING_S))
        measured = () if seen.head is None else tuple(float(rate) for _, rate in seen.head.links.values() if rate)
        add(judge_bandwidth(link, measured))
        return RunFigures(vitals=said, link=link)

    async def _reach(self, guest: RunGuest) -> None:
        from peers.doctor.judge import judge_reach

        reach, way = await guest.reach(), await guest.way_to_contact()
        self._report.add(judge_reach(reach, way, near=guest.all_near()))

    def _judge_gain(
        self,
        seen: RunSeen,
        figures: RunFigures,
        plan: DevicePlan,
        stage: PlannedPart,
        own: BlockSpeed | None,
        watched: Sequence[tuple[float, int]],
    ) -> None:
        from peers.doctor.judge import Gain, claimed_seconds, judge_gain, judge_speed, step_seconds
        from peers.plan.work import averaged_bytes

        manifest, vitals = seen.manifest, figures.vitals
        replicas = claimed_seconds(vitals.values()).get(stage.part, [])
        if own is not None:
            self._report.add(judge_speed(stage.part, own, replicas))
        step_s, was_seen = step_seconds(watched, vitals.values(), manifest.step_microbatches)
        link = figures.link
        self._report.add(judge_gain(Gain(
            part=stage.part,
            replicas=0 if seen.head is None else len(seen.head.members.replicas(stage.part)),
            parameters=stage.parameters,
            bytes_a_parameter=averaged_bytes(manifest),
            rounds=manifest.averaging.local.sync_every if manifest.averaging.mode == "local" else 1,
            tokens_a_step=manifest.step_microbatches * manifest.batch.microbatch_size * manifest.model.context,
            tokens_a_microbatch=manifest.batch.microbatch_size * manifest.model.context,
            step_s=step_s,
            watched=was_seen,
            whole_s=own.whole_s if own is not None else 0.0,
            link=min(link.up, link.down or link.up),
            alone_fits=plan.whole_fits,
        )))  # fmt: skip


# --- helpers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """The parts of a run's model on this machine's device, and the bench on which they are measured."""

    bench: DeviceBench
    parts: Sequence[PlannedPart]

    @property
    def whole_fits(self) -> bool:
        """Return whether one machine like this could train the whole model: each part fits beside the others."""
        return not any(one.lacking for one in self.parts) and sum(one.bytes for one in self.parts) <= self.bench.free()

    def stage_to_join(self, seen: RunSeen) -> PlannedPart | None:
        """Return the stage that a peer that joins would get: of those that fit the one with the fewest replicas."""
        held = None if seen.head is None else seen.head.members
        stages = [one for one in self.parts if one.part != ENDS and not one.lacking]
        return min(stages, key=lambda one: 0 if held is None else len(held.replicas(one.part)), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """What the members say of themselves, by peer, and the link with the contact."""

    vitals: Mapping[PeerId, Vitals]
    link: ProbedLink


def _age_s(clock: Clock) -> float:
    """Since this process was started, which is where a person begins to wait: a second or so, if it is a command's."""
    import psutil

    born: float = psutil.Process().create_time()
    return min(2.0, max(0.0, clock.wall() - born))


def _late(name: str, found: str, level: Level = "warn") -> CheckResult:
    return CheckResult(name=name, found=found, level=level, cause="it did not end in the time there is",
                       next="repeat the command with more time: add --timeout 60")  # fmt: skip


def _no_device(name: str, error: RuntimeError) -> CheckResult:
    return CheckResult(
        name="computes", found=f"{name} computes nothing: {_first_line(error)}", level="fail",
        cause="the driver and this build of torch do not fit, or the device is in use or broken",
        check="does nvidia-smi list it, and with how much free memory?",
        next=f"Install a torch for this driver, or use the CPU: {command_name()} doctor --device cpu",
    )  # fmt: skip


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def in_thread(work: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    """Do work that blocks, off the event loop, on a thread that the process need not wait for at its end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = work(*arguments)
        except BaseException as error:  # noqa: BLE001 - the one who awaits it gets it
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, daemon=True, name=_THREAD).start()
    return future


def still_working() -> bool:
    """Return whether work of :func:`in_thread` does not end; that which has just ended gets a moment to be gone."""
    for thread in [thread for thread in threading.enumerate() if thread.name == _THREAD]:
        thread.join(_MOMENT_S)
        if thread.is_alive():
            return True
    return False
