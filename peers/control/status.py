"""The status of a running peer, on its control socket and in ``swarm status --json``.

Plain data with stable names; scripts read it. ``schema`` grows when a field changes its meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swarm.membership.status_types import DeviceUse, MemoryReport, PartTurnout, Phase, VariantReport
from swarm.pipeline.activity import AuditCounts

SCHEMA = 1
ALONE = "no other replica to average with"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionReport:
    """Who may join, as the newest record says that is known there: the mode, the issuers' peer ids, whom grants
    admitted, by name with role and peer id, and the names of those that were revoked. ``votes`` are open: the verb, the
    name or peer id that it is about, how many have agreed, and of how many that vote. ``invited`` are grants of this
    place that nobody has used yet: name, role, the last step with which it may be used, and when it was given, seconds
    since the epoch, 0 where that is not known."""

    mode: str
    issuers: tuple[str, ...]
    admitted: tuple[tuple[str, str, str], ...]
    revoked: tuple[str, ...]
    votes: tuple[tuple[str, str, int, int], ...] = ()
    invited: tuple[tuple[str, str, int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocation:
    """What came of a revocation, in words; or what it would cost, where nothing was done before that is agreed to."""

    said: str = ""
    asks: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReport:
    """One peer, now. ``waiting_for`` is empty unless it waits; ``reason`` says why it holds its part.

    A peer that was told to leave within a time ends by ``ends_by``, seconds since the epoch, in order or not.
    ``copies`` are the other parts of which it keeps a copy; ``fewer_copies`` says in words of which parts the run has
    fewer than ``run.copies``, empty where it has them all, and ``few_voters`` what the death of one costs a run that
    has fewer than three. ``few_trainers`` says that those are too few of whom one could be found to pull against the
    others, "" where none is looked for. ``barred`` says who was proven wrong, and until which step it may not join.
    ``reachability`` is in words, and so is ``disk``: what this machine's disk does not take,
    empty when it takes all. ``loss`` and ``tokens_per_s`` are of the last closed step, None before the first, the
    latter also for a step that this peer did not see open; ``tokens`` are those that were learnt of it, and those of
    its microbatches; ``held_out`` is a step, and the loss after it of the rows of --eval; ``averaging`` is of the last
    closed step, each part's, ``averages`` says in words what the run averages when, ``codecs`` how activations and
    their gradients travel in the open step. ``unfed`` are trainers of which the run takes nothing until a step.
    Where steps are fed early, ``early`` are the shares of the last steps' microbatches that were, the newest last.
    ``capacities`` are the microbatches a second that each stage can take by what its hosts told with the last step, 0
    where none has, empty where none of any stage has. ``variants`` are all variants of stages, ``sharing`` says whether
    stages share their layers in a run that began so, "" in any other. ``device_use`` is what this peer's device
    computed of the last step that it saw whole, by PaLM's count. Where replicas train apart this one has ``mixed`` so
    often since it was started, ``mixed_alone`` of these with nobody. ``audits`` are the hops that this trainer had
    computed again. ``started`` is seconds since the epoch; ``memory`` is None before it takes part in a run. Of a relay
    (``swarm relay``) ``relaying`` has its figures by name: ``slots``, ``runs``, ``circuits``, ``relayed_bytes``,
    ``refused``; None of all others. ``admission`` is there where not everybody may join.
    """

    schema: int = SCHEMA
    name: str
    peer: str
    pid: int
    role: str
    phase: Phase
    waiting_for: str
    ends_by: float | None = None
    run: str
    run_name: str
    part: str | None
    reason: str
    copies: tuple[str, ...] = ()
    fewer_copies: str = ""
    few_voters: str = ""
    few_trainers: str = ""
    barred: str = ""
    step: int
    steps: int
    loss: float | None
    tokens_per_s: float | None
    held_out: tuple[float, ...] = ()
    tokens: tuple[int, int] = (0, 0)
    members: int
    lost: int = 0
    addresses: tuple[str, ...]
    reachability: str
    started: float
    disk: str = ""
    averaging: tuple[PartTurnout, ...] = ()
    unfed: tuple[tuple[str, int], ...] = ()
    averages: str = ""
    codecs: str = ""
    early: tuple[float, ...] = ()
    capacities: tuple[float, ...] = ()
    variants: tuple[VariantReport, ...] = ()
    sharing: str = ""
    device_use: DeviceUse | None = None
    mixed: int = 0
    mixed_alone: int = 0
    audits: AuditCounts = AuditCounts()
    memory: MemoryReport | None = None
    relaying: Mapping[str, int] | None = None
    admission: AdmissionReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReport:
    """One peer of the run as another sees it. ``state`` is member, waiting or draining, or lost: a member that does not
    answer, for the reason in ``lost``, and leaves the roster when the open step closes without it; or barred: it waits
    until it may join again, for the reason there. ``link`` is how this peer reaches it: self, direct, relayed, or
    unknown when it never had to. ``copies`` are the parts of which it has to keep a copy, ``region`` where it says that
    it is; ``outgoing``: where averaging has the choice, nobody calls it. ``checked`` are the hops of it that this peer,
    a trainer, had found right by others: it has the fewer checked the more there are."""

    name: str
    peer: str
    role: str
    part: str | None
    copies: tuple[str, ...] = ()
    state: str
    link: str
    addresses: tuple[str, ...]
    region: str = ""
    outgoing: bool = False
    lost: str = ""
    checked: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmLook:
    """The whole swarm, now, as one peer sees it: itself, the members, and what each of them says about itself
    (:class:`swarm.membership.vitals.Vitals`, as plain data) with the seconds from question to answer. ``unanswered`` is
    who was asked and did not answer, ``stalled`` where its connection stands, ``away`` where nothing reaches it."""

    seen: StatusReport
    members: tuple[MemberReport, ...]
    vitals: Mapping[str, Mapping[str, Any]]
    round_trips: Mapping[str, float]
    unanswered: Mapping[str, str] = field(default_factory=dict)
