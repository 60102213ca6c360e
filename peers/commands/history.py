"""``swarm history``: read a history once, collect its rows and, if asked for, check each record. Imports no torch.

A :class:`Row` is what is shown of one close record, as facts and as lines; making one is pure.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.commands.history_source import HistorySource
from peers.commands.history_verify import ChainCheck
from peers.commands.status_text import table
from peers.console.words import another_path, codecs_text, count, listed
from swarm.columns import count_passed, host_parts
from swarm.consensus.faults import PeerFault, check_fault, newly_barred
from swarm.consensus.history import HistoryLine, HistoryReader, earlier
from swarm.consensus.records import CloseRecord
from swarm.consensus.roster import Roster, owner
from swarm.errors import ConfigError, Refused, StateError, Violation
from swarm.ids import PeerId, shared_by
from swarm.security import signing

HEAD = ("step", "term", "loss", "tokens", "microbatches", "members", "leader", "hash", "changes")
SHOWN_NAMES = 8
"""More names than these are counted: a line for people has no room for a thousand."""


@dataclass(frozen=True, slots=True)
class Named:
    """A peer, and what it is called; its id where no roster before names it."""

    peer: str
    name: str


@dataclass(frozen=True, slots=True)
class LeftOutSum:
    """Whose sum was far from the others' of its part: of how many of its target tokens the mean lacks, as those say by
    whom they were left out."""

    peer: Named
    tokens: int
    by: tuple[Named, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultShown:
    """One fault that a record carries: who did a ``microbatch`` at a ``part``, or ("") a share of the part's averaging,
    who computed it again and found that wrong, or right, and whom that proves wrong, with the step until which each is
    barred (0: not yet). ``proof`` is what is wrong with the signatures, "" where all hold, None where the roster before
    is not known."""

    accused: Named
    part: str
    microbatch: str
    wrong_say: tuple[Named, ...]
    right_say: tuple[Named, ...]
    barred: tuple[tuple[Named, int], ...]
    proof: str | None


@dataclass(frozen=True, slots=True)
class VariantShown:
    """A variant of a stage: how many members hold it from this record on, and how many of its microbatches passed
    it."""

    part: str
    hosts: int
    passed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One record. ``term`` is the one in which it was decided, ``proposed`` that in which it was proposed first.

    ``loss`` is nats per target token, None for a record without microbatches. ``members`` is the size of the next
    step's roster; ``joined``, ``left`` (asked to) and ``absent`` (lost) tell it from the one before, and are empty in
    the first row of a file. ``leader`` is who owned the term, None where the roster before is not known. ``accepted``
    is how many signatures lie with it, None where none were kept. ``cursors`` are (epoch, position) by trainer.
    ``provisional_since`` is the first step that was closed without a majority, of a record that counts only when one
    agrees; ``confirmed`` is the record that proves it did, ``ended`` one with which the run was ended early. ``codecs``
    are those of each boundary in the next step, where records name them: others than before where they have changed.
    ``unfed`` are trainers that the record takes the quota from, with the step from which they may feed again.
    ``variants`` are those of stages; ``parted``: with it stages that shared their layers go on each by itself.
    """

    step: int
    term: int
    proposed: int
    founding: bool
    void: bool
    loss: float | None
    tokens: int
    microbatches: int
    aside: int
    members: int
    joined: tuple[Named, ...]
    left: tuple[Named, ...]
    absent: tuple[Named, ...]
    leader: Named | None
    accepted: int | None
    grad_norm: float
    clip: float
    lr: float
    hash: str
    previous: str
    cursors: Mapping[str, tuple[int, int]]
    provisional_since: int | None = None
    confirmed: bool = False
    ended: bool = False
    codecs: tuple[tuple[str, str], ...] = ()
    codecs_changed: bool = False
    repeats: int = 0
    left_out: tuple[LeftOutSum, ...] = ()
    faults: tuple[FaultShown, ...] = ()
    unfed: tuple[tuple[Named, int], ...] = ()
    variants: tuple[VariantShown, ...] = ()
    parted: bool = False

    def document(self) -> dict[str, Any]:
        """The same as plain data for ``--json``."""
        return dataclasses.asdict(self)


