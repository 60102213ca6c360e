"""A whole swarm in one process: real memberships, deciders and numbers over the in-memory network.

What differs from a run of processes is the network underneath and that everybody's events end in one list.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import json
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from data_shards.build import build_shard
from data_shards.tokenize import tokenizer_digest, train_tokenizer
from peers.checkpoints.keeper import CheckpointKeeper
from peers.console.words import command_to_join
from peers.data.trainer_data import domain_of, open_source
from peers.foreign_model import files_here
from peers.frozen import frozen_services, with_frozen
from peers.home.places import FROZEN
from peers.options.fields import settings_of
from peers.options.model import PeerOptions
from peers.settings import PeerSettings, member_settings
from swarm.clock import Clock, SystemClock
from swarm.config import Manifest, parse_manifest
from swarm.device import Device, DeviceThread, resolve_device
from swarm.events import EventList, EventT
from swarm.health.watch import HealthWatch
from swarm.ids import PeerId, RunId
from swarm.membership.admission import open_gate
from swarm.membership.composition import compose
from swarm.membership.membership import Membership
from swarm.membership.roles import PeerContext
from swarm.models.registry import lora_of
from swarm.monitoring.recorder import Recorder
from swarm.network.protocols import Directory, Endpoint
from swarm.pipeline.trainer.held_out import HeldOutRows
from swarm.security.credentials import Credential, Grant, credential_for, sign_grant
from swarm.security.signing import PrivateIdentity
from swarm.sim.network import SimNetwork
from swarm.state.frozen import FrozenStore

TEXT = "The quick brown fox jumps over the lazy dog and trains a model with its friends, number {} of many. "
VOCAB = 300


class OpenEndpoint(Endpoint, Protocol):
    """An endpoint that can enter a run, of either world."""

    @property
    def directory(self) -> Directory:
        """The run's directory."""

    async def enter(self, run: RunId) -> None:
        """Serve and call within a run."""


