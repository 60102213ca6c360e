"""Runs ``swarm simulate``: reads a scenario, plays it at one of three fidelities, and writes what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from peers.console.words import CommandError, command_name
from peers.simulate.report import SimulationReport, pictures
from peers.simulate.scenario_file import case_of, read_scenario
from swarm.config import Manifest
from swarm.disk import write_whole
from swarm.errors import ConfigError
from swarm.models.registry import family_of
from swarm.sim.flow import PacedFlow
from swarm.sim.simulation import FIDELITIES, Fidelity, SimulationCase, SimulationResult, StepCosts
from swarm.sim.turnover import Turnover


def _flow(case: SimulationCase) -> SimulationResult:
    return PacedFlow(case).run()


def _journeys(case: SimulationCase) -> SimulationResult:
    from swarm.sim.journeys import JourneysPlay  # torch: after the file is known to be right

    return JourneysPlay(case).run()


def _full(case: SimulationCase) -> SimulationResult:
    from peers.simulate.full import FullPlay  # all that a peer imports

    return FullPlay(case).run()


PLAYED: Mapping[Fidelity, Callable[[SimulationCase], SimulationResult]] = {
    "flow": _flow,
    "journeys": _journeys,
    "full": _full,
}


@dataclass(frozen=True, slots=True)
class AskedSimulation:
    """What was typed: a file, and what replaces its ``fidelity`` and ``seed``."""

    scenario: str | None
    fidelity: str | None = None
    seed: str | None = None


def simulate(asked: AskedSimulation) -> SimulationReport:
    """Play what was typed. Blocking: seconds to minutes. Raises ConfigError for what cannot be played."""
    if asked.scenario is None:
        remedy = f"{command_name()} simulate --help shows a whole one."
        raise ConfigError("SCENARIO", None, "a TOML file that says what is played", remedy)
    path = Path(asked.scenario)
    told = read_scenario(path)
    fidelity = _fidelity(asked.fidelity, told.fidelity)
    case, manifest = case_of(told, path, fidelity, _seed(asked.seed, told.seed))
    return play(told.name or path.stem, case, manifest, fidelity)


def play(name: str, case: SimulationCase, manifest: Manifest, fidelity: Fidelity) -> SimulationReport:
    """Play a case at a fidelity."""
    return SimulationReport(
        name=name,
        model=f"{manifest.run.name}, {family_of(manifest.model).described}",
        case=case,
        result=PLAYED[fidelity](case),
        undisturbed=StepCosts(case).forecast(Turnover(case.turnover)),
    )


def write_report(report: SimulationReport, out: str) -> list[Path]:
    """Write report.json and the pictures into a directory, made if need be. Raises CommandError where it cannot be."""
    folder = Path(out)
    documents = {"report.json": json.dumps(report.document(), indent=1) + "\n"}
    documents |= pictures(report.name, report.result)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in documents.items():
            write_whole(folder / name, [text.encode()])
    except OSError as error:
        raise CommandError(
            f"{error.filename or folder} cannot be written: {(error.strerror or 'unwritable').lower()}",
            check=f"ls -ld {folder}",
            next_=f"name another directory: {command_name()} simulate SCENARIO --out DIR",
        ) from None
    return [folder / name for name in documents]


def _fidelity(typed: str | None, told: str) -> Fidelity:
    if typed is not None and typed not in FIDELITIES:
        remedy = f"For instance: {command_name()} simulate SCENARIO --fidelity flow"
        raise ConfigError("--fidelity", typed, f"one of {', '.join(FIDELITIES)}", remedy)
    return cast(Fidelity, told if typed is None else typed)


def _seed(typed: str | None, told: int) -> int:
    if typed is not None and not (typed.isascii() and typed.isdigit() and len(typed) < 10):
        raise ConfigError("--seed", typed, "a whole number from 0 on", "Correct it, or leave it out.")
    return told if typed is None else int(typed)
