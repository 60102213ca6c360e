"""Turn an event into a label and a line for a person, if it can be understood alone. Pure."""

from __future__ import annotations

import math
import os
import shlex

from peers.console.words import (
    codecs_text,
    command_name,
    count,
    listed,
    numbered,
    printable,
    read_over,
    relaying_text,
    with_commands,
)
from peers.control.status import ALONE
from peers.exit_codes import EXIT_DRAINED, EXIT_OK
from peers.sharing.limit_options import slow_step_text
from swarm.clock import moment
from swarm.disk import size_text
from swarm.events import (
    AttemptFailed,
    CaughtUp,
    CheckpointFailed,
    CheckpointsSetAside,
    ClosedWithout,
    CodecsChanged,
    CopyDropped,
    CopyHeld,
    CutOff,
    DaemonLost,
    DaemonRestarted,
    DashboardServed,
    DataOpened,
    DeviceChosen,
    DigestMismatch,
    DiskRefused,
    DiskTook,
    DonorDropped,
    Draining,
    Event,
    FrozenFetching,
    FrozenReady,
    GradientsFarOut,
    GraphsDropped,
    HeldOutLoss,
    HopAudited,
    HopDiffers,
    HostsMoved,
    LateWorkLost,
    LeftOutAsSlow,
    LimitSlows,
    LimitTooLow,
    LineageBegan,
    LineageConfirmed,
    LineageGivenUp,
    LinkUpgraded,
    LossesFarOut,
    MoveDeclined,
    PartAssigned,
    Participation,
    PartsCapped,
    Paused,
    PauseWatch,
    PeerBack,
    PeerLost,
    PeerReady,
    PeerStarted,
    PeerStopped,
    PreemptionNotice,
    PreemptionWatch,
    ProvenWrong,
    QuorumBack,
    QuorumLost,
    QuotaTaken,
    Reachability,
    RecordRefused,
    RelayServing,
    Resumed,
    RosterChanged,
    RunFound,
    RunStarted,
    StateDownloaded,
    StateLeftBehind,
    StepGivenUp,
    StepHeldUp,
    SumLeftOut,
    TermBegan,
    Waiting,
    WentBack,
    WorkExcluded,
    WorkWithdrawn,
)
from swarm.ids import PartName, shared_by, stage_of, variant_of

LABEL_WIDTH = 14
_AT_ONCE = {"Ctrl-C": "; again leaves at once", "swarm drain": "; Ctrl-C twice leaves at once"}


def describe(event: Event) -> tuple[str, str] | None:
    """(label, text) of an event that needs nothing else to be understood; None: it is not told."""
    match event:
        case DeviceChosen() | DaemonLost() | DaemonRestarted():
            return _of_machine(event)
        case PeerStarted():
            return "listening", _list(event.addresses) or "no address is known"
        case RunFound():
            made_of = f"{count(event.stages, 'stage')}, {count(event.steps, 'step')}, wire version {event.wire}"
            return "run", f"{event.name}, {event.run[:12]}: {made_of}; from {event.source}"
        case DataOpened():
            return _data(event)
        case RunStarted():
            return "started", swarm_of(event)
        case PeerReady():
            return "READY", _ready(event)
        case PeerStopped():
            return _end(event)
        case RelayServing():
            return "relays", relaying_text(event.fields())
        case _:
            return _describe_place(event) or _describe_others(event)


def _of_machine(event: DeviceChosen | DaemonLost | DaemonRestarted) -> tuple[str, str]:
    match event:
        case DeviceChosen():
            return "device", f"{event.device}: {harmless(event.why)}"
        case DaemonLost():
            return "lost", f"our own libp2p daemon (exit code {event.exit_code})"
        case DaemonRestarted():
            return "restored", f"our own libp2p daemon serves again after {event.seconds:.1f} s"


def _data(event: DataOpened) -> tuple[str, str]:
    if event.held_out:
        return "held out", f"{event.tokens:,} tokens, of which the loss is measured{event.unused}"
    return "data", read_over(event.tokens, event.microbatches, event.times) + event.unused


