"""Standings as plain lines: what ``swarm status`` and ``swarm peers`` print."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from peers.commands.look import Seen
from peers.console.words import (
    agreed_text,
    amount,
    command_name,
    command_to_order,
    count,
    learnt_text,
    one_line,
    passed_text,
    relaying_text,
    short_address,
    short_id,
)
from peers.control.status import ALONE, MemberReport, StatusReport
from peers.home.places import PlaceState, home_option
from swarm.disk import size_text
from swarm.ids import ENDS, PartName, shared_by, stage_of, variant_of
from swarm.membership.status_types import MemoryReport, PartTurnout

NO_PART = "no part"


def status_lines(seen: Sequence[Seen]) -> list[str]:
    """A row for each live peer, with what it waits for below it, and how the last peer of every other place ended."""
    live = [one for one in seen if one.place.live]
    lines = []
    if live:
        head = ("place", "name", "role", "part", "phase", "step", "loss", "tok/s", "members", "reach")
        rows = table([head, *map(_row, live)])
        lines.append(rows[0])
        for one, row in zip(live, rows[1:], strict=True):
            lines += [row, *(f"    {remark}" for remark in _remarks(one))]
    lines += variant_lines(live)
    lines += averaging_lines(live)
    lines += memory_lines(live)
    ended = [one for one in seen if not one.place.live]
    if ended:
        lines += [*([""] if live else []), "not running"]
        lines += [f"  {line}" for line in table([(one.place.name, one.place.title, _end(one)) for one in ended])]
    return lines


def _newest(seen: Sequence[Seen], knows: Callable[[StatusReport], object]) -> list[StatusReport]:
    """Return of each run the newest standing that knows of something."""
    newest: dict[str, StatusReport] = {}
    for standing in (one.standing for one in seen):
        if standing is not None and knows(standing):
            before = newest.get(standing.run)
            if before is None or before.step < standing.step:
                newest[standing.run] = standing
    return list(newest.values())


def variant_lines(seen: Sequence[Seen]) -> list[str]:
    """Return lines on the variants of stages, and on stages that share their layers, for each run of these peers."""
    lines = []
    for standing in _newest(seen, lambda one: one.variants or one.sharing):
        run = _run(standing.run_name, standing.run)
        lines += ["", f"sharing in {run}: {standing.sharing}"] if standing.sharing else []
        lines += ["", f"variants in {run}, when step {standing.step} closed"] if standing.variants else []
        rows = [
            (one.part, count(one.hosts, "host"), passed_text(one.kinds, one.passed, one.of))
            for one in standing.variants
        ]
        lines += [f"  {row}" for row in table(rows)]
    return lines


def averaging_lines(seen: Sequence[Seen]) -> list[str]:
    """Return lines on the replicas in each part's averaging in the newest step that one of these peers closed, for each
    of their runs."""
    lines = []
    for standing in _newest(seen, lambda one: one.averaging):
        parts = sorted(standing.averaging, key=lambda one: _part_order(one.part))
        what = f": {standing.averages}" if standing.averages else ""
        lines += ["", f"averaging in {_run(standing.run_name, standing.run)}, when step {parts[0].step} closed{what}"]
        lines += [f"  {row}" for row in table([(one.part, turnout_text(one)) for one in parts])]
    return lines


def memory_lines(seen: Sequence[Seen]) -> list[str]:
    """Return a table of what the memory of these peers holds by kind, two rows for each that says so: what is predicted
    and what is there. A kind that nobody has is left out."""
    told = [(one.standing.name, memory) for one in seen if one.standing and (memory := one.standing.memory)]
    known = dict.fromkeys(kind for _, memory in told for kind in (*memory.predicted, *memory.measured))
    kinds = [kind for kind in known if any(kind == held for _, memory in told for held, _, _ in _kinds(memory))]
    rows = [("memory, bytes", "", *kinds, "all", "process", "GPU")]
    for name, memory in told:
        for label, held in (("predicted", memory.predicted), ("measured", memory.measured)):
            sizes = [amount(held[kind]) if held.get(kind) else "-" for kind in kinds]
            gpu = "-" if memory.allocated is None else amount(memory.allocated)
            whole = (amount(memory.resident), gpu) if held is memory.measured else ("", "")
            rows.append((name if held is memory.predicted else "", label, *sizes, amount(sum(held.values())), *whole))
    return ["", *table(rows)] if kinds else []


def memory_text(memory: MemoryReport) -> str:
    """``60 MB predicted, 41 MB measured: weights 12 MB, 12 MB; graphs 24 MB, 5 MB; 512 MB in the process``."""
    kinds = "; ".join(f"{kind} {size_text(most)}, {size_text(now)}" for kind, most, now in _kinds(memory))
    predicted, measured = (size_text(sum(held.values())) for held in (memory.predicted, memory.measured))
    gpu = "" if memory.allocated is None else f", {size_text(memory.allocated)} on the GPU"
    sums = f"{predicted} predicted, {measured} measured{f': {kinds}' if kinds else ''}"
    return f"{sums}; {size_text(memory.resident)} in the process{gpu}"


def _kinds(memory: MemoryReport) -> list[tuple[str, int, int]]:
    """Each kind that is not nothing, what is predicted of it, and what is measured."""
    pairs = [
        (kind, memory.predicted.get(kind, 0), memory.measured.get(kind, 0))
        for kind in dict.fromkeys([*memory.predicted, *memory.measured])
    ]
    return [pair for pair in pairs if pair[1] or pair[2]]


def audits_text(standing: StatusReport) -> str:
    """Return how many hops this trainer had computed again by others, and what came of it; "" where none were."""
    made, wrong, doubtful, unjudged = standing.audits
    if not made:
        return ""
    said = [f"{wrong} wrong", *([f"{doubtful} doubtful"] if doubtful else [])]
    return f"{count(made, 'hop')} computed again by others: {', '.join(said)}, {unjudged} that nobody could judge"


def turnout_text(turnout: PartTurnout) -> str:
    """``3 live / 3 participating / 2 averaged (host-2: no microbatch this step)``."""
    counts = f"{turnout.live} live / {turnout.participating} participating / {turnout.averaged} averaged"
    said = [*([ALONE] if turnout.alone else []), *(f"{name}: {why}" for name, why in turnout.why.items())]
    return f"{counts} ({'; '.join(said)})" if said else counts


def unfed_text(name: str, until: int) -> str:
    """``ann, until step 300: its microbatches pull against the others'``."""
    return f"{name}, until step {until}: its microbatches pull against the others'"


