"""The file of ``swarm simulate``: which peers, for which model, how they come and go, and who is moved.

    model = "small"
    hours = 8
    rebalance = "ours"
    [[peers]]
    name = "home"
    count = 40
    device = "rtx4090"
    host_memory_gib = 64
    stay_hours = 4
    train = 4

Classes of peers are those of ``swarm plan --peers``, with two keys more. Decoded strictly: a key that is not known is
an error that names it, and its line.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, ValidationError, model_validator

from peers.chaos.scenario import TraceSection
from peers.chaos.schedule import Removal, read_trace, spot_trace
from peers.commands.plan import manifest_named
from peers.console.words import another_path, command_name
from peers.plan.peers_file import (
    MAX_CLASSES,
    Kinds,
    PeersEntry,
    check_each_kind,
    check_names,
    class_of,
    explained,
    with_classes,
)
from swarm.columns import host_parts
from swarm.config import Manifest
from swarm.consensus.copies import COPY_BYTES_S, MAX_COPIES
from swarm.consensus.rebalance import RuleName
from swarm.disk import read_named
from swarm.errors import ConfigError
from swarm.ids import PartName, shared_part, variant_of
from swarm.models.registry import delinked_at
from swarm.models.spec import even_stages
from swarm.parsing import parse_toml
from swarm.planning.predict import predict
from swarm.planning.workload import PartLayout, PeerClass, Workload
from swarm.schema import Section
from swarm.sim.simulation import FIDELITIES, MOST_STEPS, Fidelity, SimulationCase, StepCosts
from swarm.sim.turnover import FlowCase, SimMachine, Turnover

HOUR, MINUTE = 3600.0, 60.0
PATIENCE = 4.0
"""A simulation of so many steps ends at the latest after so many times what they take with everybody there."""
EXAMPLE = f"{command_name()} simulate --help shows a whole file."


class ScenarioPeers(PeersEntry):
    """One class of peers: as ``swarm plan`` has it, ``train`` of them as trainers, who stay, and the others at a stage,
    which they ask for where it is given."""

    train: Annotated[int, Field(ge=0, le=10_000)] = 0
    stage: Annotated[int, Field(ge=0, lt=1024)] | None = None

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.train > self.count:
            raise ValueError(f"train: no more than count, which is {self.count}, not {self.train}")
        return self


class ChurnSection(Section):
    """``[churn]``: machines are taken as on the spot market, where their class says ``stay_hours``; as the lines of a
    file say; or never."""

    shape: Literal["spot", "none"] = "spot"
    file: Annotated[str, StringConstraints(min_length=1, max_length=400)] | None = None
    notices: bool = False


class ScenarioFile(Section):
    """The whole file."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,40}$")] | None = None
    model: Annotated[str, StringConstraints(min_length=1, max_length=400)]
    fidelity: Literal["flow", "journeys", "full"] = "flow"
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] | None = None
    hours: Annotated[float, Field(gt=0, le=10_000)] | None = None
    stages: Annotated[int, Field(ge=1, le=1024)] | None = None
    microbatches: Annotated[int, Field(ge=1, le=MOST_STEPS)] | None = None
    rows: Annotated[int, Field(ge=1, le=65_536)] | None = None
    rebalance: RuleName = "none"
    rebalance_every_s: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    copies: Annotated[int, Field(ge=0, le=MAX_COPIES)] | None = None
    kinds: Kinds = ()
    churn: ChurnSection = ChurnSection()
    peers: Annotated[tuple[ScenarioPeers, ...], Field(min_length=1, max_length=MAX_CLASSES)]

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.steps is None and self.hours is None:
            raise ValueError("steps, hours, or both: when it ends")
        return self


def read_scenario(path: Path) -> ScenarioFile:
    """Return what a file says. Raises ConfigError naming SCENARIO, or the key and its line, for what is missing,
    unknown or malformed."""
    try:
        text = read_named(path)
    except OSError as error:
        cause = (error.strerror or "unreadable").lower()
        remedy = f"{another_path(path)} {EXAMPLE[0].upper()}{EXAMPLE[1:]}"
        raise ConfigError("SCENARIO", str(path), "a readable TOML file", remedy, why=cause) from None
    except UnicodeDecodeError as error:
        raise ConfigError("SCENARIO", str(path), "text in UTF-8", f"Correct {path}.", why=str(error)) from None
    try:
        document = parse_toml(text)
    except ValueError as error:
        remedy = f"Correct that line in {path}."
        raise ConfigError("SCENARIO", str(path), "valid TOML", remedy, why=str(error)) from None
    try:
        found = ScenarioFile.model_validate(with_classes(document))
    except ValidationError as error:
        raise _located(error, text, path) from None
    check_names(found.peers, path)
    return found


def _located(error: ValidationError, text: str, path: Path) -> ConfigError:
    """The error that names the key, and the line if it is in the file."""
    place = error.errors(include_url=False)[0]["loc"]
    line = line_of(text, place)
    found = explained(error, ScenarioFile, path)
    if not place:  # a rule about several keys
        found = ConfigError("SCENARIO", str(path), found.allowed, f"Correct it in {path}; {EXAMPLE}")
    elif len(place) == 1 and error.errors(include_url=False)[0]["type"] == "missing":
        found.remedy = f"Add it to {path}; {EXAMPLE}"
    if line is not None:
        found.remedy = f"{found.remedy.removesuffix('.')}, line {line}: {command_name()} simulate {path}"
    return found


