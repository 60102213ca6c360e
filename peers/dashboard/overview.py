"""One run as plain data: the state that page, terminal and metrics show. Pure; see :class:`Overview`.

It is fed from whatever there is: close records, which say what counts; a peer's events, which say when and why; and
what the members say about themselves now. Each of these may be missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from peers.console.event_words import harmless
from peers.console.words import codecs_text, named, passed_text, sharing_text
from peers.dashboard.folds import Contributions, Gone, KnownPeers, Log, Rates, StepPoint, StepSeries, changes, clean
from peers.dashboard.liveness import Pulse, Signs, Silences, fresh, standing
from peers.dashboard.peer_rows import UNANSWERING, PeerRows, unanswered
from swarm.columns import count_passed
from swarm.consensus.records import CloseRecord
from swarm.consensus.roster import ROUTES, TRAINERS, Roster, lost_parts, lost_replicas
from swarm.events import (
    Event,
    HeldOutLoss,
    HopMoved,
    PeerBack,
    PeerLost,
    PeerStarted,
    PeerStopped,
    RunFound,
    RunStarted,
    StepClosed,
    Waiting,
    WentBack,
)
from swarm.ids import PartName, PeerId, shared_by, variant_of
from swarm.models.registry import delinked_at
from swarm.monitoring.reader import Recorded
from swarm.step.turnout import turnouts

if TYPE_CHECKING:
    from swarm.config import Manifest  # a run is seen from its files without torch
    from swarm.models.spec import SplitConfig

SCHEMA = 1
MAX_GONE = 200
MAX_LINKS = 60
ID = "12D3KooW"
"""How the ids of peers begin."""


class Overview:
    """Fold a run into :meth:`document`. ``source`` says where it is seen from: ``{"kind": …, "label": …}``.

    Network addresses are left out of every text unless ``addresses``.
    """

    def __init__(self, source: Mapping[str, str], *, addresses: bool = False) -> None:
        self._source, self._addresses = dict(source), addresses
        self._begin()

    def _begin(self) -> None:
        self._run: dict[str, Any] = {"id": "", "name": "", "steps": None, "stages": None, "parameters": None}
        self._run["codecs"] = ""
        self._batch_tokens = 0
        self._split: SplitConfig | None = None
        self._delink_at = 0
        self._record: CloseRecord | None = None
        self._decided, self._returns = 0, 0  # up to which step records are known; how often the run went back
        self._back_at: float | None = None
        self._before = Roster(())
        self._known = KnownPeers()
        self._look: Mapping[str, Any] = {}
        self._held_out: tuple[int, float] | None = None
        self.steps, self.shares, self.rates = StepSeries(), Contributions(), Rates()
        self.logs = {"churn": Log(), "moves": Log(), "events": Log()}
        self.pulse = Pulse()
        if self._source["kind"] == "files":
            self.pulse.wrote_at = 0.0

    # --- what comes in -------------------------------------------------------------------------------------------

    def event(self, recorded: Recorded) -> None:
        """Take one event of a peer."""
        event, at = recorded.event, recorded.wall
        if not isinstance(event, Event):
            return
        self.pulse.wrote(at)
        self._of_peer(recorded.peer, event, at)
        match event:
            case RunFound():
                self._run |= {"id": event.run, "name": event.name, "steps": event.steps, "stages": event.stages}
            case RunStarted():
                self._run |= {"id": event.run, "stages": event.stages, "parameters": event.parameters}
            case StepClosed():
                self._batch_tokens = event.computed // event.microbatches if event.computed else self._batch_tokens
                self._closed(event, at)
            case HeldOutLoss():
                self._held_out = self._held_out if event.loss is None else (event.step, event.loss)
            case HopMoved():
                self._moved(event, at)
            case Waiting():
                self.pulse.waits_for = self._text(event.what)
            case WentBack():
                self._went_back(event.step, event.returns, at)
        self.logs["events"].tell(event, at, recorded.peer, self._text)

    def _of_peer(self, teller: str, event: Event, at: float) -> None:
        """Take what ``teller`` says of itself and of other peers."""
        match event:
            case PeerStarted():
                self._known.names[teller] = clean(event.name)
                self._known.stopped.pop(teller, None)
            case PeerLost():
                self._fell_silent(event.peer, self._text(event.reason), at)
            case PeerBack():
                self._answers(event.peer, at)
            case PeerStopped():
                self._known.stopped[teller] = self._text(event.reason)

    def founded(self, manifest: Manifest, parameters: int) -> None:
        """Take what the run is."""
        run, stages = manifest.run, manifest.split.stages
        self._batch_tokens = manifest.batch.microbatch_size * manifest.model.context
        self._split, self._delink_at = manifest.split, delinked_at(manifest.model)
        self._run |= {"id": manifest.run_id, "name": run.name, "steps": run.steps, "stages": stages}
        self._run |= {"parameters": parameters, "codecs": self._run["codecs"] or manifest.codecs.described}

    def record(self, record: CloseRecord, at: float | None = None) -> None:
        """Take the next close record; ``at`` is when it was decided, None where that is not known."""
        if self._record is not None and record.run != self._record.run:  # another run in the same place
            self._begin()
        known = self._record
        if known is not None and record.step <= known.step:  # what was closed since did not count
            self._rewind(record.step + bool(record.repeats))  # to whose step the run goes back, that one counts
        before = self._before if known is None else known.members
        self._run["id"] = self._run["id"] or record.run
        self._run["codecs"] = codecs_text(record.codecs) or self._run["codecs"]
        self.shares.add(record)
        if not record.founding and not record.repeats:
            earlier = self.steps.newest
            spent = None
            if at is not None and earlier is not None and earlier.at is not None and record.step == earlier.step + 1:
                spent = at - earlier.at
            loss = None if record.void else record.loss
            point = StepPoint(
                step=record.step,
                loss=loss,
                tokens=record.tokens,
                microbatches=len(record.committed),
                members=len(record.roster),
                seconds=spent,
                at=at,
            )
            self.steps.add(point)
        if known is not None:  # of the first that is seen nobody knows who came with it
            timed = self.steps.point(record.step)
            self._changed(record, before, timed.at if at is None and timed is not None else at)
        self._before, self._record, self._decided = before, record, record.step
        if record.repeats:
            self._went_back(record.step, record.returns, at)

    def _rewind(self, step: int) -> None:
        """Steps from this one on did not count."""
        self.shares.rewind(step)
        self.steps.rewind(step)
        if self._held_out is not None and self._held_out[0] >= step:
            self._held_out = None

    def _went_back(self, step: int, returns: int, at: float | None) -> None:
        """The steps after ``step`` are done again, by peers of which none is silent yet. Every peer tells it, one after
        another, and a record does: the first counts."""
        self._back_at = self._back_at if at is None else at
        if returns > self._returns:
            self._rewind(step + 1)
            self._returns, self._decided = returns, min(step, self._decided)
            self._known.silences, self.pulse.waits_for = Silences(), ""

    def look(self, look: Mapping[str, Any]) -> None:
        """Take what is the case now: :class:`peers.control.status.SwarmLook` as plain data; ``seen`` may be missing,
        and so may all: then nobody is asked just now."""
        self._look, vitals = look, look.get("vitals") or {}
        self.rates.look(vitals)
        for peer, said in vitals.items():
            self._known.leaves(peer, leaving=said["phase"] in ("draining", "ended"))
        if not look:
            self.pulse.nobody_asks()
            return
        if vitals or look.get("seen"):
            self.pulse.answered()
        if vitals and self._record is not None:
            self._silences(self._record.members.peers)

    def _silences(self, members: Iterable[str]) -> None:
        """Find who of the members has fallen silent, and who answers again."""
        look, known = self._look, self._known
        lost = {one["peer"]: one.get("lost", "") for one in look.get("members") or () if one["state"] == "lost"}
        for peer in members:
            how = unanswered(look, peer)
            if peer in look["vitals"]:
                if known.silences.answered(peer):
                    self._told("back", peer, "", None)
            elif peer in lost:
                self._fell_silent(peer, self._text(lost[peer]), None)
            elif how is not None and peer not in known.leaving and known.silences.missed(peer, how, self._step):
                self._told("silent", peer, known.silences.why(peer), None)

    @property
    def _step(self) -> int:
        """The newest step that is known to be closed."""
        return max(self.steps.last, self._decided)

    def _fell_silent(self, peer: str, why: str, at: float | None) -> None:
        if self._record is not None and peer not in self._record.members:
            return
        if self._known.silences.lost(peer, why, self._step):
            self._told("silent", peer, why, at)

    def _answers(self, peer: str, at: float | None) -> None:
        if self._known.silences.back(peer):
            self._told("back", peer, "", at)

    def _told(self, what: str, peer: str, why: str, at: float | None) -> None:
        """Add to the churn that a member fell silent, or answers again."""
        member = self._record.members[peer] if self._record is not None and peer in self._record.members else None
        part = "" if member is None else member.part or member.role
        name, at = self.name(peer), self.pulse.now if at is None else at
        self.logs["churn"].add(at=at, step=self._step, what=what, peer=peer, name=name, part=part, why=why)

    def _closed(self, event: StepClosed, at: float) -> None:
        record, step = self._record, event.step
        if step > self._decided or self.steps.point(step) is not None:
            loss = event.loss if event.microbatches and math.isfinite(event.loss) else None
            members = len(record.roster) if record is not None and record.step == step else None
            seconds = event.seconds if event.whole else None
            point = StepPoint(
                step=step,
                loss=loss,
                tokens=event.tokens,
                microbatches=event.microbatches,
                members=members,
                seconds=seconds,
                at=at,
            )
            self.steps.add(point)

    def _moved(self, event: HopMoved, at: float) -> None:
        why = "it is slow" if event.late else self._text(event.reason)
        old, new = self.name(event.old), self.name(event.new)
        self.logs["moves"].add(
            at=at, step=event.step, what="microbatch", stage=event.stage, old=old, new=new, why=why, way=event.direction
        )

    def _changed(self, record: CloseRecord, before: Roster, at: float | None) -> None:
        for what, peer, part in changes(record, before) if not record.founding else ():
            member = record.members[peer] if peer in record.members else before[peer]
            silences, why = self._known.silences, ""
            if what in ("lost", "left"):  # of who helps others only, no record says that it was absent
                what, why = ("lost", silences.why(peer)) if what == "lost" or peer in silences else (what, "")
                silences.forget(peer)
                self._known.leaves(peer, leaving=False)
            elif what == "joined" and peer in self._known.gone:
                what = "back"
            name = (record.members if peer in record.members else before).names[peer]
            self.logs["churn"].add(at=at, step=record.step, what=what, peer=peer, name=name, part=part, why=why)
            if what in ("lost", "left"):
                self._known.gone[peer] = Gone(member, what, record.step, why)
            elif what == "moved":
                held = "all that held it are lost, and a copy was here"
                old = before[peer].part or before[peer].role
                self.logs["moves"].add(at=at, step=record.step, what="part", old=old, new=part, why=held, who=name)
        for peer in record.members.peers:
            self._known.gone.pop(peer, None)
        while len(self._known.gone) > MAX_GONE:
            del self._known.gone[next(iter(self._known.gone))]

    # --- what goes out -------------------------------------------------------------------------------------------

    def name(self, peer: str) -> str:
        """Return what a peer is called, for people; the end of its id where nobody said."""
        for roster in ((self._record.members if self._record else Roster(())), self._before):
            if peer in roster:
                return roster.names[peer]
        if (gone := self._known.gone.get(peer)) is not None:
            return gone.member.name
        return self._known.names.get(peer) or peer[-6:]

    def document(self, at: float) -> dict[str, Any]:
        """Return the state at ``at`` seconds since the epoch, as JSON can say it. Cost: members, links, kept steps."""
        seen = self._look.get("seen") or {}
        newest = self.steps.newest
        peers = PeerRows(
            look=self._look,
            record=self._record,
            known=self._known,
            rates=self.rates.by_peer,
            shares=self.shares.by_peer,
            name=self.name,
            text=self._text,
            addresses=self._addresses,
        ).all()
        signs = self._signs(seen, at)
        state, why = standing(signs)
        live = fresh(state, signs)
        if state in ("stalled", "away") and not live and self.pulse.asked in peers:
            peers[self.pulse.asked] |= {"state": state, "why": self._text(why)}
        return {
            "schema": SCHEMA,
            "source": self._source,
            "run": {**self._run, "name": clean(self._run["name"] or seen.get("run_name", ""))},
            "at": at,
            "state": state,
            "why": self._text(why),
            "fresh": live,
            "notes": self._notes(seen, why),
            "step": self.steps.last or seen.get("step", 0),
            "since_step": self.shares.since or self.steps.first,
            "loss": None if newest is None else newest.loss,
            "held_out": self._held_out,
            "tokens": self.steps.tokens,
            "computed_tokens": self.steps.microbatches * self._batch_tokens,
            "tokens_per_s": self.steps.tokens_per_s(),
            "members": sum(peer["here"] for peer in peers.values()),
            "parts": self._parts(peers, seen),
            "peers": peers,
            "links": self._links(peers),
            "steps": self.steps.rows(),
            "churn": list(self.logs["churn"]),
            "moves": list(self.logs["moves"]),
            "events": [{**entry, "who": self.name(entry["who"])} for entry in self.logs["events"]],
        }

    def _signs(self, seen: Mapping[str, Any], at: float) -> Signs:
        """Return what the standing of the run is decided by."""
        record, newest, steps, pulse = self._record, self.steps.newest, self._run["steps"], self.pulse
        waits = seen.get("phase") in ("starting", "waiting")
        begun = not waits and (record is not None or self.steps.last > 0)
        times = (None if newest is None else newest.at, self._back_at)
        step_at = max((time for time in times if time is not None), default=None)
        return Signs(
            step_at=pulse.tick(at, self._step if begun else -1, step_at),
            at=at,
            ended=record is not None and (record.ended or (steps is not None and record.step >= steps)),
            begun=begun,
            wrote_at=pulse.wrote_at,
            heard_at=pulse.heard_at,
            unheard=pulse.unheard,
            gone=pulse.gone,
            step=self._step,
            step_s=self.steps.step_s(),
            silent=[self.name(peer) for peer in self._known.silences],
            waits_for=self._awaited(seen) if begun else seen.get("waiting_for") or pulse.waits_for,
        )

    def _awaited(self, seen: Mapping[str, Any]) -> str:
        """Return what a run under way waits for, as its members say, or as follows from who of them is lost; "" for
        nothing. One that goes on provisionally waits for nothing that holds it up."""
        record = self._record
        if record is None or record.provisional:
            return ""
        vitals = self._look.get("vitals") or {}
        members = [seen, *(vitals[peer] for peer in sorted(vitals))]
        said = [one["waiting_for"] for one in members if one.get("phase") == "ready"]
        silences, roster = self._known.silences, record.members
        gone = {PeerId(peer): silences.why(peer) for peer in silences if peer in roster}
        lost = [f"a replica of {part}: {lost_replicas(roster, part, gone)}" for part in lost_parts(roster, gone)]
        words = "; ".join(lost).replace(f"replica of {TRAINERS}", "trainer")
        return next(filter(None, said), "") or words.replace(f"replica of {ROUTES}", "way for any trainer")

    def _notes(self, seen: Mapping[str, Any], told: str) -> list[str]:
        """Return what a person should know beside the figures, and what is ``told`` already."""
        record = self._record
        said = [seen.get("waiting_for", ""), seen.get("disk", ""), seen.get("few_voters", ""), seen.get("barred", "")]
        if seen.get("fewer_copies"):
            said.append(f"fewer copies than the run asks for: {seen['fewer_copies']}")
        if record is not None and record.provisional:
            said.append(f"closed without a majority since step {record.lineage}: it counts when one agrees")
        return [self._text(text) for text in said if text and text != told]

    def _parts(self, peers: Mapping[str, Mapping[str, Any]], seen: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return each part of the model, who holds it, and who was in its newest averaging."""
        record, told = self._record, {one["part"]: one for one in seen.get("averaging") or ()}
        found = {} if record is None else {one.part: one for one in turnouts(record, self._before, {}, {})}
        holders: dict[str, list[str]] = {part: [] for part in (record.members.all_parts if record is not None else ())}
        for peer, one in peers.items():
            if one["here"] and one["part"]:
                holders.setdefault(one["part"], []).append(peer)
        parts = []
        for part in sorted(holders, key=_order):
            turnout, why = found.get(PartName(part)), dict[str, str]()
            if turnout is not None:
                why = {self.name(peer): self._text(reason) for peer, reason in turnout.why.items()}
            if part in told and turnout is not None and told[part]["step"] == turnout.step:
                why |= {clean(name): self._text(reason) for name, reason in told[part]["why"].items()}
            parts.append(
                {
                    "part": part,
                    "peers": sorted(holders[part], key=lambda peer: (peers[peer]["name"], peer)),
                    # Not with how many its newest step was closed: they may be lost since.
                    "live": sum(peers[peer]["state"] not in UNANSWERING for peer in holders[part]),
                    "participating": None if turnout is None else len(turnout.participating),
                    "averaged": None if turnout is None else len(turnout.averaged),
                    "why": why,
                    "said": self._said(PartName(part), seen),
                }
            )
        return parts

    def _said(self, part: PartName, seen: Mapping[str, Any]) -> str:
        """Return whom a variant is for and what passed it in the newest step, or until when stages share a part; "" of
        any other. What the run is may be known from who is asked alone."""
        if shared_by(part):
            known = "" if self._split is None else sharing_text((part,), self._delink_at)
            return known or self._text(seen.get("sharing", ""))
        if self._record is None or variant_of(part)[1] == 1:
            return ""
        committed = self._record.committed
        told = {one["part"]: tuple(map(clean, one["kinds"])) for one in seen.get("variants") or ()}
        kinds = told.get(part, ()) if self._split is None else self._split.passing(part)
        return passed_text(kinds, count_passed((part,), committed)[part], len(committed))

    def _links(self, peers: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the links with the most bytes a second, from sender to receiver."""
        kinds = {
            (peer, link["peer"]): link["kind"]
            for peer, said in (self._look.get("vitals") or {}).items()
            for link in said["links"]
        }
        rates = {
            (peer, other): per_s
            for peer, rate in self.rates.by_peer.items()
            for other, per_s in rate.links.items()
            if per_s > 0 and other in peers and peer in peers and other != peer
        }
        most = sorted(rates, key=lambda pair: (-rates[pair], pair))[:MAX_LINKS]
        return [
            {"from": pair[0], "to": pair[1], "kind": kinds.get(pair, "unknown"), "bytes_per_s": rates[pair]}
            for pair in most
        ]

    def _text(self, text: str) -> str:
        shown = harmless(text) if self._addresses else clean(text)
        return named(shown, {peer: self.name(peer) for peer in self._ids()}) if ID in shown else shown

    def _ids(self) -> Iterator[str]:
        """All who have a name."""
        yield from self._known.names
        yield from self._before.peers
        yield from () if self._record is None else self._record.members.peers


def _order(part: str) -> tuple[int, str]:
    """Return where a part stands: the ends first, which have the shortest name, then stages by number."""
    return (len(part), part)