def mixing_text(standing: StatusReport) -> str:
    """Return how often this peer mixed its weights with others, and how often in vain; "" where replicas do not train
    apart."""
    if not standing.mixed:
        return ""
    alone = f", {standing.mixed_alone} of them alone: the others were away, or too far behind"
    return f"{count(standing.mixed, 'time')}{alone if standing.mixed_alone else ''}"


def early_text(standing: StatusReport) -> str:
    """``25 %, 31 % of the last 2 steps' microbatches``; "" where no step is fed early, or none was closed yet."""
    if not standing.early:
        return ""
    shares = ", ".join(f"{share:.0%}".replace("%", " %") for share in standing.early)
    steps = "step's" if len(standing.early) == 1 else f"{len(standing.early)} steps'"
    return f"{shares} of the last {steps} microbatches"


def capacities_text(standing: StatusReport) -> str:
    """``3.1, 1.6, - microbatches/s by stage``; "" where no host has told how fast it is."""
    if not standing.capacities:
        return ""
    return ", ".join(f"{each:.3g}" if each else "-" for each in standing.capacities) + " microbatches/s by stage"


def device_text(standing: StatusReport) -> str:
    """``61.2 TFLOP/s (PaLM), 37 % MFU``; "" before the first whole step, and for a peer without a part. Without a known
    peak, as on a CPU, there is no MFU."""
    if standing.device_use is None:
        return ""
    mfu = "" if standing.device_use.mfu is None else f", {100 * standing.device_use.mfu:.3g} % MFU"
    return f"{amount(standing.device_use.flops_per_s)}FLOP/s (PaLM){mfu}"


def hidden_line(number: int, home: Path) -> list[str]:
    """Return the line about hidden peers of a home, if there are any."""
    if not number:
        return []
    command = f"{command_name()} status --all{home_option(home)}"
    return ["", f"not shown: {count(number, 'peer')} that ended more than a day ago ({command})"]


def detail_lines(seen: Seen) -> list[str]:
    """One peer, a line for each thing to know."""
    facts = [("peer", seen.place.described), ("phase", seen.phase)]
    if seen.standing is not None:
        facts += _facts(seen.standing)
    elif not seen.place.live:
        facts.append(("end", _end(seen)))
    if seen.trouble is not None:
        facts.append(("trouble", f"{seen.trouble.cause}; {seen.trouble.check}"))
    state = seen.place.state
    if state is not None:
        facts += _traces(state, seen.standing is None)
    width = max(len(label) for label, _ in facts)
    return [f"{label:<{width}}  {one_line(text)}" if text else f"{label}" for label, text in facts]