def _describe_place(event: Event) -> tuple[str, str] | None:
    """Describe this peer's own state."""
    match event:
        case Reachability():
            return "reachability", f"{event.how}{': ' if event.detail else ''}{harmless(event.detail)}"
        case DashboardServed():
            return "dashboard", _served(event)
        case Waiting():
            return ("waiting", harmless(with_commands(event.what))) if event.what else None
        case PartAssigned():
            return "assigned", f"{_part(event.part)}, because {harmless(event.reason)}"
        case FrozenFetching():
            return "frozen", _to_come(event)
        case FrozenReady():
            said = f"{event.part}: {size_text(event.bytes)} of weights, from {event.source}"
            return "frozen", f"{said} in {event.seconds:.1f} s, digest verified"
        case StateDownloaded():
            return "synced", f"{event.part} of step {event.step}: {_came(event)}, digest verified"
        case Draining():
            leaving = "leaving in order already, now asked by" if event.again else "leaving in order, asked by"
            bound = f"; {event.bound}" if event.bound else ""
            return "draining", f"{leaving} {harmless(event.reason)}{bound}{_AT_ONCE.get(event.reason, '')}"
        case PreemptionWatch() | PreemptionNotice():
            return "preemption", harmless(_preemption(event))
        case _:
            return _describe_pause(event) or _describe_keeping(event)


def _too_low(event: LimitTooLow) -> str:
    rate, needed = f"{event.rate * 8 / 1e6:.3g} Mbit/s", f"{math.ceil(event.needed * 8 / 1e6)}mbit"
    return (
        f"too low: averaging {_part(event.part)} is not done in time at {rate}, so its rounds fail and the run leaves "
        f"this peer out; check --max-upload and --max-download, and join again with {needed} or more, or with "
        "--role trainer"
    )


def _describe_pause(event: Event) -> tuple[str, str] | None:
    """Describe what its owner asked for: limits and what they do, pauses, the loss of held-out rows."""
    match event:
        case LimitSlows():
            return "limit", slow_step_text(event.rate, event.step_bytes)
        case LimitTooLow():
            return "limit", _too_low(event)
        case PauseWatch():
            return "pause", harmless(f"{event.condition}: {event.problem or 'can be checked again'}")
        case Paused():
            return "paused", f"{harmless(event.reason)}; leaves in order, and comes back by itself"
        case HeldOutLoss():
            return "held out", harmless(_held_out(event))
        case Resumed():
            return "resumed", f"away for {event.seconds:.0f} s: {harmless(event.reason)}"
        case _:
            return None


def _describe_keeping(event: Event) -> tuple[str, str] | None:
    """Describe what it keeps, and what its disk refuses."""
    match event:
        case CopyHeld():
            return "copying", f"{_part(event.part)} of step {event.step}, in case its replicas die: {_came(event)}"
        case CopyDropped():
            return "copying", f"{_part(event.part)} no longer: {harmless(event.reason)}"
        case DonorDropped():
            return "syncing", f"{_part(event.part)} no longer from {harmless(f'{event.donor}: {event.reason}')}"
        case CheckpointFailed():
            kept = "no complete one is here" if event.kept is None else f"that of step {event.kept} stays"
            what = f"of step {event.step} was not written for {_part(event.part)}"
            return "checkpoint", f"{what}: {harmless(event.reason)}; {kept}"
        case CheckpointsSetAside():
            those = f"what is kept here of {numbered(event.steps)} does not count any more; in {event.path}"
            return "checkpoint", f"the run went on from step {event.step}: {those} until it passes them"
        case DiskRefused():
            again = "tried again while this peer lives"
            return "disk", f"cannot write {harmless(event.what)}: {harmless(event.reason)}; {again}"
        case DiskTook():
            return "disk", f"can write {harmless(event.what)} again"
        case GraphsDropped():
            dropped = f"{count(event.graphs, 'graph')} dropped, to be computed again"
            return "memory", harmless(f"{event.device} is out of memory: {dropped}; {event.reason}")
        case _:
            return None


def _describe_others(event: Event) -> tuple[str, str] | None:
    """Describe events of the other peers."""
    match event:
        case RosterChanged():
            joined = ", ".join(_who(one) for one in event.joined)
            left = ", ".join(_who(one) for one in event.left)
            changes = [f"{joined} joined" if joined else "", f"{left} left" if left else ""]
            return "roster", f"step {event.step}: {'; '.join(filter(None, changes)) or 'unchanged'}"
        case Participation():
            return "averaging", harmless(_turnout(event))
        case PeerLost():
            return "lost", harmless(f"{event.name}: {event.reason}")
        case PeerBack():
            return "back", harmless(f"{event.name} answers again")
        case LinkUpgraded():
            return "direct", f"{event.target} is called directly from here on, no more through a relay"
        case DigestMismatch():
            return "mismatch", f"replicas of {event.part} differ after step {event.step}"
        case RecordRefused():
            return "refused", harmless(f"a record of step {event.step} that {event.peer} proposed: {event.reason}")
        case _:
            return _describe_repair(event)


