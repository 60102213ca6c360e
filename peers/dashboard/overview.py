"""One run as plain data: the state that page, terminal and metrics show. Pure; see :class:`Overview`.

It is fed from whatever there is: close records, which say what counts; a peer's events, which say when and why; and
what the members say about themselves now. Each of these may be missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from peers.console.event_words import harmless
from peers.dashboard.folds import (
    Contributions,
    Gone,
    KnownPeers,
    Log,
    PeerRates,
    Rates,
    Share,
    StepPoint,
    StepSeries,
    changes,
    clean,
)
from swarm.consensus.records import CloseRecord
from swarm.consensus.roster import Member, Roster
from swarm.events import (
    Event,
    HopMoved,
    PeerBack,
    PeerLost,
    PeerStarted,
    PeerStopped,
    RunFound,
    RunStarted,
    StepClosed,
)
from swarm.ids import PartName
from swarm.monitoring.reader import Recorded
from swarm.step.turnout import turnouts

if TYPE_CHECKING:
    from swarm.config import Manifest  # a run is seen from its files without torch

SCHEMA = 1
MAX_GONE = 200
MAX_LINKS = 60
PHASES = frozenset({"starting", "waiting", "syncing", "ready", "draining", "ended"})
"""What a peer may say of itself; anything else is shown as ``unknown``."""
SILENT_S = 60.0
"""Files to which nobody wrote for so long are of a run that is over, or was cut short."""


class Overview:
    """Fold a run into :meth:`document`. ``source`` says where it is seen from: ``{"kind": …, "label": …}``.

    Network addresses are left out of every text unless ``addresses``.
    """

    def __init__(self, source: Mapping[str, str], *, addresses: bool = False) -> None:
        self._source, self._addresses = dict(source), addresses
        self._begin()

    def _begin(self) -> None:
        self._run: dict[str, Any] = {"id": "", "name": "", "steps": None, "stages": None, "parameters": None}
        self._record: CloseRecord | None = None
        self._before = Roster(())
        self._known = KnownPeers()
        self._look: Mapping[str, Any] = {}
        self.steps, self.shares, self.rates = StepSeries(), Contributions(), Rates()
        self.logs = {"churn": Log(), "moves": Log(), "events": Log()}
        self._news_at = 0.0

    # --- what comes in -------------------------------------------------------------------------------------------

    def event(self, recorded: Recorded) -> None:
        """Take one event of a peer."""
        event, at = recorded.event, recorded.wall
        if not isinstance(event, Event):
            return
        self._news_at = max(self._news_at, at)
        match event:
            case PeerStarted():
                self._known.names[recorded.peer] = clean(event.name)
            case RunFound():
                self._run |= {"id": event.run, "name": event.name, "steps": event.steps, "stages": event.stages}
            case RunStarted():
                self._run |= {"id": event.run, "stages": event.stages, "parameters": event.parameters}
            case StepClosed():
                self._closed(event, at)
            case HopMoved():
                self._moved(event, at)
            case PeerLost():
                self._known.lost[event.peer] = self._text(event.reason)
            case PeerBack():
                self._known.lost.pop(event.peer, None)
            case PeerStopped():
                self._known.stopped[recorded.peer] = self._text(event.reason)
        self.logs["events"].tell(event, at, recorded.peer, self._text)

    def founded(self, manifest: Manifest, parameters: int) -> None:
        """Take what the run is."""
        run, stages = manifest.run, manifest.split.stages
        self._run |= {"id": manifest.run_id, "name": run.name, "steps": run.steps, "stages": stages}
        self._run["parameters"] = parameters

    def record(self, record: CloseRecord, at: float | None = None) -> None:
        """Take the next close record; ``at`` is when it was decided, None where that is not known."""
        if self._record is not None and record.run != self._record.run:  # another run in the same place
            self._begin()
        known = self._record
        if known is not None and record.step <= known.step:  # what was closed since did not count
            self.shares.rewind(record.step)
            self.steps.rewind(record.step)
        before = self._before if known is None else known.members
        self._run["id"] = self._run["id"] or record.run
        self.shares.add(record)
        if not record.founding:
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
        self._before, self._record = before, record

    def look(self, look: Mapping[str, Any]) -> None:
        """Take what is the case now: :class:`peers.control.status.SwarmLook` as plain data; ``seen`` may be missing."""
        self._look = look
        self.rates.look(look.get("vitals") or {})

    def _closed(self, event: StepClosed, at: float) -> None:
        record, step = self._record, event.step
        if record is None or step > record.step or self.steps.point(step) is not None:
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
            why = self._known.lost.pop(peer, "") if what == "lost" else ""
            name = clean(member.name) or peer[-6:]
            self.logs["churn"].add(at=at, step=record.step, what=what, peer=peer, name=name, part=part, why=why)
            if what in ("lost", "left"):
                self._known.gone[peer] = Gone(member, what, record.step)
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
            if peer in roster and roster[peer].name:
                return clean(roster[peer].name)
        gone = self._known.gone.get(peer)
        if gone is not None and gone.member.name:
            return clean(gone.member.name)
        return self._known.names.get(peer) or peer[-6:]

    def document(self, at: float) -> dict[str, Any]:
        """Return the state at ``at`` seconds since the epoch, as JSON can say it. Cost: members, links, kept steps."""
        seen = self._look.get("seen") or {}
        newest, peers = self.steps.newest, self._peers()
        return {
            "schema": SCHEMA,
            "source": self._source,
            "run": {**self._run, "name": clean(self._run["name"] or seen.get("run_name", ""))},
            "at": at,
            "state": self._state(seen, at),
            "notes": self._notes(seen),
            "step": self.steps.last or seen.get("step", 0),
            "loss": None if newest is None else newest.loss,
            "tokens": self.steps.tokens,
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

    def _state(self, seen: Mapping[str, Any], at: float) -> str:
        record, steps = self._record, self._run["steps"]
        if record is not None and (record.ended or (steps is not None and record.step >= steps)):
            return "ended"
        heard = self._news_at or self._source["kind"] == "files"
        if heard and not seen and at - self._news_at > SILENT_S:
            return "past"
        if seen.get("phase") in ("starting", "waiting") or record is None:
            return "waiting"
        return "training"

    def _notes(self, seen: Mapping[str, Any]) -> list[str]:
        """Return what a person should know beside the figures."""
        record = self._record
        said = [seen.get("waiting_for", ""), seen.get("disk", ""), seen.get("few_voters", "")]
        if seen.get("fewer_copies"):
            said.append(f"fewer copies than the run asks for: {seen['fewer_copies']}")
        if record is not None and record.provisional:
            said.append(f"closed without a majority since step {record.lineage}: it counts when one agrees")
        return [self._text(text) for text in said if text]

    def _peers(self) -> dict[str, dict[str, Any]]:
        reports = {report["peer"]: report for report in self._look.get("members") or ()}
        roster = Roster(()) if self._record is None else self._record.members
        found: dict[str, dict[str, Any]] = {}
        for member in roster.members:
            found[member.peer] = self._peer(member.peer, member, reports.get(member.peer), "member")
        for peer, report in reports.items():
            if peer not in found:
                found[peer] = self._peer(peer, None, report, report["state"])
        for peer, gone in self._known.gone.items():
            if peer not in found:
                found[peer] = self._peer(peer, gone.member, None, gone.state)
        paroles = self._paroles()
        for peer, one in found.items():
            one["parole"] = paroles.get(peer, [])
        return found

    def _peer(self, peer: str, member: Member | None, report: Mapping[str, Any] | None, state: str) -> dict[str, Any]:
        said = (self._look.get("vitals") or {}).get(peer)
        rates, share = self.rates.by_peer.get(peer, PeerRates()), self.shares.by_peer.get(peer, Share())
        shown, here = report or {}, state not in ("left", "lost", "waiting")
        state, why = self._standing(peer, state, shown, said)
        one: dict[str, Any] = {
            "name": clean(shown.get("name") or (member.name if member else "")) or peer[-6:],
            "role": shown.get("role") or (member.role if member else ""),
            "part": shown.get("part") if report else (member.part if member else None),
            "region": shown.get("region") or (member.region if member else ""),
            "state": state,
            "why": why,
            "here": here,
            "link": shown.get("link", "unknown"),
            "copies": list(shown.get("copies", ())),
            "busy": rates.busy,
            "waiting": rates.waiting,
            "idle": rates.idle,
            "sent_per_s": rates.sent_per_s,
            "received_per_s": rates.received_per_s,
            "round_trip_ms": _ms((self._look.get("round_trips") or {}).get(peer)),
            "microbatches": share.microbatches,
            "tokens": share.tokens,
            "trained_microbatches": share.trained_microbatches,
            "trained_tokens": share.trained_tokens,
            **_of_vitals(said),
        }
        if self._record is not None and peer in self._record.links:
            microseconds, bytes_per_s = self._record.links[peer]
            one |= {"one_way_ms": microseconds / 1e3, "bytes_per_s": bytes_per_s}
        if self._addresses:
            one["addresses"] = list(shown.get("addresses") or (member.addresses if member else ()))
        return one

    def _standing(
        self, peer: str, state: str, shown: Mapping[str, Any], said: Mapping[str, Any] | None
    ) -> tuple[str, str]:
        """Return in which state a peer is, and why it is in one that is not the usual."""
        if state in ("left", "lost"):
            return state, ""
        if shown.get("state") == "lost" or (peer in self._known.lost and said is None):
            return "silent", self._text(shown.get("lost") or self._known.lost.get(peer, ""))
        if shown.get("state") in ("waiting", "draining"):
            return shown["state"], ""
        if self._look.get("vitals") and said is None:
            return "silent", "it did not answer just now"
        if said is None:
            stopped = self._known.stopped.get(peer)
            return ("ended", stopped) if stopped is not None else (state, "")
        works = said.get("part") or shown.get("part") or shown.get("role") == "trainer"
        phase = said["phase"] if said["phase"] in PHASES else "unknown"
        return ("training" if phase == "ready" and works else phase), self._text(said["waiting_for"])

    def _paroles(self) -> dict[str, list[dict[str, Any]]]:
        """Return by replica which trainers leave it out."""
        found: dict[str, list[dict[str, Any]]] = {}
        for trainer, said in (self._look.get("vitals") or {}).items():
            for one in said["parole"]:
                told = {"by": self.name(trainer), "left_s": round(one["left_s"], 1), "why": self._text(one["reason"])}
                found.setdefault(one["peer"], []).append(told)
        return found

    def _parts(self, peers: Mapping[str, Mapping[str, Any]], seen: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return each part of the model, who holds it, and who was in its newest averaging."""
        record, told = self._record, {one["part"]: one for one in seen.get("averaging") or ()}
        found = {} if record is None else {one.part: one for one in turnouts(record, self._before, {}, {})}
        holders: dict[str, list[str]] = {part: [] for part in (record.members.parts if record is not None else ())}
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
                    "live": len(holders[part]) if turnout is None else len(turnout.live),
                    "participating": None if turnout is None else len(turnout.participating),
                    "averaged": None if turnout is None else len(turnout.averaged),
                    "why": why,
                }
            )
        return parts

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
            if per_s > 0 and other in peers and peer in peers
        }
        most = sorted(rates, key=lambda pair: (-rates[pair], pair))[:MAX_LINKS]
        return [
            {"from": pair[0], "to": pair[1], "kind": kinds.get(pair, "unknown"), "bytes_per_s": rates[pair]}
            for pair in most
        ]

    def _text(self, text: str) -> str:
        return harmless(text) if self._addresses else clean(text)


def _of_vitals(said: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what is shown as the peer says it."""
    if said is None:
        return {"queued": None, "under_way": None, "compute_ms": None, "averaging": None, "reachability": ""}
    return {
        "queued": said["queued"],
        "under_way": said["under_way"],
        "compute_ms": _ms(said["compute_s"]) if said["compute_s"] else None,
        "averaging": said["averaging"],
        "reachability": clean(said["reachability"]),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 2)


def _order(part: str) -> tuple[bool, int, str]:
    """Return where a part stands: stages by number, the ends first."""
    _, _, number = part.partition("stage-")
    return (bool(number), int(number) if number.isdigit() else 0, part)