def member_lines(standing: StatusReport, members: Sequence[MemberReport]) -> list[str]:
    """The swarm as one peer sees it, a paragraph for each part."""
    if not members:
        waits = f"; waiting: {one_line(standing.waiting_for)}" if standing.waiting_for else ""
        return [f"{standing.name} ({standing.phase}) takes part in no run yet{waits}"]
    seen_by = f"run {_run(standing.run_name, standing.run)} as {standing.name} sees it"
    lines = [f"{seen_by}: {count(len(members), 'peer')}, step {_step(standing)}"]
    parts = sorted({member.part for member in members}, key=_part_order)
    rows = table([_member(member) for part in parts for member in members if member.part == part])
    said = {one.part: f" ({passed_text(one.kinds, one.passed, one.of)})" for one in standing.variants}
    for part in parts:
        mine = sum(member.part == part for member in members)
        about = f" ({standing.sharing})" if shared_by(PartName(part or "")) else said.get(part or "", "")
        lines += ["", f"{part or NO_PART}{about}", *(f"  {row}" for row in rows[:mine])]
        rows = rows[mine:]
    return lines


def starting_lines(seen: Sequence[Seen], *, alone: bool) -> list[str]:
    """The peers of this machine that take part in nothing yet; below other lines unless they are ``alone``."""
    if not seen:
        return []
    return [*([] if alone else [""]), "starting on this machine", *(f"  {one.place.described}" for one in seen)]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of text as lines with aligned columns."""
    if not rows:
        return []
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def when(seconds: float) -> str:
    """A moment (seconds since the epoch) as this machine's clock shows it."""
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _row(seen: Seen) -> tuple[str, ...]:
    place, standing = seen.place, seen.standing
    if standing is None:
        role = place.state.role if place.state else ""
        return (place.name, place.title, role or "-", "-", seen.phase, "-", "-", "-", "-", "-")
    return (
        place.name,
        standing.name,
        standing.role,
        standing.part or "-",
        standing.phase,
        _step(standing),
        "-" if standing.loss is None else f"{standing.loss:.3f}",
        "-" if standing.tokens_per_s is None else amount(standing.tokens_per_s),
        _members(standing),
        standing.reachability.partition(":")[0].partition(" (")[0],
    )


def _remarks(seen: Seen) -> list[str]:
    if seen.trouble is not None:
        return [f"{seen.trouble.cause}; {seen.trouble.check}"]
    standing = seen.standing
    if standing is None:
        return []
    copies = ", ".join(standing.copies)
    facts = [
        ("waiting", standing.waiting_for),
        ("ends", _ends(standing)),
        ("the disk cannot write", standing.disk),
        ("copies", copies),
    ]
    facts += [("fewer copies in the run", standing.fewer_copies), ("mixed", mixing_text(standing))]
    facts += [("not fed", "; ".join(unfed_text(*one) for one in standing.unfed))]
    facts += [("early", early_text(standing)), ("capacities", capacities_text(standing))]
    facts.append(("audits", audits_text(standing)))
    facts.append(("relays", relaying_text(standing.relaying) if standing.relaying else ""))
    return [f"{label}: {one_line(text)}" for label, text in facts if text]


def _ends(standing: StatusReport) -> str:
    """Say by when a peer ends that was told to leave within a time."""
    return "" if standing.ends_by is None else f"at {when(standing.ends_by)} at the latest, whatever it waits for"


def _facts(standing: StatusReport) -> list[tuple[str, str]]:
    facts = [
        ("waiting", standing.waiting_for),
        ("ends", _ends(standing)),
        ("disk", f"cannot write {standing.disk}" if standing.disk else ""),
        ("role", standing.role),
        ("part", f"{standing.part or NO_PART}{f', because {standing.reason}' if standing.reason else ''}"),
        ("copies", ", ".join(standing.copies)),
        ("fewer", f"copies in the run: {standing.fewer_copies}" if standing.fewer_copies else ""),
        ("votes", standing.few_voters),
        ("trainers", standing.few_trainers),
        ("barred", standing.barred),
        ("run", f"{_run(standing.run_name, standing.run)}, {count(standing.members, 'member')}{_lost(standing)}"),
        ("step", _step(standing)),
        ("sends", standing.codecs),
        ("averages", standing.averages),
        ("early", early_text(standing)),
        ("capacities", capacities_text(standing)),
        ("sharing", standing.sharing),
        *(
            ("variant", f"{one.part}, {count(one.hosts, 'host')}, {passed_text(one.kinds, one.passed, one.of)}")
            for one in standing.variants
        ),
        ("device", device_text(standing)),
        ("mixed", mixing_text(standing)),
        ("audits", audits_text(standing)),
        *(("averaging", f"{one.part}: {turnout_text(one)}") for one in standing.averaging),
        *(("not fed", unfed_text(*one)) for one in standing.unfed),
        ("loss", "" if standing.loss is None else f"{standing.loss:.3f}"),
        ("held out", f"{standing.held_out[1]:.4f} after step {standing.held_out[0]:,.0f}" if standing.held_out else ""),
        ("tokens/s", "" if standing.tokens_per_s is None else amount(standing.tokens_per_s)),
        ("newest step", learnt_text(*standing.tokens) if any(standing.tokens) else ""),
        ("memory", "" if standing.memory is None else memory_text(standing.memory)),
        ("relays", relaying_text(standing.relaying) if standing.relaying else ""),
        *_admission(standing),
        ("reach", standing.reachability),
        *(("address", address) for address in standing.addresses),
        ("since", when(standing.started)),
    ]
    return [(label, text) for label, text in facts if text]