def _describe_repair(event: Event) -> tuple[str, str] | None:
    """Describe the rescue of a step whose members are lost."""
    match event:
        case TermBegan():
            return "leading", harmless(f"step {event.step}, in place of those that are gone: {event.reason}")
        case AttemptFailed():
            return "repeated", harmless(f"the closing of step {event.step}: {event.reason}")
        case WorkWithdrawn():
            gone = count(len(event.trainers), "trainer")
            return "withdrawn", f"the work of {gone} for step {event.step}: others compute as much instead"
        case WorkExcluded():
            lost = f"{len(event.microbatches)} of the microbatches of step {event.step}"
            return "excluded", harmless(f"{lost}, the others do as many instead: {event.reason}")
        case PartsCapped():
            return "capped", f"{' and '.join(event.caps)} in step {event.step}: far from the usual, scaled down"
        case CodecsChanged():
            return "codecs", harmless(f"{codecs_text(event.codecs)} from step {event.step + 1} on: {event.why}")
        case StepGivenUp():
            held = ", ".join(f"{peer} holds {part} now" for peer, part in event.holders.items())
            lost = f"{' and '.join(event.lost)} had nobody left{f': {held}' if held else ''}"
            return "given up", harmless(f"step {event.step}, since {lost}; its work is done again")
        case WentBack():
            redone = event.repeats - 1 - event.step
            again = f"{count(redone, 'step')} {'is' if redone == 1 else 'are'} done again" if redone else "none is lost"
            return "went back", f"the run, to its checkpoint of step {event.step}: {again}"
        case CutOff():
            return "cut off", harmless(f"{event.reason}; getting the newest state")
        case _:
            rest = (_describe_late, _describe_sent, _describe_moves, _describe_partition)
            return next((told for describe in rest if (told := describe(event)) is not None), None)


def _describe_late(event: Event) -> tuple[str, str] | None:
    """Describe work that a close goes without: of who is late where replicas train apart, far from the others', or lost
    with who ends."""
    match event:
        case SumLeftOut():
            by = f", as {listed([*event.by])} say"
            return "left out", (
                f"{count(event.tokens, 'token')} of {event.peer}, of the mean of {event.part} in step {event.step}: "
                f"its sum is far from the others'{by}"
            )
        case LossesFarOut():
            whose = "" if event.peer is None else f", all of which went through {event.peer}"
            several = "es" * (event.microbatches > 1)
            told = f"{event.microbatches} microbatch{several} of step {event.step}, of {event.loss:.1f} nats a token"
            return "not shown", f"in the loss: {told}, far from the others{whose}"
        case ClosedWithout():
            late = "; ".join(f"{peer}: {why}" for peer, why in event.late.items())
            return "late", harmless(f"step {event.step} closes without some, who are averaged later: {late}")
        case StepHeldUp():
            took = f"{event.seconds:.1f} s, where others take {event.usual_s:.1f} s"
            return "held up", f"step {event.step} waited for {event.peer}: {took}; {event.times} times lately"
        case LeftOutAsSlow():
            told = f"{event.peer}, until step {event.until}: {event.reason}; next: {command_name()} doctor there"
            return "left out", told
        case ProvenWrong():
            whose = "it computed" if event.peer == event.accused else f"it said of {event.accused}"
            until = f", until step {event.until}" if event.until else ": noted, the next time it is left out"
            at = f"{'in averaging' if event.microbatch is None else 'at'} {_part(event.part)}"
            told = f"{event.peer}{until}: what {whose} {at} is wrong, as {listed([*event.by])} prove"
            return "barred" if event.until else "proven wrong", f"{told}; {command_name()} history --faults shows it"
        case LateWorkLost():
            return "work lost", harmless(f"{event.tokens} tokens of {event.peer}, which was late: {event.reason}")
        case StateLeftBehind():
            copied = (
                "no copy of it is known here" if event.copied is None else f"its newest copy is of step {event.copied}"
            )
            kept = f"could not be kept here: {event.reason}" if event.reason else "is on this disk alone"
            return "left behind", harmless(f"step {event.step} of {_part(event.part)} {kept}; {copied}")
        case CaughtUp():
            return "caught up", f"with step {event.step}, whose close did not wait for this peer"
        case _:
            return None


