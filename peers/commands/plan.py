"""Runs ``swarm plan``: who should do what, how fast that would be, and what would set the pace."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.console.lasting import Lasting
from peers.console.words import another_path, command_name
from peers.founding_files import load_foundation, pending
from peers.options.foundation import Foundation
from peers.plan.peers_file import EXAMPLE, PlanPeers, read_file, read_peers
from peers.plan.report import PlanReport
from peers.plan.sizing import nothing_fits
from peers.plan.table import ModelEntry, PlanTable, plan_table, read_table
from peers.presets import load_preset, preset_names
from peers.profiles import keys_of, with_profile
from swarm.config import Manifest, parse_manifest
from swarm.errors import ConfigError
from swarm.models.registry import delinked_at, family_of
from swarm.planning.search import search

GIB = 2.0**30
LIVE_GIB = 16.0
"""Of a member of a run that is under way, where nothing else is said."""


def make_plan(
    model: str | None, peers: str | None, swarm: str | None, memory_gib: str | None, say: Callable[[str], None]
) -> PlanReport:
    """Return the plan for what was typed, and ``say`` how far it is. Blocking: seconds; with an invite as long as the
    run takes to answer.

    Raises ConfigError for arguments that mean nothing, CommandError where no layout fits, and as
    :func:`peers.plan.live.look_at_run`.
    """
    if (peers is None) == (swarm is None):
        given = None if peers is None else "both"
        remedy = f"For instance: {command_name()} plan tiny --peers FILE, where FILE has: {EXAMPLE}"
        raise ConfigError("--peers", given, "either a file of peers, or a run's invite (--swarm INVITE)", remedy)
    if swarm is not None:
        return _of_run(model, swarm, _gib(memory_gib), say)
    if memory_gib is not None:
        remedy = "Leave it out: the file says memory_gib of each class."
        raise ConfigError("--memory-gib", memory_gib, "no option besides --peers", remedy)
    if model is None:
        raise ConfigError("MODEL", None, "a RUN.toml or a preset", f"{command_name()} plan tiny --peers {peers}")
    path = Path(peers or "")
    read_file(path)  # first: what is wrong with it is said without torch
    manifest = manifest_named(model)
    return plan_for(manifest, read_peers(path, manifest), say)


def plan_for(manifest: Manifest, peers: PlanPeers, say: Callable[[str], None]) -> PlanReport:
    """Return the plan of a manifest's model for these peers, and ``say`` how far it is. Raises CommandError where no
    layout fits."""
    from peers.plan.work import workload_of  # torch: after both files are known to be right

    work, classes = workload_of(manifest, peers.kinds), peers.classes
    lasting = Lasting(say)
    plans = search(work, classes, told=lasting.told)
    if not plans:
        raise nothing_fits(work, classes)
    stages, rows = (manifest.split.stages,), (manifest.batch.microbatch_size,)
    asked = search(work, classes, stages=stages, rows=rows, told=lasting.told)
    return PlanReport(
        title=f"{manifest.run.name}: {family_of(manifest.model).described}",
        work=work,
        classes=classes,
        plans=plans,
        asked=asked[0] if asked else None,
        peers_from=peers.origin,
        kinds=tuple(peers.kinds),
        delink_at=delinked_at(manifest.model),
    )


def _of_run(model: str | None, invite: str, memory: float, say: Callable[[str], None]) -> PlanReport:
    import asyncio

    from peers.invites.invite import contacts_from, typed_invite
    from peers.plan.live import look_at_run
    from swarm.clock import SystemClock

    contacts = contacts_from((typed_invite(invite, "plan --swarm -"),))
    live = asyncio.run(look_at_run(contacts, SystemClock(), memory))
    manifest = live.manifest if model is None else manifest_named(model)
    kinds = live.kinds if manifest.split.choices == len(live.kinds) else ()
    origin = f"the run at step {live.step} (assumed: {live.assumed})"
    return plan_for(manifest, PlanPeers(origin, live.classes, kinds), say)


def _gib(typed: str | None) -> float:
    try:
        value = LIVE_GIB if typed is None else float(typed)
    except ValueError:
        value = float("nan")
    if not 0 < value < 1e6:
        raise ConfigError("--memory-gib", typed, "GiB of each member's memory", "Correct it, or leave it out.")
    return value * GIB


def make_table(file: Path, measured: Sequence[Mapping[str, Any]] = ()) -> PlanTable:
    """Return the table that a file asks for, and what was ``measured`` of its rows. Blocking: up to some seconds for
    each row. Raises ConfigError for what the file says and may not."""
    return plan_table(read_table(file, measured), _manifest_of, file)


def _manifest_of(model: ModelEntry, profile: str) -> Manifest:
    document = (
        load_preset(model.run) if model.run in preset_names() else load_foundation(Foundation(file=Path(model.run)))
    )
    merged = _merged(document, model.manifest | {"speed": {"profile": profile}})
    return parse_manifest(pending(with_profile(merged, tuple(keys_of(model.manifest)))), f"the model {model.name}")


def _merged(document: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    both = {key: _merged(document[key], value) if isinstance(value, Mapping) and isinstance(document.get(key), Mapping)
            else value for key, value in values.items()}  # fmt: skip
    return {**document, **both}


def manifest_named(given: str) -> Manifest:
    """Return the manifest that MODEL means: a RUN.toml, with or without a tokenizer, or the name of a preset.

    Raises ConfigError naming MODEL for what is neither, and for what such a file says and may not.
    """
    path = Path(given)
    if path.is_dir():
        path = path / "run.toml"
    if path.is_file():
        return _of_file(path)
    known = preset_names()
    if given in known:
        return parse_manifest(pending(with_profile(load_preset(given), ())), f"the preset {given}")
    close = difflib.get_close_matches(given, known, n=1)
    meant = f"Did you mean {close[0]}?" if close else another_path(path)
    remedy = f"{meant} For instance: {command_name()} plan {known[0]} --peers FILE"
    raise ConfigError("MODEL", given, f"a RUN.toml, or one of {', '.join(known)}", remedy)


def _of_file(path: Path) -> Manifest:
    return parse_manifest(pending(load_foundation(Foundation(file=path))), str(path))