def _admission(standing: StatusReport) -> list[tuple[str, str]]:
    """Return who may join, and who was admitted and revoked, where not everybody may."""
    admission = standing.admission
    if admission is None:
        return []
    admitted = [("admitted", f"{name}, as {role}: {peer}") for name, role, peer in admission.admitted]
    return [
        ("admits", f"{admission.mode}; issuers: {', '.join(admission.issuers) or 'none is left'}"),
        *admitted,
        *(("invited", invited_text(*one)) for one in admission.invited),
        ("revoked", ", ".join(admission.revoked)),
        *(("vote", _vote(*vote)) for vote in admission.votes),
    ]


def invited_text(name: str, role: str, until: int, given: float) -> str:
    """Say of an invite that nobody has used whom it is for, and when it was given."""
    return f"{name}, as {role}, until step {until}{f', {when(given)}' if given else ''}: not used yet"


def _vote(verb: str, who: str, agreed: int, voters: int) -> str:
    return f"to {verb} {who}: {agreed_text(agreed, voters)}; who agrees types: {command_to_order(verb, who)}"


def _traces(state: PlaceState, alone: bool) -> list[tuple[str, str]]:
    """Return where to look further, and the place's own knowledge when it is the only source (``alone``)."""
    facts = [("id", state.peer)]
    if alone:
        facts += [("role", state.role), ("run", _run(state.run_name, state.run)), ("since", when(state.started))]
    facts.append(("session", state.session))
    return [(label, text) for label, text in facts if text]


def _end(seen: Seen) -> str:
    state = seen.place.state
    if seen.place.owner:
        return f"unreadable: it belongs to {seen.place.owner}"
    if state is None:
        return "no start of it is known"
    if state.end is None:
        return f"was killed, or its machine went down; it started {when(state.started)}"
    if seen.comes_back:
        over = " when that is over" if seen.phase == "paused" else ""
        by_itself = f"comes back by itself{over} (process {state.keeper} sees to that)"
        return f"{seen.phase} {when(state.end.at)}: {one_line(state.end.reason)}; {by_itself}"
    return f"ended {when(state.end.at)} with exit code {state.end.exit_code}: {one_line(state.end.reason)}"


def _member(member: MemberReport) -> tuple[str, ...]:
    where = short_address(member.addresses[0]) if member.addresses else short_id(member.peer)
    facts = [
        f"in {member.region}" if member.region else "",
        "only calls" if member.outgoing else "",
        f"copies: {', '.join(member.copies)}" if member.copies else "",
        f"{count(member.checked, 'hop')} checked" if member.checked else "",
        one_line(member.lost),
    ]
    return (member.name, member.role, member.state, member.link, where, "; ".join(filter(None, facts)))


def _members(standing: StatusReport) -> str:
    return f"{standing.members}{_lost(standing)}"


def _lost(standing: StatusReport) -> str:
    return f", {standing.lost} lost" if standing.lost else ""


def _part_order(part: str | None) -> tuple[bool, bool, int, tuple[int, int]]:
    """Stages by number, and of each its variants, then the ends, then those that hold nothing."""
    stage = None if part is None else stage_of(PartName(part))
    return part is None, part == ENDS, stage or 0, variant_of(PartName(part or ""))


def _run(name: str, run: str) -> str:
    return f"{name} ({run[:12]})" if name and run else run[:12] or name


def _step(standing: StatusReport) -> str:
    return f"{standing.step} of {standing.steps}" if standing.steps else "-"