def line_of(text: str, place: Sequence[str | int]) -> int | None:
    """The line of a file at which a key, or else the table that lacks it, is; None where neither is found."""
    keys = [part for part in place if isinstance(part, str)]
    number = next((part for part in place if isinstance(part, int)), None)
    tables, head, found = 0, "", None
    for at, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*([A-Za-z0-9_.-]+)\s*\]+", line):
            head = header[1]
            tables += head == keys[0] if keys else 0
        here = [head, *keys[1:]] == keys if head else len(keys) == 1
        if number is not None and head and tables != number + 1:
            here = False
        if here and header and head == keys[0]:
            found = at
        if here and keys and re.match(rf"\s*{re.escape(keys[-1])}\s*=", line):
            return at
    return found


def case_of(told: ScenarioFile, beside: Path, fidelity: Fidelity, seed: int) -> tuple[SimulationCase, Manifest]:
    """Return what a file asks to be played, and the manifest of its model. Some parts are built without weights:
    milliseconds, a second for large foreign models. Raises ConfigError naming the key for what cannot be."""
    manifest = manifest_named(_model_at(told.model, beside))
    classes = tuple(class_of(entry, manifest.model.compute, beside) for entry in told.peers)
    check_each_kind(told.kinds, manifest.split, beside)
    work, stages, rows = _work(told, manifest)
    split, delink_at = manifest.split.model_copy(update={"stages": len(stages)}), delinked_at(manifest.model)
    apart = host_parts(split.parts)
    parts = (shared_part(len(stages)),) if work.alike else apart
    loads = {PartName(part.name): part.load for part in work.parts(len(stages))[:-1] if work.loads}
    trainers = tuple(kind for kind, entry in enumerate(told.peers) for _ in range(entry.train))
    hosts = [kind for kind, entry in enumerate(told.peers) for _ in range(entry.count - entry.train)]
    needed = parts if work.shared else apart
    _check_hosts(len(hosts), needed, delink_at)
    _check(told, len(stages), len(hosts), len(trainers), fidelity)
    if fidelity == "full" and len(trainers) < split.choices:
        raise ConfigError("peers.train", len(trainers), f"at least {split.choices} trainers in fidelity full",
                          f"Raise train, or {command_name()} simulate SCENARIO --fidelity journeys",
                          why="each brings text of one kind, and all kinds are to be there")  # fmt: skip
    machines = [_machine(entry, classes[kind], kind, work, stages, rows) for kind, entry in enumerate(told.peers)]
    bare = SimulationCase(
        work=work, classes=classes, trainers=trainers, stages=stages, rows=rows,
        steps=told.steps or MOST_STEPS, until_s=(told.hours or 10_000.0) * HOUR,
        turnover=FlowCase(
            places=len(hosts),
            stages=len(stages),
            until_s=0.0,
            copies=work.copies,
            rule=told.rebalance,
            every_s=told.rebalance_every_s,
            notices=told.churn.notices,
            seed=seed,
            trainers=len(trainers),
            machines=tuple(machines[kind] for kind in hosts),
            copies_follow=True,
            copy_s=_copy_s(work, stages, classes),
            parts=parts,
            load=loads,
            delink_at=delink_at,
        ),
        kinds=tuple(kind / sum(told.kinds) for kind in told.kinds) or (1 / split.choices,) * split.choices,
    )  # fmt: skip
    if told.hours is None:
        expected_s = StepCosts(bare).forecast(Turnover(bare.turnover)).step_s
        bare = replace(bare, until_s=PATIENCE * bare.steps * expected_s)
    return replace(bare, trace=tuple(_trace(told, hosts, classes, beside, bare.until_s, seed))), manifest


def _model_at(model: str, beside: Path) -> str:
    """A RUN.toml is looked for beside the scenario, too."""
    near = beside.parent / model
    return str(near) if near.exists() else model


def _work(told: ScenarioFile, manifest: Manifest) -> tuple[Workload, tuple[int, ...], int]:
    from peers.plan.work import workload_of  # torch: after the file is known to be right

    work = workload_of(manifest, told.kinds)
    if told.copies is not None:
        work = replace(work, copies=told.copies)
    rows = told.rows or work.rows_asked
    if told.microbatches is not None:
        work = replace(work, rows=told.microbatches * rows)
    stages = manifest.split.stages if told.stages is None else told.stages
    if stages > work.layers:
        remedy = "Name fewer, or a deeper model."
        raise ConfigError("stages", stages, f"at most {work.layers}, the layers of {told.model}", remedy)
    if work.loads and stages != len(work.loads):
        allowed = f"{len(work.loads)}, for each of which split.variants of {told.model} has a number"
        raise ConfigError("stages", stages, allowed, "Leave it out.")
    if work.alike and stages not in (cuts := work.cuts(range(2, work.layers + 1), work.layers + 1)):
        allowed = f"one of {', '.join(map(str, cuts))}: stages that share their layers have as many each"
        raise ConfigError("stages", stages, allowed, f"Correct it in the scenario, or split.stages of {told.model}.")
    return work, even_stages(work.layers, stages), rows


