"""Answer requests on a running peer's control socket, and report its status."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

from peers.console.words import CommandError, codecs_text, command_name, listed, sharing_text, with_commands
from peers.control.admitting import Admitting, granted_by, open_run
from peers.control.sent import SentReport, receivers
from peers.control.server import Command
from peers.control.status import MemberReport, Revocation, StatusReport, SwarmLook
from peers.exit_codes import EXIT_USAGE
from peers.home.places import home_option
from peers.invites.invite import invite_to
from peers.settings import PeerSettings
from swarm.columns import host_parts
from swarm.config import Manifest
from swarm.consensus.changes import may_agree
from swarm.consensus.copies import copies_of, fewer_copies, on_one_machine
from swarm.consensus.trials import few_trainers
from swarm.errors import Ending, PeerError, RunEnded
from swarm.health.watch import HealthWatch
from swarm.ids import ENDS, PeerId, distinct_names, variant_of
from swarm.membership.membership import Membership
from swarm.membership.status_types import VariantReport
from swarm.membership.vitals import Vitals, VitalsBoard
from swarm.models.registry import delinked_at, shares
from swarm.network.discovery.records import PeerRecord
from swarm.network.endpoint import LibP2PEndpoint
from swarm.pipeline.activity import AuditCounts
from swarm.pipeline.trainer.held_out import HeldOutRows
from swarm.step.blocked import few_voters

LOOKUP_S = 1.0
"""How long the directory may take: the command that asks gives up after two seconds."""

_NOT_ASKED = {
    "auto": ("by itself", "start who held the lost part where it was: the run goes back as soon as every part of a "
             "checkpoint is at peers that are there"),
    "never": ("never", "start who held the lost part where it was; where nobody can, end the run, then "
              "{swarm} new --resume"),
}  # fmt: skip
"""When a run goes back that does not ask whether it may, and what to do instead."""


class NodeCommands:
    """The commands of one peer. ``adopt`` gives it what is known only later; until then it is ``starting``."""

    def __init__(self, settings: PeerSettings, peer: str, started: float, leave: Callable[[str], str]) -> None:
        self._settings, self._peer, self._started, self._leave = settings, peer, started, leave
        self._manifest: Manifest | None = None
        self._endpoint: LibP2PEndpoint | None = None
        self._membership: Membership | None = None
        self._watch: HealthWatch | None = None
        self._board: VitalsBoard | None = None
        self._admitting: Admitting | None = None
        self.held_out: HeldOutRows | None = None
        """What a trainer measures the loss of, and what it was."""

    def adopt(
        self,
        manifest: Manifest,
        endpoint: LibP2PEndpoint,
        membership: Membership,
        watch: HealthWatch,
        board: VitalsBoard | None = None,
        admitting: Admitting | None = None,
    ) -> None:
        """The peer takes part in a run; ``watch`` says who of the others does not answer, ``board`` how they are;
        ``admitting`` lets others in, where they must be."""
        self._admitting = admitting
        self._manifest, self._endpoint, self._membership = manifest, endpoint, membership
        self._watch, self._board = watch, board

    def table(self) -> Mapping[str, Command]:
        """The commands by name, for :class:`peers.control.server.ControlServer`."""
        return {
            "status": self._status,
            "peers": self._peers,
            "drain": self._drain,
            "rewind": self._rewind,
            "invite": self._invite,
            "revoke": self._revoke,
            "issuers": self._issuers,
            "look": self._look,
            "sent": self._sent,
        }

    async def _status(self, request: Mapping[str, Any]) -> StatusReport:
        return self.standing()

    def standing(self) -> StatusReport:
        """This peer, now."""
        membership, manifest, endpoint = self._membership, self._manifest, self._endpoint
        situation = None if membership is None else membership.situation
        names: Mapping[str, str] = {} if membership is None else membership.roster.names
        tested = manifest is not None and manifest.optimizer.trainer_test
        return StatusReport(
            name=names.get(self._peer, self._settings.name),
            peer=self._peer,
            pid=os.getpid(),
            role=self._settings.role,
            phase="starting" if situation is None else situation.phase,
            waiting_for="" if situation is None else with_commands(situation.waiting_for),
            ends_by=None if situation is None else situation.ends_by,
            run="" if manifest is None else manifest.run_id,
            run_name="" if manifest is None else manifest.run.name,
            part=None if situation is None else situation.part,
            reason="" if situation is None else situation.reason,
            copies=() if membership is None else membership.copies,
            fewer_copies=self._fewer_copies(),
            few_voters="" if membership is None else few_voters(len(membership.roster.entitled)),
            few_trainers="" if membership is None or not tested else few_trainers(len(membership.roster.trainers)),
            barred="; ".join(f"{peer} {why}" for peer, why in self._barred().items()),
            step=0 if situation is None else situation.step,
            steps=0 if manifest is None else manifest.run.steps,
            loss=None if situation is None else situation.loss,
            tokens_per_s=None if situation is None else situation.tokens_per_s,
            tokens=(0, 0) if situation is None else situation.tokens,
            members=0 if membership is None else len(membership.roster),
            lost=len(self._lost()),
            addresses=() if endpoint is None else endpoint.addresses,
            reachability="unknown" if situation is None else situation.reachability,
            started=self._started,
            disk="" if situation is None else "; ".join(f"{w}: {why}" for w, why in situation.disk.items()),
            averaging=() if situation is None else situation.averaging,
            unfed=() if situation is None else situation.unfed,
            averages="" if manifest is None else manifest.averaging.described,
            codecs=self._codecs(),
            early=situation.early if situation and manifest and manifest.speed.overlaps else (),
            capacities=() if situation is None or not any(situation.capacities) else situation.capacities,
            variants=self._variants(),
            sharing=self._sharing(),
            held_out=() if self.held_out is None or self.held_out.newest is None else self.held_out.newest,
            device_use=None if situation is None else situation.device_use,
            mixed=0 if situation is None else situation.mixed,
            mixed_alone=0 if situation is None else situation.mixed_alone,
            audits=AuditCounts() if situation is None else situation.activity().audits,
            memory=None if situation is None else situation.memory(),
            admission=None if self._admitting is None else self._admitting.report(),
        )

    def _barred(self) -> Mapping[str, str]:
        """Return who may not join yet, for it was proven wrong, in words."""
        if self._membership is None:
            return {}
        barred, step = self._membership.roster.barred, self._membership.situation.step
        proven = f"is barred until step {{}}: proven wrong, as {command_name()} history --faults shows"
        return {peer: proven.format(one.until) for peer, one in barred.items() if one.until > step + 1}

    def _variants(self) -> tuple[VariantReport, ...]:
        """Return which variants there are, for whom, with how many hosts and microbatches."""
        if self._manifest is None or self._membership is None:
            return ()
        roster, situation = self._membership.roster, self._membership.situation
        return tuple(
            VariantReport(part=part, kinds=self._manifest.split.passing(part), hosts=len(roster.replicas(part)),
                          passed=situation.passed.get(part, 0), of=situation.committed)
            for part in host_parts(roster.all_parts)
            if variant_of(part)[1] > 1
        )  # fmt: skip

    def _sharing(self) -> str:
        """Return whether stages share their layers, in a run that began so."""
        if self._manifest is None or self._membership is None or not shares(self._manifest.model):
            return ""
        return sharing_text(self._membership.roster.parts, delinked_at(self._manifest.model))

    def _codecs(self) -> str:
        """Return how activations travel, as the newest record says, or else the manifest."""
        named = () if self._membership is None else self._membership.situation.codecs
        return codecs_text(named) or ("" if self._manifest is None else self._manifest.codecs.described)

    def _fewer_copies(self) -> str:
        """Of which parts the roster has too few peers that may keep a copy, and which one machine's end would lose, in
        words. Of private ends the founder alone may keep one: that is all there can be."""
        if self._manifest is None or self._membership is None:
            return ""
        asked = self._manifest.run.copies
        fewer = [
            (part, number, min(asked, 1) if part == ENDS else asked)
            for part, number in fewer_copies(self._membership.roster, asked).items()
        ]
        said = [f"{part} has {number} of {most}" for part, number, most in fewer if number < most]
        said += [f"{part} is on one machine only" for part in on_one_machine(self._membership.roster, asked)]
        return ", ".join(said)

    async def _peers(self, request: Mapping[str, Any]) -> list[MemberReport]:
        """The roster, and anyone who the directory knows besides it."""
        membership, endpoint = self._membership, self._endpoint
        if membership is None or endpoint is None:
            return []
        links = await self._links(endpoint)
        copies = 0 if self._manifest is None else self._manifest.run.copies
        lost, checked = self._lost(), membership.situation.activity().checked
        members = [
            MemberReport(
                name=member.name,
                peer=member.peer,
                role=member.role,
                part=member.part,
                copies=copies_of(membership.roster, PeerId(member.peer), copies),
                state="lost" if member.peer in lost else "member",
                link=links.get(member.peer, "unknown"),
                addresses=member.addresses,
                region=member.region,
                outgoing=member.outgoing,
                lost=lost.get(member.peer, ""),
                checked=checked.get(PeerId(member.peer), 0),
            )
            for member in membership.roster.members
        ]
        members += [one for one in await self._announced(links) if one.peer not in membership.roster]
        names = distinct_names({one.peer: one.name for one in members})
        return [dataclasses.replace(one, name=names[one.peer]) for one in members]

    async def _look(self, request: Mapping[str, Any]) -> SwarmLook:
        return await self.look()

    async def look(self) -> SwarmLook:
        """Return what a view of the whole swarm shows of the present: the members, and what each says about itself."""
        members = await self._peers({})
        said: dict[PeerId, Vitals] = {}
        if self._board is not None and self._membership is not None:
            said = await self._board.look([peer for peer in self._membership.roster.peers if peer not in self._lost()])
        trips = {} if self._board is None else {str(peer): s for peer, s in self._board.round_trips.items()}
        silent = {} if self._board is None else {str(peer): how for peer, how in self._board.unanswered.items()}
        return SwarmLook(
            seen=self.standing(),
            members=tuple(members),
            vitals={str(peer): vitals.model_dump() for peer, vitals in said.items()},
            round_trips=trips,
            unanswered=silent,
        )

    def _lost(self) -> Mapping[str, str]:
        """Members that do not answer, and why: the roster is without them once the open step closes."""
        if self._membership is None or self._watch is None:
            return {}
        return {peer: why for peer, why in self._watch.gone.items() if peer in self._membership.roster}

    async def _announced(self, links: Mapping[str, str]) -> list[MemberReport]:
        assert self._endpoint is not None  # noqa: S101 - asked only when there is one
        try:
            async with asyncio.timeout(LOOKUP_S):
                records = await self._endpoint.directory.lookup(PeerRecord)
        except (PeerError, TimeoutError):
            return []
        barred = self._barred()
        return [
            MemberReport(
                name=record.name,
                peer=peer,
                role=record.role,
                part=record.part,
                copies=(),
                state="barred" if peer in barred else record.status,
                link=links.get(peer, "unknown"),
                addresses=record.addresses,
                region=record.region,
                outgoing=record.outgoing,
                lost=barred.get(peer, ""),
            )
            for peer, record in sorted(records.items())
            if record.status in ("waiting", "draining")
        ]

    async def _links(self, endpoint: LibP2PEndpoint) -> dict[str, str]:
        """Return how this peer reaches others, by peer; peers that are missing were never called."""
        links: dict[str, str] = {self._peer: "self"}
        with contextlib.suppress(PeerError):
            links |= {str(peer): kind for peer, kind in (await endpoint.links()).items()}
        return links

    async def _sent(self, request: Mapping[str, Any]) -> SentReport:
        if self._membership is None or self._endpoint is None or self._manifest is None:
            raise RunEnded("this peer has not found its run yet: try again in a moment", Ending.FAILED)
        roster, sent_by = self._membership.roster, self._endpoint.statistics().sent_by
        homes: Mapping[str, str] = {} if roster.admissions is None else roster.admissions.organisations
        return SentReport(
            name=roster.names.get(self._peer, self._settings.name),
            organisation=homes.get(self._peer, ""),
            routes=self._manifest.split.routes,
            since=self._started,
            receivers=receivers(PeerId(self._peer), sent_by, roster),
        )

    async def _drain(self, request: Mapping[str, Any]) -> str:
        return self._leave("swarm drain")

    async def _rewind(self, request: Mapping[str, Any]) -> str:
        if self._membership is None or self._manifest is None:
            raise RunEnded("this peer has not found its run yet: try again in a moment", Ending.FAILED)
        if self._manifest.run.rewind != "ask":
            swarm, control = command_name(), self._settings.control
            at = home_option(None if control is None else control.parent.parent)
            when, instead = _NOT_ASKED[self._manifest.run.rewind]
            raise CommandError(f"this run goes back to a checkpoint {when}, as its manifest says",
                               check=f"{swarm} status{at}: does the run wait, and for what?",
                               next_=instead.format(swarm=swarm), exit_code=EXIT_USAGE)  # fmt: skip
        roster = self._membership.roster
        issuers = (self._manifest.admission if roster.admissions is None else roster.admissions).issuers
        if len(roster) and not may_agree(roster, issuers, self._peer):
            voters = [roster.names[one.peer] for one in roster.members if one.entitled]
            raise CommandError("this peer may not have the run go back: it neither votes nor issues invites",
                               check=f"those that vote are {listed(voters)}",
                               next_=f"on the machine of one of them: {command_name()} rewind --peer NAME",
                               exit_code=EXIT_USAGE)  # fmt: skip
        waits = with_commands(self._membership.situation.waiting_for)
        if not waits:
            return "nothing happens: this peer waits for no lost part. Repeat the command while a part is lost"
        self._membership.situation.may_go_back = True
        return f"the run may go back to a checkpoint; it waits for {waits}"

    async def _invite(self, request: Mapping[str, Any]) -> str:
        if self._manifest is None or self._endpoint is None:
            raise RunEnded("this peer has not found its run yet: try again in a moment", Ending.FAILED)
        if self._admitting is not None and request.get("countersign"):
            return self._admitting.countersign(str(request["countersign"]))
        granted = granted_by(self._admitting, request)
        invite = invite_to(self._manifest.run_id, self._manifest.run.name, self._endpoint.addresses)
        return dataclasses.replace(invite, granted=granted).text()

    async def _revoke(self, request: Mapping[str, Any]) -> Revocation:
        if self._admitting is None:
            raise open_run("nobody is revoked")
        gone = {PeerId(peer): why for peer, why in self._lost().items()}
        return self._admitting.revoke(str(request.get("name", "")), gone, sure=bool(request.get("sure")))

    async def _issuers(self, request: Mapping[str, Any]) -> str:
        if self._admitting is None:
            raise open_run("it has no issuers")
        return self._admitting.issuers(request)