@dataclass(slots=True, kw_only=True)
class LocalPeer:
    """One member of a local swarm. The same ``number`` is the same identity; ``recorder`` writes its events where the
    swarm's are kept."""

    settings: PeerSettings
    number: int
    endpoint: OpenEndpoint
    around: PeerContext
    founder: PeerId
    contact: PeerId
    events: EventList
    recorder: Recorder | None = None
    membership: Membership | None = None
    outcome: str | BaseException | None = None
    task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Take part until the run is over, or it has left: ``outcome`` says why."""
        try:
            self.outcome = await self._run()
        except BaseException as error:
            self.outcome = error
            raise

    async def _run(self) -> str:
        manifest = self.around.manifest
        await self.endpoint.enter(manifest.run_id)
        options, around = self.settings.options, self.around
        choice = domain_of(manifest, options.domain, self.settings.role)
        if options.data is not None:
            source = open_source(manifest, options.data, self.endpoint.peer, choice)
            around = dataclasses.replace(around, source=source)
        if options.eval is not None:
            rows = open_source(manifest, options.eval, self.endpoint.peer, choice)
            around = dataclasses.replace(around, held_out=HeldOutRows(source=rows, every=options.eval_every or 1))
        for service in frozen_services(manifest.model, around.files):
            self.endpoint.mount(service)
        self.membership = compose(
            member_settings(self.settings, choice=choice),
            around,
            self.endpoint.directory,
            contact=self.contact,
            founder=self.founder,
            keeper=CheckpointKeeper(self.settings, around),
        )
        return await self.membership.run()


class LocalSwarm:
    """``await LocalSwarm(tmp_path, …).run()`` trains until the last step is closed.

    ``overrides`` are manifest sections; ``documents`` are the trainers' texts, one tuple of documents each; ``sites``
    are settings of peers by name. With :attr:`records` each peer's events are also in its home, as a real one's.
    ``on_added`` hear the name of each new peer; an identity in ``twins`` may be there twice.
    """

    records = False
    _started = 0

    def __init__(
        self,
        root: Path,
        *,
        hosts: int = 2,
        trainers: int = 1,
        documents: Iterable[Iterable[str]] | None = None,
        max_in_flight: int | None = None,
        sites: Mapping[str, Mapping[str, Any]] | None = None,
        **overrides: dict[str, Any],
    ) -> None:
        self.root = root
        texts = [list(texts) for texts in documents] if documents else [_documents(i) for i in range(trainers)]
        self.tokenizer = train_tokenizer([text for shard in texts for text in shard], VOCAB)
        self.shards = [root / f"shard-{index}" for index in range(trainers)]
        for path, shard in zip(self.shards, texts, strict=True):
            build_shard(path, shard, self.tokenizer)
        self.manifest = small_manifest(self.tokenizer, hosts, trainers, overrides)
        if lora_of(self.manifest.model) is not None:  # the founder has what is frozen, the others fetch it
            self.manifest = with_frozen(self.manifest, None, FrozenStore(root / "bootstrap" / FROZEN), lambda _: None)
        self.network = SimNetwork(self._clock(""))
        self.hosts = hosts
        self.peers: dict[str, LocalPeer] = {}
        self.twins: set[PeerId] = set()
        self.on_added: list[Callable[[str], None]] = []
        self._sites = {"": {"max_in_flight": max_in_flight}, **(sites or {})}

    def _incarnations(self) -> int:
        """Another for every peer that is started, whatever its identity."""
        self._started += 1
        return self._started

    def _clock(self, name: str) -> Clock:
        """A peer's clock, or ("") the network's."""
        return SystemClock()

    def _device(self, name: str) -> Device:
        """Return what runs a peer's torch."""
        return DeviceThread(resolve_device("cpu"))

    async def open(self) -> None:
        """Open everybody's endpoint; nobody does anything yet."""
        self.founder = founder = await self._add("bootstrap", "bootstrap", 0)
        for index in range(self.hosts):
            await self._add(f"host-{index}", "stage", 100 + index, founder)
        for index, shard in enumerate(self.shards):
            await self._add(f"trainer-{index}", "trainer", 200 + index, founder, data=shard)

    async def _endpoint(self, home: Path, identity: PrivateIdentity) -> OpenEndpoint:
        return self.network.endpoint(identity.peer, twin=identity.peer in self.twins)

    async def _add(
        self,
        name: str,
        role: Any,
        number: int,
        founder: PeerId | None = None,
        contact: PeerId | None = None,
        **more: Any,
    ) -> PeerId:
        identity = _identity(number)
        home = self.root / name
        home.mkdir(mode=0o700, exist_ok=True)  # a peer that was started again keeps its disk
        endpoint = await self._endpoint(home, identity)
        fixed = {"ends_seed": self.manifest.run.seed} if role == "bootstrap" else {}  # the same weights in every run
        more = {**self._sites[""], **fixed, **self._sites.get(name, {}), **more}
        settings = PeerSettings(**split({"home": home, "name": name, "role": role, **more}))
        events, clock = EventList(), self._clock(name)
        admission = open_gate(self.manifest, endpoint, self.credential_of(name, role, identity.peer))
        around = PeerContext(
            manifest=self.manifest,
            identity=identity,
            endpoint=endpoint,
            device=self._device(name),
            events=events,
            clock=clock,
            watch=HealthWatch(endpoint, clock, incarnation=self._incarnations()),
            how_to_join=functools.partial(command_to_join, admission=self.manifest.admission.mode),
            activation_checkpointing=settings.options.activation_checkpointing,
            deferred_weights=settings.options.deferred_weights == "on",
            files=files_here(self.manifest.model, settings),
            admission=admission,
            chance=random.Random(f"{self.manifest.run.seed}-{name}").random,
        )
        peer = self.peers[name] = LocalPeer(
            settings=settings,
            number=number,
            endpoint=endpoint,
            around=around,
            founder=founder or identity.peer,
            contact=contact or founder or identity.peer,
            events=events,
        )
        if self.records:
            # Without a bound: who checks invariants sees all that happened.
            peer.recorder = Recorder(home / "events.jsonl", identity.peer, clock, max_bytes=math.inf)
            events.listeners.append(peer.recorder.emit)
        for hear in self.on_added:
            hear(name)
        return identity.peer

    def credential_of(self, name: str, role: Any, peer: PeerId) -> Credential | None:
        """Return what admits a new peer, in a run that not everybody may join: a grant of the founder's, for the whole
        run."""
        issuer = _identity(0)
        if not self.manifest.admission.closed or peer == issuer.peer:
            return None
        grant = Grant(
            run=self.manifest.run_id,
            serial=hashlib.sha256(name.encode()).hexdigest()[:16],
            name=name,
            organisation=self.organisation_of(name),
            role=role if role in ("stage", "trainer") else "any",
            until_step=self.manifest.run.steps,
            key=peer,
        )
        return credential_for(sign_grant(grant, issuer), peer, None)

    def organisation_of(self, name: str) -> str:
        """Return what the grant of a new peer names: that of the founder, where microbatches stay in one."""
        return self.manifest.admission.organisation

    async def run(self, *, timeout_s: float = 180.0) -> None:
        """Run every membership to its end. Raises what ends one, in an ExceptionGroup."""
        try:
            if not self.peers:
                await self.open()
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                self._group = group
                for peer in list(self.peers.values()):
                    self._start(peer)
        finally:
            await self._bury()
            for peer in self.peers.values():
                await peer.endpoint.close()
                await peer.around.device.close()
            for peer in self.peers.values():  # what others do meanwhile is told to the last
                if peer.recorder is not None:
                    peer.recorder.close()

    async def _bury(self) -> None:
        """End what stands still, where killed peers do: before anything of theirs is closed."""

    async def join(
        self, name: str, role: Any, number: int, *, contact: str | None = None, may_fail: bool = False, **settings: Any
    ) -> LocalPeer:
        """Start one more peer beside a run that is under way; the same ``number`` is the same identity. One that
        ``may_fail`` has its error as ``outcome`` and ends nothing."""
        through = None if contact is None else self.peers[contact].endpoint.peer
        await self._add(name, role, number, self.founder, through, **settings)
        self._start(self.peers[name], may_fail=may_fail)
        return self.peers[name]

    def kill(self, name: str) -> None:
        """The peer is gone without a word."""
        peer = self.peers[name]
        self.network.kill(peer.endpoint.peer)
        if peer.task is not None:
            peer.task.cancel()

    def _start(self, peer: LocalPeer, *, may_fail: bool = False) -> None:
        async def live() -> None:
            try:
                await peer.run()
            except Exception:
                if not may_fail:
                    raise
            finally:
                await peer.endpoint.close()

        peer.task = self._group.create_task(live(), name=peer.settings.name)

    def events(self, kind: type[EventT]) -> list[EventT]:
        """All peers' events of a kind."""
        return [event for peer in self.peers.values() for event in peer.events.of(kind)]

    def history(self, name: str = "bootstrap") -> list[dict[str, Any]]:
        """A peer's close records, by default the founder's, decoded; not what proves them: peers differ in it."""
        records = [json.loads(line) for line in (self.root / name / "history.jsonl").read_text().splitlines()]
        return [{key: value for key, value in record.items() if key != "decision"} for record in records]


