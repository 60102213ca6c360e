"""What a member tells its events about the run: who takes part, and each step that closed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarm.columns import digests_said, held
from swarm.consensus.records import CloseRecord
from swarm.consensus.roster import TRAINERS, Member, Roster, lost_parts, owner
from swarm.device import device_name
from swarm.events import (
    CodecsChanged,
    DeviceUsed,
    LateWorkLost,
    LinkUsage,
    LossesFarOut,
    Participation,
    PartsCapped,
    QuotaTaken,
    ResidualLost,
    RosterChanged,
    RunStarted,
    StepClosed,
    StepGivenUp,
    SumLeftOut,
)
from swarm.ids import PartName, PeerId, distinct_names
from swarm.membership.rules import spec_of
from swarm.membership.run import RunContext
from swarm.membership.status_types import DeviceUse, PartTurnout
from swarm.planning.costs import model_parameter_count, palm_part_flops
from swarm.planning.devices import device_named
from swarm.step.lateness import forgone
from swarm.step.turnout import Turnout, far_sums, turnouts

FAR_WITHIN = 8
"""A sum that was left out is told of where another of that peer's was, so few steps before: once it may be chance."""


class StepEvents:
    """Turns decided records into events; knows the time since the step before."""

    def __init__(self, run: RunContext) -> None:
        self._around, self._situation, self._codecs = run.around, run.situation, run.rules.codecs
        self._moves = run.rules.moves
        self._opened_at = run.around.clock.monotonic()
        self._usage = (0, 0)
        self._record: CloseRecord | None = None
        self._saw_it_open = False
        self._left_out: tuple[int, Mapping[str, str]] = (0, {})
        self._flops: dict[PartName, float] = {}
        self._far: dict[PeerId, int] = {}

    def left_out(self, step: int, why: Mapping[str, str]) -> None:
        """The leader of this step makes it without these members."""
        self._left_out = (step, why)

    def closed(self, record: CloseRecord, *, took_part: bool, digest: str = "") -> float:
        """A record was decided here, and swapped; returns the seconds since the one before. A peer that did not take
        part in its step only observed it, and has nothing to say about it. ``digest`` is the one that it computed."""
        now = self._around.clock.monotonic()
        seconds, self._opened_at = now - self._opened_at, now
        known, self._record = self._record, record
        before = None if known is None else known.members
        # Who joins opens its first step when it hears of the record before: later than the others did.
        whole, self._saw_it_open = took_part and self._saw_it_open, took_part or record.founding
        self._situation.closed(record, seconds if whole else None, self._computed(record))
        self._situation.capacities = self._moves.capacities(record)
        if known is None or before is None:
            self._started(record)
        else:
            self._changed(record, before, record.members)
            if why := self._codecs.why(known, record):
                self._around.events.emit(CodecsChanged(step=record.step, codecs=record.codecs, why=why))
            self._averaged(record, before)
            for peer, (tokens, why) in forgone(known, record).items() if took_part else ():
                self._around.events.emit(LateWorkLost(step=record.step, peer=peer, tokens=tokens, reason=why))
            if took_part:
                self._step(record, before, seconds, whole=whole, digest=digest)
        return seconds

    def _started(self, record: CloseRecord) -> None:
        manifest = self._around.manifest
        self._around.events.emit(
            RunStarted(
                run=manifest.run_id,
                stages=manifest.split.stages,
                roster=tuple(_plain(member, record.members) for member in record.roster),
                parameters=model_parameter_count(manifest.model),
            )
        )

    def _changed(self, record: CloseRecord, before: Roster, after: Roster) -> None:
        joined = tuple(_plain(member, after) for member in after.members if member.peer not in before)
        left = tuple(_plain(member, before) for member in before.members if member.peer not in after)
        if joined or left:
            self._around.events.emit(RosterChanged(step=record.step, joined=joined, left=left))

    def _given_up(self, record: CloseRecord, before: Roster, after: Roster) -> None:
        lost = lost_parts(before, record.absent)
        held = {peer: after[peer].part or after[peer].role for peer in after.peers}
        new = {peer: part for peer, part in held.items() if part in lost or (part == "trainer" and TRAINERS in lost)}
        self._around.events.emit(StepGivenUp(step=record.step, lost=lost, holders=new))

    def _residuals_lost(self, record: CloseRecord, before: Roster) -> None:
        for peer, part in ((peer, before[PeerId(peer)].part) for peer in record.absent):
            if part is not None:
                lost = ResidualLost(step=record.step, part=PartName(part), peer=PeerId(peer), reason="it was lost")
                self._around.events.emit(lost)

    def _averaged(self, record: CloseRecord, before: Roster) -> None:
        """Who was in the averaging of each part, for those who ask us; as an event only of our own."""
        step, why = self._left_out
        left_out = {PeerId(peer): reason for peer, reason in why.items()} if step == record.step else {}
        found = turnouts(record, before, self._around.watch.gone, left_out)
        names = record.members.names
        self._situation.unfed = tuple((names.get(peer, peer), step) for peer, step in record.members.unfed.items())
        self._situation.averaging = tuple(_told(one, record.members, before) for one in found)
        me = self._around.endpoint.peer
        for one in found:
            if me in (*one.participating, *one.late):
                self._around.events.emit(
                    Participation(
                        step=one.step,
                        part=one.part,
                        live=len(one.live),
                        participating=len(one.participating),
                        averaged=len(one.averaged),
                        why=dict(one.why),
                        whole=one.whole,
                    )
                )

    def _step(self, record: CloseRecord, before: Roster, seconds: float, *, whole: bool, digest: str) -> None:
        events = self._around.events
        part = PartName(before[self._around.endpoint.peer].part or "")
        mine = {str(one): said for one, said in digests_said(part, digest).items()} if digest else {}
        if record.void:
            self._given_up(record, before, record.members)
        if self._around.manifest.averaging.feeds_back:
            self._residuals_lost(record, before)
        if out := record.far_out:
            loss = sum(one.loss_sum for one in out) / sum(one.tokens for one in out)
            events.emit(LossesFarOut(step=record.step, microbatches=len(out), loss=loss, peer=record.suspect))
        if record.caps:
            events.emit(PartsCapped(step=record.step, caps=dict(record.caps)))
        far, step = [*far_sums(record, before)], record.step
        known = {peer: at for peer, at in self._far.items() if step - at < FAR_WITHIN}
        for part, peer, tokens, by in far:
            if peer in known:
                events.emit(SumLeftOut(step=step, part=part, peer=peer, tokens=tokens, by=by))
        self._far = known | dict.fromkeys((peer for _, peer, _, _ in far), step)
        for peer, one in record.failed_trainers.items():
            events.emit(
                QuotaTaken(step=record.step, peer=peer, mean=one.mean, microbatches=one.microbatches, until=one.until)
            )
        events.emit(
            StepClosed(
                step=record.step,
                loss=record.loss,
                tokens=record.tokens,
                microbatches=len(record.committed),
                grad_norm=record.grad_norm,
                clip=record.clip,
                lr=record.lr,
                digests={**record.digests, **mine},
                leader=owner(before, record.step, record.term),
                record=record.hash(),
                seconds=seconds,
                whole=whole,
                ended=record.ended,
                early=sum(one.early for one in record.committed),
                computed=self._computed(record),
            )
        )
        if whole:
            self._used(record, before, seconds)
        sent, received = self._around.endpoint.statistics().total
        used, self._usage = self._usage, (sent, received)
        events.emit(LinkUsage(step=record.step, bytes_sent=sent - used[0], bytes_received=received - used[1]))

    def _used(self, record: CloseRecord, before: Roster, seconds: float) -> None:
        """Tell what our device computed of the step, as routes and shards in the record have it."""
        me, around = self._around.endpoint.peer, self._around
        if before[me].part is None:
            return
        name = PartName(before[me].part or "")
        counted = sum(holder == me for _, holder in held(record.committed, name))
        rate, peak = counted * self._microbatch_flops(name) / max(seconds, 1e-9), self._peak()
        mfu = rate / peak if peak else None
        self._situation.device_use = DeviceUse(flops_per_s=rate, mfu=mfu)
        around.events.emit(DeviceUsed(step=record.step, part=name, microbatches=counted, flops_per_s=rate, mfu=mfu))

    def _computed(self, record: CloseRecord) -> int:
        """Return the tokens of a step's microbatches, of which the record counts those that were learnt."""
        manifest = self._around.manifest
        return len(record.committed) * manifest.batch.microbatch_size * manifest.model.context

    def _microbatch_flops(self, part: PartName) -> float:
        """Cost: a part is built without weights, once, some milliseconds."""
        if part not in self._flops:
            manifest = self._around.manifest
            tokens, spec = manifest.batch.microbatch_size * manifest.model.context, spec_of(manifest, part)
            self._flops[part] = tokens * palm_part_flops(manifest.model, spec, manifest.model.context)
        return self._flops[part]

    def _peak(self) -> float | None:
        """Operations a second that our devices can do in the dtype that the model is computed in."""
        device = self._around.device
        known = device_named(device_name(device.torch_device))
        if known is None:
            return None
        each = known.float32 if self._around.manifest.model.compute == "float32" else known.bfloat16
        return each * len(device.torch_devices)


def _told(one: Turnout, after: Roster, before: Roster) -> PartTurnout:
    """With names in the place of ids."""
    names = distinct_names({member.peer: member.name for roster in (after, before) for member in roster.members})
    return PartTurnout(
        part=one.part,
        step=one.step,
        live=len(one.live),
        participating=len(one.participating),
        averaged=len(one.averaged),
        why={names[peer]: why for peer, why in one.why.items()},
        alone=one.alone,
    )


def _plain(member: Member, roster: Roster) -> dict[str, Any]:
    return {"peer": member.peer, "name": roster.names[member.peer], "role": member.role, "part": member.part}
