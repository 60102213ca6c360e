"""The JSON report of a local run: everything a script wants to know, also when the run failed."""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from peers.run_view import RunView
from swarm.errors import StateError

ExitReason = Literal["completed", "interrupted", "peer_failed", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended: for exit code, last line and report. ``blamed`` is the peer that failed, if one did."""

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
    """What the events do not say. ``began`` is when the command's process started, seconds since the Unix epoch."""

    run: str | None
    directory: str
    peers: int
    stages: int
    trainers: int
    steps_wanted: int
    began: float
    ended: float


def build_report(facts: RunFacts, view: RunView, evaluation: Evaluation, outcome: Outcome) -> dict[str, Any]:
    """The report as plain data. ``steps`` is the number of closed steps; what was not measured is null."""
    order, account = view.in_order, view.microbatch_account()
    return {
        "exit_reason": outcome.exit_reason,
        "exit_code": outcome.exit_code,
        "message": outcome.message,
        "failed_peer": outcome.blamed,
        "run": facts.run,
        "directory": facts.directory,
        "peers": facts.peers,
        "stages": facts.stages,
        "trainers": facts.trainers,
        "parameters": view.parameters,
        "steps": len(order),
        "steps_wanted": facts.steps_wanted,
        "loss_first": order[0].loss if order else None,
        "loss_last": order[-1].loss if order else None,
        "losses": [step.loss for step in order],
        "eval_first": evaluation.first,
        "eval_last": evaluation.last,
        "eval_last_step": evaluation.last_step,
        "sample": evaluation.sample,
        "tokens": sum(step.tokens for step in order),
        "tokens_per_s": view.tokens_per_s,
        "seconds_to_first_step": order[0].closed - facts.began if order else None,
        "seconds": facts.ended - facts.began,
        "microbatches_committed": len(account.committed),
        "microbatches_lost": len(account.lost),
        "microbatches_duplicated": len(account.duplicated),
        "microbatches_open": len(account.open),
        "hops_moved": view.hops_moved,
        "bytes_per_step": view.bytes_per_step,
        "replicas_digest_mismatches": len(view.digest_mismatches()),
        "digests": order[-1].digests if order else {},
        "checkpoint_steps": sorted(view.checkpoint_steps),
    }


def render_report(report: dict[str, Any], indent: int | None = None) -> str:
    """Strict JSON: a number that is none (a diverged loss) becomes null."""
    return json.dumps(_finite(report), indent=indent, allow_nan=False)


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write it whole or not at all, replacing an older one. Raises StateError when the disk refuses."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(render_report(report, indent=2) + "\n", encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise StateError(
            f"{path}: {error.strerror}; the report was not written. Check space and permissions."
        ) from error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