def _identity(number: int) -> PrivateIdentity:
    return PrivateIdentity(hashlib.sha256(str(number).encode()).digest())


def founder_id() -> PeerId:
    """The founder's peer id, which is the same in every such swarm."""
    return _identity(0).peer


def split(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a PeerSettings, named alone; what a person says of it goes below ``options``."""
    own = {key: value for key, value in given.items() if key in PeerSettings.model_fields}
    said = {key: value for key, value in given.items() if key not in own and key in settings_of(PeerOptions)}
    unknown = {key: value for key, value in given.items() if key not in own and key not in said}
    return {**own, **unknown, **({"options": PeerOptions(**said)} if said else {})}


def _documents(index: int) -> list[str]:
    return [TEXT.format(index) * 3 + f"Document {number} says {index * 31 + number * 7}." for number in range(24)]


def small_manifest(tokenizer: bytes, hosts: int, trainers: int, overrides: dict[str, dict[str, Any]]) -> Manifest:
    """A manifest that trains in milliseconds; ``overrides`` replace keys of its sections."""
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": 3, "copies": 0, "start_when": {"stage_hosts": hosts, "trainers": trainers}},
        "model": {"vocab_size": VOCAB, "dim": 32, "layers": 4, "heads": 2, "context": 16},
        "split": {"stages": 2},
        "tokenizer": {"digest": tokenizer_digest(tokenizer)},
        "batch": {"microbatch_size": 2, "microbatches_per_step": 6},
    }
    for section, keys in overrides.items():
        sections[section] = {**sections.get(section, {}), **keys}
    return parse_manifest(sections, "the swarm in memory")
