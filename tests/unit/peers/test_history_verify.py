"""``swarm history --verify``: every way in which a chain can fail to hold is found at the record where it begins."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from peers.cli.app import run as swarm
from peers.commands.history_verify import ChainCheck
from swarm.consensus.history import HistoryLine
from swarm.consensus.records import Confirmation
from swarm.consensus.slowness import Barred
from swarm.errors import StateError
from swarm.security.signing import verify
from swarm.step.decisions import gone_back
from tests.harness.rigs.peers import PEERS, TRAINER, DecidedChain, eventful, printed, signed, write

CHAIN = eventful()
LINES = CHAIN.lines
BARRED = Barred(times=1, until=300)
THREE = ("otter", "mole", "heron")
Break = tuple[list[HistoryLine], int, str]
"""A chain, the line at which it breaks, and what is said."""


def begun() -> DecidedChain:
    return DecidedChain().found()


def changed(number: int, **changes: Any) -> list[HistoryLine]:
    """The chain, one of whose records says something else under the same signatures."""
    line = LINES[number]
    other = dataclasses.replace(line, record=line.record.model_copy(update=changes))
    return [*LINES[:number], other, *LINES[number + 1 :]]


def exchanged(number: int, line: HistoryLine) -> list[HistoryLine]:
    return [*LINES[:number], line, *LINES[number + 1 :]]


def again(earlier: int | None) -> list[HistoryLine]:
    """A chain whose step 4 commits once more what an earlier step did; None: what it did itself."""
    chain = begun().close().close().close()
    source = chain if earlier is not None else begun().close().close().close().close()
    one = source.lines[earlier if earlier is not None else 4].record.committed[0]
    times = 1 if earlier is not None else 2
    return chain.close(committed=(one,) * times, tokens=one.tokens * times, loss_sum=one.loss_sum * times).lines


def links() -> dict[str, Break]:
    first = LINES[1].record.model_copy(update={"step": 0})
    genesis = LINES[0].record.model_copy(update={"previous": "a" * 64})
    stranger = DecidedChain(fed=5).found().close().close().lines[2]
    return {
        "a record left out": ([*LINES[:3], *LINES[4:]], 4, "step 4 does not follow step 2"),
        "a record twice": ([*LINES[:3], *LINES[2:]], 4, "step 2 does not follow step 2"),
        "records in another order": ([LINES[0], LINES[2], LINES[1]], 2, "step 2 does not follow step 0"),
        "another chain's record": (exchanged(2, stranger), 3, "it follows the record"),
        "another run's record": (changed(3, run="77" * 32), 4, "it is of run 777777777777"),
        "begins with work": ([dataclasses.replace(LINES[1], record=first)], 1, "no run begins like that"),
        "a genesis after another": ([signed(genesis, THREE)], 1, "does not follow the record aaaaaaaaaaaa"),
        "goes on after its end": (begun().close(ended=True).close().lines, 3, "step 1 ended the run"),
        "begins anew": (begun().close().close(committed=(), tokens=0, loss_sum=0.0).lines, 3, "in its middle"),
    }


def signatures() -> dict[str, Break]:
    nobody = dataclasses.replace(LINES[4], acceptances=dict.fromkeys(LINES[4].acceptances or {}, bytes(64)))
    return {
        "a changed number": (changed(2, lr=0.2), 3, "it was not decided: 0 of 3 voters"),
        "a changed last record": (changed(6, digests={"ends": "f" * 64}), 7, "it was not decided: 0 of 3 voters"),
        "a bar without a proof": (begun().close().close(barred={"x": BARRED}).lines, 3, "whom it bars is not what"),
        "a minority": (begun().close().close(signers=("otter",)).lines, 3, "1 of 3 voters accepted it"),
        "strangers": (begun().close(signers=("tern", "vole")).lines, 2, "0 of 3 voters accepted it"),
        "forged": (exchanged(4, nobody), 5, "0 of 4 voters accepted it"),
        "of another term": (exchanged(3, dataclasses.replace(LINES[3], term=3)), 4, "0 of 5 voters accepted it"),
        "before it was proposed": (begun().close(term=2, sign_term=1).lines, 2, "it was proposed first in term 2"),
        "none kept": (exchanged(2, dataclasses.replace(LINES[2], acceptances=None)), 3, "shows who accepted it"),
        "a genesis not by all": (exchanged(0, signed(LINES[0].record, THREE[:2])), 1, "the acceptance of"),
    }


def counts() -> dict[str, Break]:
    back = begun().close().close(cursors={TRAINER: (0, 1)}).lines
    return {
        "a cursor that goes back": (back, 3, "goes back from (0, 2) to (0, 1)"),
        "tokens": (begun().close(tokens=22).lines, 2, "it says 22 tokens, its microbatches have 21"),
        "loss": (begun().close(loss_sum=3.0).lines, 2, "it says a loss sum of 3.0, its microbatches have 3.3"),
        "committed again": (again(2), 5, "is committed again, after step 2"),
        "committed twice in a step": (again(None), 5, "is committed twice in it"),
    }


BREAKS = links() | signatures() | counts()


@pytest.mark.parametrize("name", sorted(BREAKS))
def test_history_that_does_not_hold_names_the_first_break(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, number, words = BREAKS[name]
    path = write(tmp_path / "history.jsonl", lines)
    assert swarm(["history", "--file", str(path)]) == 0, "who only reads is shown it"
    capsys.readouterr()
    assert swarm(["history", "--file", str(path), "--verify"]) == 1
    said = capsys.readouterr()
    step = lines[number - 1].record.step
    assert said.err.startswith(f"error: {path}, line {number} (step {step}): ")
    assert words in said.err
    assert "  check: " in said.err
    assert "  next:  " in said.err
    assert "verified" not in said.out
    assert len(said.out.splitlines()) == (number + 1 if number > 1 else 0)
    assert swarm(["history", "--file", str(path), "--verify", "--json"]) == 1
    found = printed(capsys)
    assert (found["verified"]["ok"], found["records"], words in found["broken"]) == (False, number - 1, True)


def test_history_with_an_unreadable_line_is_shown_until_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "history.jsonl", LINES)
    data = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*data[:3], b"{}\n", *data[4:]]))
    assert swarm(["history", "--file", str(path)]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"error: {path}, line 4: not a close record")
    assert len(said.out.splitlines()) == 5


def test_history_chain_of_a_resumed_run_and_of_a_joiner_hold() -> None:
    resumed = DecidedChain(fed=6).resume(CHAIN.lines[3].record).close().close()
    check = ChainCheck(verify)
    for line in resumed.lines:
        check.take(line)
    assert (check.records, check.microbatches, check.trusted) == (3, 4, None)
    joined = ChainCheck(verify)
    for line in CHAIN.lines[2:]:
        joined.take(line)
    assert (joined.records, joined.microbatches, joined.trusted) == (5, 10, 2)


def alone() -> DecidedChain:
    """The mole and the heron are lost, and the otter goes on without them."""
    lost = tuple(sorted((PEERS["mole"], PEERS["heron"])))
    chain = begun().close().close(after=("otter",), term=1, lineage=2, absent=lost, signers=("otter",))
    return chain.close(lineage=2)


def confirmed(*signers: str) -> DecidedChain:
    """And then these are said to have accepted its first record alone."""
    chain = alone()
    signatures = signed(chain.lines[2].record, signers, 5).acceptances
    return chain.close(confirmation=Confirmation.of(5, signatures or {}))


def test_history_chain_that_was_provisional_holds_once_a_majority_agrees() -> None:
    said = []
    for chain in (alone(), confirmed("otter", "mole").close()):
        check = ChainCheck(verify)
        for line in chain.lines:
            check.take(line)
        said.append(check.provisional)
    assert said == [2, None]


@pytest.mark.parametrize(
    ("chain", "words"),
    [
        (confirmed("otter"), "does not prove that step 2 was confirmed: 1 of 3 voters"),
        (alone().close(), "it is of lineage 0, the one before of 2"),
        (begun().close(lineage=7), "it is of lineage 7, the one before of 0"),
    ],
)
def test_history_lineage_that_ends_or_begins_without_proof_does_not_hold(chain: DecidedChain, words: str) -> None:
    check = ChainCheck(verify)
    for line in chain.lines[:-1]:
        check.take(line)
    with pytest.raises(StateError, match=words):
        check.take(chain.lines[-1])


def test_history_after_a_return_is_verified_by_what_lies_beside_it_from_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = begun().close().close().close()
    to = before.lines[1].record
    back = signed(gone_back(before.head, 0, before.head.members, (), 9, to), THREE)
    after = DecidedChain(lines=[back], fed=2).close(returns=1).close(returns=1).lines
    path, aside = write(tmp_path / "history.jsonl", after), tmp_path / "history-1.jsonl"
    assert swarm(["history", "--file", str(path), "--verify"]) == 0
    assert "the first, of step 1, is taken on trust: the record before it is not here" in capsys.readouterr().out
    write(aside, before.lines)
    write(tmp_path / "history-2.jsonl", LINES)  # of another life, which leads to nothing
    assert swarm(["history", "--file", str(path), "--verify"]) == 0
    said = capsys.readouterr().out
    assert "verified: 7 records, with those of history-1.jsonl before the run went back" in said
    assert "6 microbatches, none twice" in said
    assert "on trust" not in said
    forged = dataclasses.replace(back, acceptances=dict.fromkeys(back.acceptances or {}, bytes(64)))
    write(path, [forged, *after[1:]])
    assert swarm(["history", "--file", str(path), "--verify"]) == 1
    assert "line 1 (step 1): it was not decided" in capsys.readouterr().err
    write(aside, [*before.lines[:2], changed(2, lr=0.2)[2], *before.lines[3:]])
    assert swarm(["history", "--file", str(write(path, after)), "--verify"]) == 1
    assert f"{aside}, line 3 (step 2): " in capsys.readouterr().err


def test_history_chain_lets_a_forgotten_trainer_begin_anew() -> None:
    chain = DecidedChain().found().close().close(cursors={}).close(cursors={TRAINER: (0, 1)})
    check = ChainCheck(verify)
    for line in chain.lines:
        check.take(line)


def test_history_record_that_does_not_hold_counts_for_nothing() -> None:
    check = ChainCheck(verify)
    for line in CHAIN.lines[:3]:
        check.take(line)
    for wrong in (CHAIN.lines[2], CHAIN.lines[4], dataclasses.replace(CHAIN.lines[3], acceptances={})):
        with pytest.raises(StateError):
            check.take(wrong)
    for line in CHAIN.lines[3:]:
        check.take(line)
    assert (check.records, check.microbatches) == (7, 12)
