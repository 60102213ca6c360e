"""Found a run: state, roster and founding record, before the founder is a member like any other.

:class:`WaitingRoom` decides which of those that announce themselves are asked whether they are there.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import random
import secrets
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence, Set
from typing import Protocol, runtime_checkable

from swarm.columns import takes
from swarm.consensus.faults import barred_words, newly_barred
from swarm.consensus.placement import Candidate, assign_stages, without_memory
from swarm.consensus.roster import Role, without_server
from swarm.consensus.slowness import rests_until
from swarm.errors import Ending, PeerError, RunEnded
from swarm.health.heartbeat import PING, Ping
from swarm.health.watch import PING_TIMEOUT_S
from swarm.ids import ENDS, PartName, PeerId
from swarm.membership.founding_record import FoundingTimeout, Origin, enough, found, gather_candidates
from swarm.membership.roles import PeerContext
from swarm.membership.rules import admission_policy, spec_of, update_of
from swarm.membership.state_keeper import Beginning
from swarm.models.registry import family_of
from swarm.models.spec import PartSpec
from swarm.network.discovery.records import PeerRecord, numbers_in
from swarm.network.protocols import Directory
from swarm.security.credentials import Credential
from swarm.state.snapshot import Snapshot, digest, initial_snapshot
from swarm.state.transfer import SLOWEST_BYTES_S, StateDonor
from swarm.step.calls import StepCalls
from swarm.waiting import ended

GIVE_UP_S = 2.0
FOUNDING_TIMEOUT_S = 120.0
"""A member answers the founding record when it has downloaded its part. Who has not by then, and does not download, is
replaced by the next who waits."""


SILENT_S = 30.0
"""Who has asked for no frozen weights for so long fetches none."""
SAID = ("role", "name", "stage", "addresses", "region", "outgoing", "beside", "machine", "choice", "credential")
"""What a record in the directory says of a candidate."""


@runtime_checkable
class _Linked(Protocol):
    """An endpoint that knows whom it is connected with."""

    async def links(self) -> Mapping[PeerId, object]: ...


@runtime_checkable
class _Bounded(Protocol):
    """An endpoint at which those whom it does not know have few streams together."""

    def expect(self, peers: int) -> None: ...


SEED_BITS = 128
TELL_S = 2.0
"""How often it is told how far the first state is: of a large model it takes minutes."""


class InitialWeights:
    """The weights that a new run begins with, made of the manifest's seed, which everybody may know, or read from
    the model's files.

    Private ends are made of ``ends_seed``, which stays in this object; None: of one that nobody could guess. Members
    download them. Ends that come from a model's files are as secret as these files are: a public model's are known.
    """

    def __init__(self, around: PeerContext, ends_seed: int | None) -> None:
        self._around = around
        self._ends_seed = secrets.randbits(SEED_BITS) if ends_seed is None else ends_seed

    async def load(self, told: Callable[[int, int], None]) -> tuple[Origin, list[Snapshot]]:
        """See :class:`Beginning`."""
        manifest, snapshots = self._around.manifest, list[Snapshot]()
        specs = [spec_of(manifest, name) for name in manifest.parts]
        for spec in specs:
            told(len(snapshots), len(specs))
            snapshots.append(await self._around.device.run(self._make, spec))
        digests = {snapshot.part: await asyncio.to_thread(digest, snapshot) for snapshot in snapshots}
        return Origin(digests=digests), snapshots

    def _make(self, spec: PartSpec) -> Snapshot:
        manifest = self._around.manifest
        family = family_of(manifest.model)
        seed = self._ends_seed if spec.name == ENDS else manifest.run.seed  # hosted ends are part of a stage
        weights = family.initial_weights(seed, spec, self._around.files.directory)
        layout = family.layout(family.build(spec)).kept_by(update_of(manifest).vectors)
        return initial_snapshot(spec.name, layout, weights)


class Founder:
    """Has the state that the run begins with, and serves it until everybody has his part."""

    def __init__(
        self,
        around: PeerContext,
        directory: Directory,
        calls: StepCalls,
        own_record: Callable[[], PeerRecord],
        donor: StateDonor,
        beginning: Beginning,
    ) -> None:
        self._beginning = beginning
        self._around, self._directory, self._calls = around, directory, calls
        self._own_record, self._donor = own_record, donor
        start = around.manifest.run.start_when
        places: dict[Role, int] = {"stage": start.stage_hosts, "trainer": start.trainers}
        self._room = WaitingRoom(places, random.Random())
        self._given: dict[PeerId, tuple[int, float]] = {}
        self._origin = Origin(digests={})

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """Have room for those who come, each of whom is a stranger until the first record is decided here."""
        endpoint, start = self._around.endpoint, self._around.manifest.run.start_when
        if not isinstance(endpoint, _Bounded):
            yield
            return
        endpoint.expect(start.stage_hosts + start.trainers)
        try:
            yield
        finally:
            endpoint.expect(0)

    async def _loaded(self, waiting: Callable[[str], None]) -> tuple[Origin, list[Snapshot]]:
        """Load the state that the run begins with; where that takes longer ``waiting`` is told how far it is."""
        done = total = 0

        def told(parts: int, of: int) -> None:
            nonlocal done, total
            done, total = parts, of

        async def repeat() -> None:
            while True:
                await self._around.clock.sleep(TELL_S)
                so_far = f": {done} of {total} parts are ready" if total else ""
                waiting(f"the state that the run begins with{so_far}")

        repeating = asyncio.ensure_future(repeat())
        try:
            return await self._beginning.load(told)
        finally:
            await ended([repeating])

    async def found(self, patience_s: float | None, waiting: Callable[[str], None]) -> None:
        """Return when the founding record is decided; ``waiting`` is told who is missing, or has not accepted it yet.

        Raises StateError when the state is not to be had; RunEnded when this peer is barred from the run that goes on,
        when too few peers come, or one does not accept, within ``patience_s`` each (None: wait for ever); a PeerError
        when this peer itself cannot accept. When it ends so, or is cancelled, those who came are told, which takes
        GIVE_UP_S at most.
        """
        try:
            origin, snapshots = await self._loaded(waiting)
            manifest = self._around.manifest
            rules = admission_policy(manifest)
            self._origin = origin = dataclasses.replace(origin, rules=rules)
            if (until := rests_until(origin.barred, self._around.endpoint.peer)) > origin.step + 1:
                raise RunEnded(f"this peer cannot resume the run: {barred_words(until)}", Ending.FAILED)
            for snapshot in snapshots:
                self._donor.offer(snapshot, origin.digests[snapshot.part])
            candidates = await gather_candidates(
                self._candidates,
                self._around.clock,
                enough=self._enough,
                patience_s=patience_s,
                waiting=waiting,
            )
            self._check_served(candidates)
            patience = FoundingTimeout(
                clock=self._around.clock,
                seconds=patience_s,
                waiting=waiting,
                replace_s=FOUNDING_TIMEOUT_S,
                instead=self._instead,
            )
            calls, run_id = self._calls, self._around.manifest.run_id
            await found(calls, run_id, candidates, origin, patience, timeout_s=FOUNDING_TIMEOUT_S)
        except RunEnded as ended:
            await self._give_up(ended.reason)
            raise
        except asyncio.CancelledError:
            await self._give_up("its founder left before the run started")
            raise
        for part in origin.digests:
            self._donor.withdraw(part)

    def _enough(self, found: Sequence[Candidate]) -> tuple[bool, str]:
        """Return whether the run can start with these, and what it waits for. Where they are enough, and have the
        memory for some stages only, or no vote, one more is let in."""
        manifest = self._around.manifest
        start, parts = manifest.run.start_when, manifest.cut_with(self._origin.digests)
        complete, reason = enough(found, start.stage_hosts, start.trainers)
        origin = self._origin
        problem = without_memory(found, parts, origin.homes(found), origin.own(found)) or self._without_vote(found)
        if complete and problem:
            self._room.make_room("stage", sum(candidate.role == "stage" for candidate in found))
            return False, f"{reason}, but {problem}"
        return complete, reason

    def _without_vote(self, found: Sequence[Candidate]) -> str:
        """Return why nobody of these could decide the first step; "" where somebody can."""
        gate, private = self._around.gate, self._around.manifest.split.ends == "private"
        holding = [one for one in found if one.role == "stage" or (one.role == "trainer" and private)]
        if gate is None or not all(gate.rules.mute(gate.state, one.peer, one.credential) for one in holding):
            return ""
        return "none that holds a part may vote, as their invites say"

    def _check_served(self, candidates: Sequence[Candidate]) -> None:
        """Raises RunEnded where one replica of each part is to reduce for the others, and nobody can call one."""
        manifest = self._around.manifest
        if manifest.averaging.strategy == "server":
            origin = self._origin
            roster, _ = assign_stages(candidates, origin.digests, origin.homes(candidates), origin.own(candidates))
            if problem := without_server(roster, self._around.how_to_join):
                raise RunEnded(f"the run cannot start: {problem}", Ending.UNREACHABLE)

    async def _instead(self, late: Collection[PeerId], since: float) -> Sequence[Candidate] | None:
        """See :data:`~swarm.membership.founding_record.Instead`. Who is late goes to the end of those who wait, but one
        that still downloads, and as fast as it must, has time."""
        late = [peer for peer in late if not (self._donor.keeps_up(peer, since) or self._fetches(peer, since))]
        if not late:
            return None
        for peer in late:
            self._room.silent(peer, self._around.clock.monotonic())
        others = [candidate for candidate in await self._candidates() if candidate.peer not in late]
        if not self._enough(others)[0]:
            return None
        try:
            self._check_served(others)
        except RunEnded:
            return None
        return others

    def _fetches(self, peer: PeerId, since: float) -> bool:
        """Return whether it gets frozen weights from us, as fast as it must."""
        store, now = self._around.files.frozen, self._around.clock.monotonic()
        if store is None:
            return False
        given, (before, at) = store.given[peer], self._given.get(peer, (0, now))
        if given > before or peer not in self._given:
            self._given[peer] = before, at = given, now
        return now - at < SILENT_S and given > SLOWEST_BYTES_S * (now - since - FOUNDING_TIMEOUT_S)

    async def _give_up(self, reason: str) -> None:
        """Tell those who wait that the run will not start. A courtesy: takes at most GIVE_UP_S."""
        watch = self._around.watch
        with contextlib.suppress(TimeoutError, PeerError):
            async with asyncio.timeout(GIVE_UP_S):
                watch.follow([PeerId(candidate.peer) for candidate in await self._candidates()])
                await watch.tell_all(self._around.endpoint.peer, reason)

    async def _candidates(self) -> Sequence[Candidate]:
        """Ourselves, and those in the directory who wait for this run, may take part and answer; no more than the run
        asked for, those that answered first. A record may outlive its peer by a minute, and anybody may write one."""
        me, clock, origin = self._around.endpoint.peer, self._around.clock, self._origin
        records, out = await self._directory.lookup(PeerRecord), {me, *newly_barred(origin.barred, origin.step)}
        ready = {peer: record for peer, record in records.items() if record.status == "waiting" and peer not in out}
        own = origin.own(ready.values())
        ready = {peer: record for peer, record in ready.items() if _may_feed(peer, record, own)}
        named = {peer: ready[peer].credential for peer in sorted(ready, key=self._room.since)}
        waiting: dict[PeerId, Role] = {peer: ready[peer].role for peer in one_per_grant(self._own_record(), named)}
        asked = self._room.to_ask(waiting, await self._connected(), clock.monotonic())
        answers = await asyncio.gather(*(self._answers(peer, records[peer]) for peer in asked))
        for peer, answered in zip(asked, answers, strict=True):
            (self._room.answered if answered else self._room.silent)(peer, clock.monotonic())
        here = {peer: records[peer] for peer in self._room.first(waiting)}
        return [
            Candidate(peer=peer, unfit=numbers_in(record.unfit), **{name: getattr(record, name) for name in SAID})
            for peer, record in [(me, self._own_record()), *here.items()]
        ]

    async def _connected(self) -> Set[PeerId]:
        """Those who have a connection with us, so that calling it back reaches nobody who did not ask for it."""
        endpoint = self._around.endpoint
        try:
            return set(await endpoint.links()) if isinstance(endpoint, _Linked) else set()
        except PeerError:
            return set()

    async def _answers(self, peer: PeerId, record: PeerRecord) -> bool:
        self._around.endpoint.learn(peer, record.addresses)
        try:
            await self._around.endpoint.call(peer, PING, Ping(), timeout_s=PING_TIMEOUT_S)
        except PeerError:
            return False
        return True


def _may_feed(peer: PeerId, record: PeerRecord, own: Mapping[PartName, Collection[str]]) -> bool:
    """Return whether nobody else keeps to itself what the microbatches of one that waits would pass."""
    choice = record.choice or 0
    return record.role != "trainer" or all(peer in may for part, may in own.items() if takes(part, choice))


# --- waiting room (pure) ---------------------------------------------------------------------------------------------
# Anybody may write records into the directory, thousands of them, with any address and any claim about age. So what
# counts is what was found out here: who answered first comes first, who did not answer is left alone for a while, and
# however many there are, few are called at a time.


NEWCOMERS = 16
"""How many that never answered are called at a time."""
LEFT_ALONE_S = 10.0


def one_per_grant(me: PeerRecord, waiting: Mapping[PeerId, Credential | None]) -> list[PeerId]:
    """Return those that wait without any that shows a grant which one before it shows, or ``me``: it is for one."""
    used, found = set[str]() if me.credential is None else {me.credential.grant.serial}, list[PeerId]()
    for peer, credential in waiting.items():
        if credential is None or credential.grant.serial not in used:
            found.append(peer)
        if credential is not None:
            used.add(credential.grant.serial)
    return found


class WaitingRoom:
    """``places`` says how many of each role are needed. A decision costs O(records)."""

    def __init__(self, places: Mapping[Role, int], rng: random.Random) -> None:
        self._places, self._rng = dict(places), rng
        self._came: dict[PeerId, float] = {}
        self._silent: dict[PeerId, float] = {}

    def to_ask(self, waiting: Mapping[PeerId, Role], connected: Container[PeerId], now: float) -> list[PeerId]:
        """Return whom to call: those who answered before, as many as there are places, and a few others of roles that
        lack some; first who is ``connected`` with us already, so that it called us, then by chance, all alike.

        ``waiting`` are those who announce themselves; all else is forgotten about the rest.
        """
        self._came = {peer: since for peer, since in self._came.items() if peer in waiting}
        self._silent = {peer: until for peer, until in self._silent.items() if peer in waiting and until > now}
        known = self.first(waiting)
        open_ = {role for role, places in self._places.items() if sum(waiting[p] == role for p in known) < places}
        new = [p for p, role in waiting.items() if role in open_ and p not in self._came and p not in self._silent]
        self._rng.shuffle(new)
        new.sort(key=lambda peer: peer not in connected)
        return known + new[:NEWCOMERS]

    def since(self, peer: PeerId) -> float:
        """Return when it answered first."""
        return self._came.get(peer, math.inf)

    def first(self, waiting: Mapping[PeerId, Role]) -> list[PeerId]:
        """Those who answered, in the order in which they came, no more of each role than there are places."""
        left, found = dict(self._places), []
        for peer in sorted(self._came, key=lambda peer: self._came[peer]):
            role = waiting.get(peer)
            if role is not None and left.get(role, 0) > 0:
                left[role] -= 1
                found.append(peer)
        return found

    def make_room(self, role: Role, taken: int) -> None:
        """Have one place more for a role, once so many have ``taken`` all that there are."""
        if taken >= self._places[role]:
            self._places[role] += 1

    def answered(self, peer: PeerId, now: float) -> None:
        """It is there."""
        self._came.setdefault(peer, now)

    def silent(self, peer: PeerId, now: float) -> None:
        """It is not; and when it comes back, others were there before it."""
        self._came.pop(peer, None)
        self._silent[peer] = now + LEFT_ALONE_S
