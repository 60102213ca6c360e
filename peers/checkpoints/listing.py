"""List the runs of this machine, their checkpoints and missing parts for ``swarm ckpt ls``. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from peers.console.words import count, listed, numbered, with_commands
from peers.home.run_directory import RunDirectory, said_run_id
from swarm.disk import size_text
from swarm.parsing import parse_toml
from swarm.state.checkpoints.files import HeldStep, held, steps
from swarm.state.checkpoints.rotation import aside_directory


def run_facts(directory: RunDirectory) -> dict[str, Any]:
    """A run and its checkpoints, as plain data. What is damaged is said in it."""
    run = said_run_id(directory)
    found = [held(directory.checkpoints, step) for step in steps(directory.checkpoints)]
    run = run or next((one.record.run for one in found if one.record is not None), "")
    return {
        "path": str(directory.root.absolute()),
        "run": run,
        "name": _name(directory),
        "newest_complete": max((one.step for one in found if one.complete), default=None),
        "steps": [_step_facts(one, run) for one in found],
        "aside": list(steps(aside_directory(directory.checkpoints))),
    }


def run_lines(facts: dict[str, Any]) -> list[str]:
    """The same for people."""
    title = f"{facts['name'] or '(unnamed)'} {facts['run'][:12] or '(unknown run)'}  {facts['path']}"
    there = [f"  {_line(one)}" for one in facts["steps"]] or ["  no checkpoint"]
    return [title, *there, *(_aside(facts["aside"]) if facts["aside"] else [])]


def _step_facts(one: HeldStep, run: str) -> dict[str, Any]:
    troubles = [with_commands(trouble) for trouble in one.troubles]
    if one.record is not None and run and one.record.run != run:
        troubles.append(f"it is of run {one.record.run[:12]}")
    return {
        "step": one.step,
        "complete": one.complete and not troubles,
        "bytes": sum(one.parts.values()),
        "parts": [{"part": part, "bytes": size} for part, size in sorted(one.parts.items())],
        "missing": sorted(one.missing),
        "troubles": troubles,
        "begun": None if one.complete else one.begun,
    }


def _line(step: dict[str, Any]) -> str:
    there = f"{count(len(step['parts']), 'part')}, {size_text(step['bytes'])}"
    return f"step {step['step']:<8} {_state(step)}  ({there})"


def _aside(gone: Sequence[int]) -> list[str]:
    return [f"  aside         {numbered(gone)}, in checkpoints/aside: the run went on from before them"]


def _state(step: dict[str, Any]) -> str:
    troubles: Sequence[str] = step["troubles"]
    if troubles:
        return f"damaged: {troubles[0]}"
    if step["complete"]:
        return "complete"
    lacks = f"lacks {listed(step['missing'])}" if step["parts"] else "nothing of it is saved"
    return lacks if step["begun"] is None else f"is being written since {_when(step['begun'])}; {lacks}"


def _when(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def _name(directory: RunDirectory) -> str:
    try:
        found = parse_toml(directory.manifest.read_text(encoding="utf-8")).get("run", {}).get("name", "")
    except (OSError, ValueError, AttributeError):
        return ""
    return found if isinstance(found, str) else ""