_AUDITED = {
    "passed": "found right",
    "failed": "found wrong",
    "disputed": "in doubt",
    "withheld": "not shown",
    "unjudged": "not judged",
}
"""What came of an audit, in words for people."""


def _describe_sent(event: Event) -> tuple[str, str] | None:
    """Describe who sends what it should not, or says so."""
    match event:
        case GradientsFarOut():
            long = f"gradients that are {event.times:.0f} times as long as usual, in step {event.step}"
            return "scaled down", f"what {event.peer} sends to {_part(event.part)} here: {long}"
        case QuotaTaken():
            told = f"over {event.microbatches} microbatches it pulls against the others, {event.mean:+.2f} of 1"
            there = f"{command_name()} data sample there shows its text, {command_name()} doctor checks its machine"
            return "not fed", f"{event.peer}, until step {event.until}: {told}; next: {there}"
        case HopAudited() if event.outcome != "passed" or event.reason:
            hop = f"stage {event.stage} of a microbatch of step {event.step}, as {event.peer} computed it"
            why = f": {event.reason}" if event.reason else ""
            return _AUDITED[event.outcome], f"{hop}{why}"
        case HopDiffers():
            told = f"what {event.peer} says it received or sent at stage {event.stage}, in step {event.step}"
            return "not believed", f"{told}: neither neighbours nor signatures confirm it"
        case _:
            return None


def _describe_moves(event: Event) -> tuple[str, str] | None:
    """Describe hosts that hold other parts from now on, or were to."""
    match event:
        case HostsMoved():
            to = ", ".join(f"{peer} to {part}" for peer, part in event.moves.items())
            return "moved", harmless(f"step {event.step}: {to}; {'; '.join(event.reasons)}")
        case MoveDeclined():
            return "stays", harmless(f"{event.peer} does not move to {event.part}: {event.reason}")
        case _:
            return None


def _describe_partition(event: Event) -> tuple[str, str] | None:
    """Describe a swarm that is cut in two."""
    match event:
        case QuorumLost():
            return "no quorum", _minority(event)
        case QuorumBack():
            return "quorum", f"a majority is there again after {event.seconds:.0f} s: step {event.step} goes on"
        case LineageBegan():
            some = f"{event.there} of {count(event.voters, 'voter')}"
            return "provisional", f"{some} go on from step {event.step} by themselves: it counts when a majority agrees"
        case LineageConfirmed():
            return "confirmed", f"a majority agrees with all since step {event.step}: {event.microbatches} microbatches"
        case LineageGivenUp():
            return "given up", harmless(f"{event.microbatches} microbatches since step {event.step}: {event.reason}")
        case _:
            return None


def _minority(event: QuorumLost) -> str:
    """Until when a minority waits, and what it does then."""
    waits = f"{event.there} of {count(event.voters, 'voter')} can be reached: step {event.step} waits for a majority"
    if event.alone_at is None:
        return (
            f"{waits}, however long that takes; what is decided stays. Who died counts again once it is started where "
            "it was; if too few ever are, end it: swarm new --resume goes on from the newest checkpoint"
        )
    then = "then those that are here go on provisionally, which counts when a majority agrees later"
    return f"{waits} until {moment(event.alone_at)}; {then}. What is decided stays"


def _turnout(event: Participation) -> str:
    """Name the present replicas that were not in our part's averaging, or say that nobody else was."""
    part = _part(event.part)
    if event.whole:
        return f"{part}: all {event.participating} are in it again"
    if event.participating == 1 == event.live:
        return f"{part}: {ALONE}"
    counts = f"{event.live} live / {event.participating} participating / {event.averaged} averaged"
    return f"{part}: {counts} ({'; '.join(f'{peer}: {why}' for peer, why in sorted(event.why.items()))})"