def _check(told: ScenarioFile, stages: int, hosts: int, trainers: int, fidelity: Fidelity) -> None:
    if trainers < 1:
        raise ConfigError("peers.train", 0, "at least one trainer in a class", "Add train = 1 to one of [[peers]].")
    if wrong := next((entry.stage for entry in told.peers if entry.stage is not None and entry.stage >= stages), None):
        raise ConfigError("peers.stage", wrong, f"a stage from 0 to {stages - 1}", "Correct it, or leave it out.")
    if fidelity == "full" and (told.rebalance == "swarm" or told.rebalance_every_s):
        key = "rebalance_every_s" if told.rebalance_every_s else "rebalance"
        remedy = f"{command_name()} simulate SCENARIO --fidelity journeys, or leave it out"
        why = "peers have no other rule, and decide with each record"
        raise ConfigError(key, getattr(told, key), "none or ours, with each record", remedy, why=why)
    if hosts + trainers > FIDELITIES[fidelity]:
        able = [name for name, most in FIDELITIES.items() if most >= hosts + trainers]
        remedy = f"{command_name()} simulate SCENARIO --fidelity {able[-1]}" if able else "Lower count of a class."
        allowed = f"at most {FIDELITIES[fidelity]:,} peers, and there are {hosts + trainers:,}"
        raise ConfigError("fidelity", fidelity, allowed, remedy)


def _check_hosts(hosts: int, parts: Sequence[PartName], delink_at: int) -> None:
    """Raise ConfigError where some of these parts would have nobody."""
    if hosts >= len(parts):
        return
    each = "variant of a stage" if any(variant_of(part)[1] > 1 for part in parts) else "stage"
    when = f", once they part with step {delink_at}" if delink_at else ""
    raise ConfigError("peers.count", hosts, f"at least {len(parts)} peers besides trainers, one for each {each}{when}",
                      "Raise count of a class, or lower stages or train.")  # fmt: skip


def _machine(
    entry: ScenarioPeers, one: PeerClass, kind: int, work: Workload, stages: Sequence[int], rows: int
) -> SimMachine:
    """Return what the machines of a class do: microbatches a second of a stage as they are on average."""
    places = tuple((1,) for _ in range(2))
    layout = PartLayout(stages=(max(1, round(sum(stages) / len(stages))),), places=places, rows=rows)
    speed = predict(replace(work, loads=(), shared=False), (one,), layout).parts[0].rate
    largest = work.layer.times(max(stages)).parameters
    return SimMachine(kind, speed, work.copy_bytes * largest / one.down, entry.stage)


def _copy_s(work: Workload, stages: Sequence[int], classes: Sequence[PeerClass]) -> float:
    """Return how long a new copy takes: no faster than the product lets it come, nor than the thinnest link."""
    size = work.copy_bytes * work.layer.times(max(stages)).parameters
    return size / min(COPY_BYTES_S, *(one.down for one in classes))


def _trace(
    told: ScenarioFile, hosts: Sequence[int], classes: Sequence[PeerClass], beside: Path, until_s: float, seed: int
) -> Iterator[Removal]:
    """Yield when which place loses its machine, in order."""
    if told.churn.file is not None:
        yield from _told_removals(told.churn.file, len(hosts), beside, seed)
        return
    found: list[Removal] = []
    for kind, one in enumerate(classes):
        places = [place for place, of in enumerate(hosts) if of == kind]
        if told.churn.shape == "none" or one.stay_s is None or not places:
            continue
        churn = MINUTE / one.stay_s
        drawn = spot_trace(
            places=len(places), churn=churn, step_s=MINUTE, until_s=until_s, seed=seed * MAX_CLASSES + kind
        )
        found += [replace(removal, places=tuple(places[place] for place in removal.places)) for removal in drawn]
    yield from sorted(found, key=lambda removal: (removal.at_s, removal.places))


def _told_removals(file: str, places: int, beside: Path, seed: int) -> Iterator[Removal]:
    """Yield what the lines of a file say: the places are drawn among those that have a machine then."""
    section: dict[str, Any] = {"file": file}
    back_at = dict.fromkeys(range(places), -math.inf)
    try:
        draws = read_trace(TraceSection(**section), beside.parent, seed)
    except ConfigError as error:
        if error.key != "trace.file":
            raise
        raise ConfigError("churn.file", error.value, error.allowed, f"Correct it in {beside}.") from None
    for draw in draws:
        up = [place for place, back_s in back_at.items() if back_s <= draw.at_s]
        taken = tuple(sorted(random.Random(f"places {draw.luck}").sample(up, min(draw.count, len(up)))))
        if taken:
            back_at |= dict.fromkeys(taken, draw.at_s + draw.seconds)
            yield Removal(draw.at_s, taken, (draw.at_s + draw.seconds,) * len(taken), noticed=False)