def row_of(line: HistoryLine, before: Roster | None, codecs: tuple[tuple[str, str], ...] | None = None) -> Row:
    """The row of a record; ``before`` and ``codecs`` are the roster and codecs of the record before it, None where
    that is not known."""
    record, after = line.record, line.record.members
    known = before if before is not None else Roster(())
    lost = [PeerId(peer) for peer in record.absent]
    went = [peer for peer in known.peers if peer not in after and peer not in record.absent]
    came = [peer for peer in after.peers if peer not in known] if before is not None else []
    led = owner(before, record.decides, line.term) if before is not None and len(before) else None
    return Row(
        step=record.step,
        term=line.term,
        proposed=record.term,
        founding=record.founding,
        void=record.void,
        loss=record.loss if record.committed else None,
        tokens=record.tokens,
        microbatches=len(record.committed),
        aside=len(record.aside),
        members=len(after),
        joined=_named(came, after),
        left=_named(went, known),
        absent=_named(lost, known),
        leader=None if led is None else _named([led], known)[0],
        accepted=None if line.acceptances is None else len(line.acceptances),
        grad_norm=record.grad_norm,
        clip=record.clip,
        lr=record.lr,
        hash=record.hash(),
        previous=record.previous,
        cursors=dict(record.cursors),
        provisional_since=record.lineage or None,
        confirmed=record.confirmation is not None,
        ended=record.ended,
        codecs=record.codecs,
        codecs_changed=codecs is not None and record.codecs != codecs,
        repeats=record.repeats,
        left_out=tuple(
            LeftOutSum(_named([peer], known)[0], tokens, _named(by, known))
            for peer, (tokens, by) in record.called_far.items()
        ),
        faults=tuple(_fault(record, one, before) for one in record.faults),
        unfed=tuple((_named([peer], known)[0], one.until) for peer, one in record.failed_trainers.items()),
        variants=tuple(
            VariantShown(part, len(after.replicas(part)), many)
            for part, many in count_passed(host_parts(after.all_parts), record.committed).items()
        ),
        parted=any(map(shared_by, known.parts)) and not any(map(shared_by, after.parts)),
    )


def _fault(record: CloseRecord, fault: PeerFault, before: Roster | None) -> FaultShown:
    """Return what is shown of a fault, verified anew. Cost: 0.1 ms a signature."""
    known, found, proof = before or Roster(()), tuple[PeerId, ...](), None
    if before is not None:
        try:
            found, proof = check_fault(record.run, before, record.step, record.previous, fault, signing.verify), ""
        except (Refused, Violation) as refused:
            proof = refused.reason
    until = {peer: record.barred[peer].until for peer in newly_barred(record.barred, record.step).intersection(found)}
    return FaultShown(
        accused=_named([PeerId(fault.accused)], known)[0],
        part=fault.where(known),
        microbatch=str(fault.work or ""),
        wrong_say=_named(fault.said(wrong=True), known),
        right_say=_named(fault.said(wrong=False), known),
        barred=tuple((one, until.get(PeerId(one.peer), 0)) for one in _named(found, known)),
        proof=proof,
    )


def fault_lines(rows: Iterable[Row]) -> list[str]:
    """Return a line for each fault of these records: who did what, who says so, and what came of it."""
    return [f"step {row.step}: {_fault_text(one)}" for row in rows for one in row.faults] or ["no fault is recorded"]


def _fault_text(one: FaultShown) -> str:
    said = [
        f"{_listed(who)} found it {what}" for what, who in (("wrong", one.wrong_say), ("right", one.right_say)) if who
    ]
    proof = "not verified: the roster before is not here" if one.proof is None else "all signatures verified"
    proof = f"it proves nothing: {one.proof}" if one.proof else proof
    out = [f"{who.name} barred until step {until}" if until else f"{who.name} noted" for who, until in one.barred]
    return "; ".join([f"{one.part} of {one.microbatch or 'its average'} by {one.accused.name}", *said, proof, *out])


def row_lines(rows: Sequence[Row]) -> list[str]:
    """A table, a line for each row, below its head."""
    return table([HEAD, *map(_cells, rows)])


