"""The JSON report of a local run: everything a script wants to know, also when the run failed."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from peers.local.progress import RunView
from swarm.disk import write_named
from swarm.errors import StateError
from swarm.monitoring.views import MicrobatchAccount
from swarm.parsing import parse_json

ExitReason = Literal["completed", "interrupted", "peer_failed", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The end of a run: for exit code, last line and report. ``blamed`` is the peer that failed, if one did."""

    exit_reason: ExitReason
    exit_code: int
    message: str
    blamed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Nats per token on held-out text before and after, and what the model makes up."""

    first: float | None = None
    last: float | None = None
    last_step: int | None = None
    sample: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The facts of a run that its events lack. ``began`` is when the command's process started, seconds since the Unix
    epoch."""

    run: str | None
    directory: str
    peers: int
    stages: int
    trainers: int
    steps_wanted: int
    began: float
    ended: float


def build_report(facts: RunFacts, view: RunView, evaluation: Evaluation, outcome: RunOutcome) -> dict[str, Any]:
    """The report as plain data; what was not measured is null.

    How it ended: ``exit_reason``, ``exit_code``, ``message``, ``failed_peer`` (name of the one to blame).
    What ran: ``run`` (id), ``directory`` (path), ``peers`` and ``stage_hosts`` (both the number of stage hosts; the
    bootstrap and the trainers come on top), ``stages``, ``trainers``, ``parameters`` (of the whole model),
    ``steps_wanted``; ``steps``: how many were closed; ``steps_given_up``: the numbers of those of which nothing counts,
    because a part had nobody left who held it.
    Learning, in nats per target token: ``losses`` (one per step that counts), of them ``loss_first`` and ``loss_last``;
    ``eval_first`` and ``eval_last``, on held-out text with the initial weights and with those of step
    ``eval_last_step``; ``sample``: text made up by the latter.
    Speed: ``tokens`` (target tokens of all closed steps: what was learnt of the ``computed_tokens`` of their
    microbatches), ``tokens_per_s`` (those after the first step, per second between the first closing and the last),
    ``seconds_to_first_step`` and ``seconds`` (since the command started).
    Bytes sent by all peers: ``bytes_at_start``, the initial weights, downloaded once; ``bytes_per_step``, the mean
    over closed steps of everything else (meeting each other before the first step is in that step's).
    Keeping it together: ``hops_moved`` (times that a microbatch went on with another replica),
    ``replicas_digest_mismatches`` (parts and steps in which replicas disagreed: 0), ``digests`` (SHA-256 of each part
    after the last step), ``checkpoint_steps``.

    Every microbatch that a trainer sent on its way (``microbatches_issued``) has one of three ends. *Committed*
    (``microbatches_committed``): a closed step counts it. *Lost* (``microbatches_lost``): its step closed without it,
    and no other step counts it; 0 in every run, also in one that failed. *Uncommitted* (``microbatches_uncommitted``):
    its step never closed because the run ended first, so nothing was decided about it (or what was decided is missing
    from the events); ``microbatches_uncommitted_reason`` says which. *Duplicated* ones (``microbatches_duplicated``)
    are among the committed, counted more than once: 0 in every run.
    """
    rows = view.steps.rows()
    trained = [row for row in rows if not row.given_up]
    return {
        "exit_reason": outcome.exit_reason,
        "exit_code": outcome.exit_code,
        "message": outcome.message,
        "failed_peer": outcome.blamed,
        "run": facts.run,
        "directory": facts.directory,
        "peers": facts.peers,
        "stage_hosts": facts.peers,
        "stages": facts.stages,
        "trainers": facts.trainers,
        "parameters": view.parameters,
        "steps": len(rows),
        "steps_wanted": facts.steps_wanted,
        "steps_given_up": [row.step for row in rows if row.given_up],
        "loss_first": trained[0].loss if trained else None,
        "loss_last": trained[-1].loss if trained else None,
        "losses": [row.loss for row in trained],
        "eval_first": evaluation.first,
        "eval_last": evaluation.last,
        "eval_last_step": evaluation.last_step,
        "sample": evaluation.sample,
        "tokens": sum(row.tokens for row in rows),
        "computed_tokens": sum(row.computed for row in rows),
        "tokens_per_s": view.tokens_per_s,
        "seconds_to_first_step": rows[0].closed_at - facts.began if rows else None,
        "seconds": facts.ended - facts.began,
        **_microbatches(view.microbatches.account()),
        "hops_moved": view.hops_moved,
        "bytes_at_start": view.bytes_at_start,
        "bytes_per_step": view.bytes_per_step,
        "replicas_digest_mismatches": len(view.digests.mismatches()),
        "digests": rows[-1].digests if rows else {},
        "checkpoint_steps": sorted(view.checkpoint_steps),
    }


def _microbatches(account: MicrobatchAccount) -> dict[str, Any]:
    reasons = []
    if account.open:
        reasons.append(f"{len(account.open)} of a step that was open when the run ended")
    if account.unlisted:
        reasons.append(f"{len(account.unlisted)} of a closed step whose list of microbatches is in no event")
    return {
        "microbatches_issued": len(account.issued),
        "microbatches_committed": len(account.committed),
        "microbatches_lost": len(account.lost),
        "microbatches_duplicated": len(account.duplicated),
        "microbatches_uncommitted": len(account.open) + len(account.unlisted),
        "microbatches_uncommitted_reason": "; ".join(reasons) or None,
    }


def render_report(report: dict[str, Any], indent: int | None = None) -> str:
    """Strict JSON: a number that is none (a diverged loss) becomes null."""
    return json.dumps(_finite(report), indent=indent, allow_nan=False)


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write it whole or not at all, replacing an older one. Raises StateError when the disk refuses."""
    try:
        sys.stdout.flush()  # the report may go there
        write_named(path, [f"{render_report(report, indent=2)}\n".encode()])
    except OSError as error:
        raise StateError(
            f"{path}: {error.strerror}; the report was not written. Check space and permissions."
        ) from error


def closed_steps(path: Path) -> int | None:
    """Return the number of steps that the run of a report closed; None when there is no report (yet), or none that says
    so."""
    steps = _read(path).get("steps")
    return steps if type(steps) is int else None


def held_out_after(path: Path, step: int) -> float | None:
    """Return the loss on held-out text that a report gives for the weights of a step; None where it gives none."""
    report = _read(path)
    loss = report.get("eval_last")
    return loss if report.get("eval_last_step") == step and isinstance(loss, float) else None


def _read(path: Path) -> dict[str, Any]:
    """Return a report; an empty one where there is none."""
    try:
        report = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return report if isinstance(report, dict) else {}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
