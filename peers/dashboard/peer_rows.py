"""What is shown of each peer: who it is, in which state, what it does and what of its work counts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from peers.dashboard.folds import KnownPeers, PeerRates, Share, clean
from peers.dashboard.liveness import IN_WORDS
from swarm.consensus.records import CloseRecord
from swarm.consensus.roster import Member, Roster

PHASES = frozenset({"starting", "waiting", "syncing", "ready", "draining", "ended"})
"""What a peer may say of itself; anything else is shown as ``unknown``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRows:
    """What is known of the peers of a run: a ``look`` at the present (:class:`peers.control.status.SwarmLook` as plain
    data), the newest ``record``, and what was kept. ``text`` makes words of others fit to be shown."""

    look: Mapping[str, Any]
    record: CloseRecord | None
    known: KnownPeers
    rates: Mapping[str, PeerRates]
    shares: Mapping[str, Share]
    name: Callable[[str], str]
    text: Callable[[str], str]
    addresses: bool = False

    def all(self) -> dict[str, dict[str, Any]]:
        """Return a row for each member, each that waits to be one, and each that is gone, by peer id."""
        reports = {report["peer"]: report for report in self.look.get("members") or ()}
        roster = Roster(()) if self.record is None else self.record.members
        found: dict[str, dict[str, Any]] = {}
        for member in roster.members:
            found[member.peer] = self._row(member.peer, member, reports.get(member.peer), "member")
        for peer, report in reports.items():
            if peer not in found:
                found[peer] = self._row(peer, None, report, report["state"])
        for peer, gone in self.known.gone.items():
            if peer not in found:
                found[peer] = self._row(peer, gone.member, None, gone.state)
        probations = self._probations()
        for peer, one in found.items():
            one["probation"] = probations.get(peer, [])
        return found

    def _row(self, peer: str, member: Member | None, report: Mapping[str, Any] | None, state: str) -> dict[str, Any]:
        said = (self.look.get("vitals") or {}).get(peer)
        rates, share = self.rates.get(peer, PeerRates()), self.shares.get(peer, Share())
        shown, here = report or {}, state not in ("left", "lost", "waiting", "barred")
        state, why = self._standing(peer, state, shown, said)
        one: dict[str, Any] = {
            "name": clean(shown.get("name") or "") or self.name(peer),
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
            "round_trip_ms": _ms((self.look.get("round_trips") or {}).get(peer)),
            "microbatches": share.microbatches,
            "tokens": share.tokens,
            "trained_microbatches": share.trained_microbatches,
            "trained_tokens": share.trained_tokens,
            **_of_vitals(said),
        }
        if self.record is not None and peer in self.record.links:
            microseconds, bytes_per_s = self.record.links[peer]
            one |= {"one_way_ms": microseconds / 1e3, "bytes_per_s": bytes_per_s}
        if self.addresses:
            one["addresses"] = list(shown.get("addresses") or (member.addresses if member else ()))
        return one

    def _standing(
        self, peer: str, state: str, shown: Mapping[str, Any], said: Mapping[str, Any] | None
    ) -> tuple[str, str]:
        """Return in which state a peer is, and why it is in one that is not the usual."""
        silences, barred = self.known.silences, {} if self.record is None else self.record.barred
        if self.record is not None and peer in barred and (until := barred[peer].until) > self.record.step + 1:
            return "barred", f"proven wrong, until step {until}"
        if state in ("left", "lost"):
            gone = self.known.gone.get(peer)
            return state, "" if gone is None else f"with step {gone.step}{f': {gone.why}' if gone.why else ''}"
        if shown.get("state") == "lost" or (peer in silences and said is None):
            return silences.how(peer) or "silent", self.text(shown.get("lost") or silences.why(peer))
        if shown.get("state") in ("waiting", "draining"):
            return shown["state"], ""
        if self.look.get("vitals") and said is None and (how := unanswered(self.look, peer)) is not None:
            return how or "silent", IN_WORDS[how] if how else "it did not answer just now"
        if said is None:
            stopped = self.known.stopped.get(peer)
            return ("ended", stopped) if stopped is not None else (state, "")
        works = said.get("part") or shown.get("part") or shown.get("role") == "trainer"
        phase = said["phase"] if said["phase"] in PHASES else "unknown"
        return ("training" if phase == "ready" and works else phase), self.text(said["waiting_for"])

    def _probations(self) -> dict[str, list[dict[str, Any]]]:
        """Return by replica which trainers leave it out."""
        found: dict[str, list[dict[str, Any]]] = {}
        for trainer, said in (self.look.get("vitals") or {}).items():
            for one in said["probation"]:
                told = {"by": self.name(trainer), "left_s": round(one["left_s"], 1), "why": self.text(one["reason"])}
                found.setdefault(one["peer"], []).append(told)
        return found


UNANSWERING = frozenset({"stalled", "away", "silent", "ended"})
"""States of members that do not answer."""


def unanswered(look: Mapping[str, Any], peer: str) -> str | None:
    """Return how a member that said nothing did not answer: ``stalled``, ``away``, or "" where a look does not tell;
    None where it was not asked, as one that has just come."""
    if "unanswered" not in look:
        return ""
    how = look["unanswered"].get(peer)
    return how if how in IN_WORDS else None


AUDITED = ("audited", "audited_wrong", "audited_doubtful", "audited_unjudged")
"""See :class:`~swarm.pipeline.activity.AuditCounts`."""


def _of_vitals(said: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what is shown as the peer says it."""
    if said is None:
        unknown = dict.fromkeys(("queued", "under_way", "compute_ms", "averaging", *AUDITED))
        return unknown | {"reachability": ""}
    return {
        **dict(zip(AUDITED, said["audits"], strict=True)),
        "queued": said["queued"],
        "under_way": said["under_way"],
        "compute_ms": _ms(said["compute_s"]) if said["compute_s"] else None,
        "averaging": said["averaging"],
        "reachability": clean(said["reachability"]),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 2)