def variant_lines(rows: Sequence[Row]) -> list[str]:
    """Return what passed each variant in these steps, and how many hosts it has after them; nothing without any."""
    if not rows or not (variants := rows[-1].variants):
        return []
    passed, of = Counter[str](), sum(row.microbatches for row in rows if row.variants)
    for row in rows:
        passed.update({one.part: one.passed for one in row.variants})
    shares = [(one.part, count(one.hosts, "host"), f"{passed[one.part]} of {of} microbatches") for one in variants]
    return [f"variants, of these steps (hosts after step {rows[-1].step})", *(f"  {line}" for line in table(shares))]


def _cells(row: Row) -> tuple[str, ...]:
    loss = "-" if row.loss is None else f"{row.loss:.4f}"
    leader = "-" if row.leader is None else row.leader.name
    numbers = (row.step, row.term, loss, row.tokens, row.microbatches, row.members)
    return (*map(str, numbers), leader, row.hash[:12], "; ".join(_changes(row)))


def _beginning(row: Row) -> str:
    """Say what a record without microbatches does; "" for any other."""
    if row.founding:
        return "the run begins" if row.step == 0 else "the run is resumed"
    if row.repeats:
        return f"the run went back to here from step {row.repeats}"
    return "given up" if row.void else ""


def _changes(row: Row) -> Iterable[str]:
    yield from filter(None, [_beginning(row)])
    for word, peers in (("joined", row.joined), ("left", row.left), ("lost", row.absent)):
        if peers:
            yield f"{word}: {_listed(peers)}"
    if row.provisional_since is not None:
        yield f"provisional since step {row.provisional_since}"
    if row.parted:
        yield "stages share their layers no more: each goes on by itself"
    if row.ended:
        yield "the run was ended"
    if row.confirmed:
        yield "a majority agrees with what was provisional before it"
    if row.aside:
        yield f"{row.aside} microbatch{'es' * (row.aside > 1)} set aside"
    yield from _misdeeds(row)
    if row.term != row.proposed:
        yield f"proposed in term {row.proposed}"
    yield from [f"sends {codecs_text(row.codecs)} from here"] if row.codecs_changed else []


def _misdeeds(row: Row) -> Iterable[str]:
    for one in row.faults:
        yield f"proven wrong: {_listed([who for who, _ in one.barred]) or one.accused.name}"
    for far in row.left_out:
        yield f"{count(far.tokens, 'token')} of {far.peer.name} left out, as {_listed(far.by)} said"
    for trainer, until in row.unfed:
        yield f"nothing more of {trainer.name} until step {until}: it pulls against the others"


def _listed(peers: Sequence[Named]) -> str:
    names = [peer.name for peer in peers[:SHOWN_NAMES]]
    more = len(peers) - len(names)
    return listed([*names, f"{more} more"] if more else names)


def _named(peers: Iterable[PeerId], roster: Roster) -> tuple[Named, ...]:
    found = (Named(peer, roster.names.get(peer, peer)) for peer in peers)
    return tuple(sorted(found, key=lambda one: (one.name, one.peer)))


# --- reading and showing a whole history -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryAnswer:
    """The content of a history. ``rows`` are its last ones, ``records`` how many it has and ``steps`` its first and
    last.

    ``before`` are the files next to it from which it goes on, where they were verified with it. ``torn``: an unfinished
    line lies behind them. ``broken`` says what ends the reading early, path and line in it;
    empty for a history that is in order. ``check`` is None unless it was verified.
    """

    source: HistorySource
    run: str
    rows: tuple[Row, ...]
    records: int
    steps: tuple[int, int]
    torn: bool
    broken: str
    check: ChainCheck | None
    earlier: tuple[Path, ...]
    before: tuple[Path, ...] = ()