def _served(event: DashboardServed) -> str:
    """Return where the dashboard is, and what opens it where it takes a token; that itself is told to nobody."""
    if not event.token:
        return event.address
    opens = f"it asks for its token, which is in {harmless(event.token)}"
    if os.path.isabs(event.token):
        opens = f'the address with its token: echo "{event.address}#token=$(cat {shlex.quote(harmless(event.token))})"'
    return f"{event.address}\n{' ' * LABEL_WIDTH}{opens}"


_TYPICAL_BYTES_S = 12.5e6


def _to_come(event: FrozenFetching) -> str:
    """Return what is fetched before this peer can take part, and how long that may take."""
    seconds = event.bytes_total / _TYPICAL_BYTES_S
    lasts = f"{seconds / 60:,.0f} min" if seconds >= 120 else f"{math.ceil(seconds)} s"
    text = f"{event.part}: {size_text(event.bytes_total)} of weights to fetch into {event.directory}"
    return harmless(f"{text} ({size_text(event.bytes_free)} free): {lasts} at 100 Mb/s, once for every run with them")


def _came(event: StateDownloaded | CopyHeld) -> str:
    """Describe the amount and the rate of a download."""
    return f"{size_text(event.bytes_received)} in {event.seconds:.1f} s"


def labelled(label: str, text: str) -> str:
    """A line with its label in a column of its own; nothing in it that a terminal would obey."""
    return printable(f"{label:<{LABEL_WIDTH - 1}} {text}").rstrip()


def _end(event: PeerStopped) -> tuple[str, str]:
    """Describe the end; the error that follows says once what went wrong and what to do."""
    if EXIT_OK < event.exit_code < EXIT_DRAINED:
        return "ended", f"with exit code {event.exit_code}; the error says why"
    return ("done" if event.exit_code == EXIT_OK else "ended"), harmless(event.reason)


def swarm_of(event: RunStarted) -> str:
    """Return the sizes of the swarm and its model, in words."""
    return f"{count(len(event.roster), 'peer')}, {event.parameters:,} parameters"


def _held_out(event: HeldOutLoss) -> str:
    """The loss of rows that nobody learns from, with how many they are where they are not all."""
    if event.loss is None:
        return f"no loss after step {event.step}: {event.reason or 'it is no number'}"
    of_all = event.microbatches == event.most
    some = "" if of_all else f", of {event.microbatches} of {event.most} microbatches: {event.reason}"
    return f"loss {event.loss:.4f} after step {event.step}, {event.tokens:,} tokens{some}"


def _ready(event: PeerReady) -> str:
    swarm = command_name()
    since = "it was cut off" if event.again else "it entered the run"
    first = "" if event.part is None else f", averages from step {event.step + 1} on"
    holds = f"{_part(event.part)} at step {event.step}{first}, {event.seconds:.1f} s after {since}"
    return f"{holds}\n{' ' * LABEL_WIDTH}look: {swarm} status, {swarm} peers; leave: Ctrl-C, or {swarm} drain"


def _preemption(event: PreemptionWatch | PreemptionNotice) -> str:
    if isinstance(event, PreemptionNotice):
        left = "" if event.deadline_s is None else f" in {event.deadline_s:.0f} s"
        return f"{event.source}: this machine is taken back{left}"
    if not event.source:
        return f"no notices are watched: {event.problem}"
    if event.problem:
        return f"{event.source} cannot be asked for notices: {event.problem}; trying on"
    return f"notices of {event.source} are watched"


def _part(part: PartName | None) -> str:
    if part is None:
        return "no part of the model"
    if stages := shared_by(part):
        return f"the layers that {stages} stages share"
    if (stage := stage_of(part)) is None:
        return "the ends (embedding and head)"
    variant, of = variant_of(part)
    return f"stage {stage}" + (f", variant {variant} of {of}" if of > 1 else "")


def _who(member: dict[str, object]) -> str:
    part = member.get("part") or member.get("role")
    return harmless(f"{member.get('name', 'a peer')}{f' ({part})' if part else ''}")


_PLAIN = {
    "deadline, no answer to health/1/beat in": "none came in",
}
"""What the network's own words mean."""


def harmless(text: str) -> str:
    """Return text of others as one line, so that no line of theirs looks like one of ours."""
    line = " ".join(printable(text).split())
    for term, plain in _PLAIN.items():
        line = line.replace(term, plain)
    return line


def _list(addresses: tuple[str, ...]) -> str:
    return ("\n" + " " * LABEL_WIDTH).join(addresses)