def read(source: HistorySource, *, last: int | None, verify: bool) -> HistoryAnswer:
    """Read a history; of its rows the ``last`` are kept (None: all). Costs a parse and a hash of every record, and with
    ``verify`` 0.1 ms for each signature, also of what lies next to it from before the run went back. Raises ConfigError
    for a file that cannot be opened or has no record; what is wrong with a record is in the answer."""
    reader, rows = HistoryReader(source.path), deque[Row](maxlen=last)
    check, led = (ChainCheck(signing.verify), _led_to(source.path)) if verify else (None, [])
    wrong = "" if check is None else _take(check, led)
    before: Roster | None = None
    codecs: tuple[tuple[str, str], ...] | None = None
    run, broken, number, first, newest = "", "", 0, 0, 0
    try:
        for line in reader:
            if check is not None and not wrong:
                check.take(line)
            rows.append(row_of(line, before, codecs))
            first, newest = (first if number else line.record.step), line.record.step
            run, before, number = line.record.run, line.record.members, number + 1
            codecs = line.record.codecs
    except StateError as error:
        placed = str(error).startswith(str(source.path))
        broken = str(error) if placed else f"{source.path}, line {number + 1} (step {line.record.step}): {error}"
        if placed and not number:
            raise _unusable(source.path, "its first line is no close record") from error
    except OSError as error:
        raise _unusable(source.path, error.strerror or str(error)) from error
    if not number and not broken:
        raise _unusable(source.path, "it has no record yet")
    return HistoryAnswer(
        source=source, run=run, rows=tuple(rows), records=number, steps=(first, newest), torn=reader.torn,
        broken=wrong or broken, check=check, earlier=tuple(earlier(source.path)), before=tuple(led),
    )  # fmt: skip


def _led_to(path: Path) -> list[Path]:
    """The files next to a history from which it goes on, as where the run went back to a checkpoint; the oldest
    first."""
    found = list[Path]()
    try:
        with closing(iter(HistoryReader(path))) as lines:
            previous = next((line.record.previous for line in lines), None)
        for file in reversed(earlier(path)):
            records = [(line.record.previous, line.record.hash()) for line in HistoryReader(file)]
            if records and records[-1][1] == previous:
                found.insert(0, file)
                previous = records[0][0]
    except (StateError, OSError):  # what cannot be read leads to nothing
        return found
    return found


def _take(check: ChainCheck, files: Iterable[Path]) -> str:
    """Verify these one after the other; returns what is wrong, path and line in it, "" for nothing."""
    for file in files:
        for number, line in enumerate(HistoryReader(file), 1):  # it was read a moment ago
            try:
                check.take(line)
            except StateError as error:
                return f"{file}, line {number} (step {line.record.step}): {error}"
    return ""


def lines(told: HistoryAnswer, *, faults: bool = False) -> list[str]:
    """Return the lines for people, without the broken record; of ``faults`` those alone."""
    if not told.records:
        return []
    found = [_title(told), *(fault_lines(told.rows) if faults else [*row_lines(told.rows), *variant_lines(told.rows)])]
    if told.torn:
        found.append("an unfinished line behind it is left out: it is being written, or its peer ended meanwhile")
    if told.earlier:
        found.append(f"before it: {', '.join(path.name for path in told.earlier)} next to it (--file)")
    if told.check is not None and not told.broken:
        found.append(_verified(told.check, told.before))
    return found


def document(told: HistoryAnswer) -> dict[str, Any]:
    """The same as plain data for ``--json``."""
    verified = None
    if told.check is not None:
        verified = {"ok": not told.broken, "records": told.check.records, "microbatches": told.check.microbatches,
                    "trusted": told.check.trusted}  # fmt: skip
    return {
        "path": str(told.source.path.absolute()),
        "run": told.run,
        "records": told.records,
        "rows": [row.document() for row in told.rows],
        "torn": told.torn,
        "earlier": [str(path.absolute()) for path in told.earlier],
        "verified": verified,
        "broken": told.broken,
    }


def _title(told: HistoryAnswer) -> str:
    first, newest = told.steps
    name = f"{told.source.run_name} " if told.source.run_name else ""
    keeper = f", as {told.source.keeper} keeps it" if told.source.keeper else ""
    shown = f", the last {len(told.rows)} shown" if len(told.rows) < told.records else ""
    return f"run {name}({told.run[:12]}), steps {first} to {newest}{keeper}{shown}: {told.source.path}"


def _verified(check: ChainCheck, before: Sequence[Path]) -> str:
    trust = "" if check.trusted is None else (
        f"; the first, of step {check.trusted}, is taken on trust: the record before it is not here"
    )  # fmt: skip
    trust += "" if check.provisional is None else f"; provisional since step {check.provisional}: no majority yet"
    beside = f", with those of {listed([path.name for path in before])} before the run went back" if before else ""
    return (f"verified: {count(check.records, 'record')}{beside}, each follows the one before it and is signed by "
            f"those who decide; {check.microbatches} microbatches, none twice{trust}")  # fmt: skip


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError("history", str(path), "a history with a record in it", another_path(path), why=why)
