"""Cast of a play: the manifest of its run and the peers that are started, made of a scenario. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from peers.chaos.scenario import Later, Scenario, SwarmSection
from peers.chaos.world import PeerSpec, Role
from swarm.errors import ConfigError
from swarm.sim.links import Links

FOUNDER = "bootstrap"
REGION = "region:"
JOINER, TWIN, STRANGERS = "joiner-", "-twin", "strangers-"
"""How those are called that a storm brings, with their number behind it, who has another's key, with its name, and
processes of strangers, with their number."""
ENDLESS = 1_000_000
"""Steps of a run that ends by the clock."""
SMALL: Mapping[str, Mapping[str, Any]] = {
    "model": {"vocab_size": 512, "dim": 32, "heads": 2, "context": 32},
    "batch": {"microbatch_size": 4, "microbatches_per_step": 24},
}
"""A model for which many peers fit on two cores."""
JOIN = ("join", "{invite}")
UNINVITED = frozenset({"joiner_storm", "twin"})
"""Faults that start peers with another's words."""


@dataclass(frozen=True, slots=True)
class CastPeer:
    """One peer of the play. ``later``: it is started by a strike."""

    spec: PeerSpec
    stage: int | None
    later: bool = False

    @property
    def name(self) -> str:
        """Its name in the world."""
        return self.spec.name


@dataclass(frozen=True, slots=True)
class SwarmSpec:
    """All peers of a play: the founder first, then stage hosts, trainers, and those who come later."""

    members: tuple[CastPeer, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all peers, in that order."""
        return tuple(member.name for member in self.members)

    def chosen(self, patterns: Sequence[str], key: str) -> tuple[str, ...]:
        """The names that fit any of these: a name, a pattern as for files, or ``region:NAME``. Raises ConfigError for a
        pattern that fits nobody."""
        found: list[str] = []
        for pattern in patterns:
            fitting = [member.name for member in self.members if _fits(member.name, member.spec.region, pattern)]
            if not fitting:
                raise ConfigError(key, pattern, f"a peer of the scenario: {', '.join(self.names)}", "Correct the name.")
            found += [name for name in fitting if name not in found]
        return tuple(found)


def cast_of(scenario: Scenario, manifest: Path, texts: Mapping[str, Path]) -> SwarmSpec:
    """Return all peers of the scenario. ``texts`` are the trainers' own, by name; the sample beside them is for the
    tokenizer."""
    swarm = scenario.swarm
    founder = PeerSpec(
        name=FOUNDER,
        role="bootstrap",
        # With the file it founds one run only: started again it goes back to that, as a stage host.
        arguments=("new", "{run}", "--text", "{sample}", "--place", FOUNDER, "--invite-file", "{home}/invite"),
        files={"run": manifest, "sample": texts["sample"]},
    )
    members = [CastPeer(_limited(founder, swarm), None), *_hosts(swarm), *_trainers(swarm, texts)]
    members += [_late(one, swarm, texts) for one in swarm.later]
    names = [member.name for member in members]
    if len(set(names)) != len(names):
        raise ConfigError("swarm.later", names, "names used by no other peer", "Choose others.")
    cast = SwarmSpec(tuple(members))
    admits_by_invite(scenario)
    _check_patterns(cast, scenario)
    return cast


def _check_patterns(cast: SwarmSpec, scenario: Scenario) -> None:
    """Raises ConfigError for a limit, a place behind NAT or a link of nobody: the play would prove less than it
    says."""
    swarm = scenario.swarm
    for number, limit in enumerate(swarm.limit):
        cast.chosen((limit.peer,), f"swarm.limit.{number}.peer")
    if FOUNDER in cast.chosen(swarm.nat, "swarm.nat"):
        allowed = f"peers but {FOUNDER}, by which the others join"
        raise ConfigError("swarm.nat", list(swarm.nat), allowed, "Name others.")
    links = Links.parse(swarm.links)
    named = dict.fromkeys([name for one, other, _ in links.rules for name in (one, other)])
    joiners = sum(fault.count or 1 for fault in scenario.fault if fault.do == "joiner_storm")
    later = (*(f"{JOINER}{number + 1}" for number in range(joiners)), *(name + TWIN for name in cast.names))
    for pattern in (*named, *(name for name, _, _ in links.machines)):
        if not any(fnmatchcase(name, pattern) for name in (*cast.names, *later)):
            raise ConfigError("swarm.links", pattern, f"names of the scenario: {', '.join(cast.names)}", "Correct it.")


def admits_by_invite(scenario: Scenario) -> bool:
    """Return whether each peer of the scenario's run needs an invite of its own. Raises ConfigError where who is to
    come could have none."""
    mode: str = scenario.swarm.manifest.get("admission", {}).get("mode", "open")
    if mode == "organisation":
        raise ConfigError("swarm.manifest.admission.mode", mode, "open or token: nobody has an id before it is started",
                          "Play it with token.")  # fmt: skip
    if mode == "token" and (uninvited := sorted({one.do for one in scenario.fault} & UNINVITED)):
        allowed = f"open, for {', '.join(uninvited)}: an invite admits one"
        raise ConfigError("swarm.manifest.admission.mode", mode, allowed, "Leave that fault out, or the mode.")
    return mode == "token"


def twin_of(name: str) -> str:
    """The other one of two with one key."""
    return name.removesuffix(TWIN) if name.endswith(TWIN) else name + TWIN


def manifest_of(scenario: Scenario, preset: Mapping[str, Any]) -> dict[str, Any]:
    """The run's manifest as TOML has it: small, or the ``preset``'s, with what the scenario says in place."""
    swarm = scenario.swarm
    document: dict[str, Any] = {name: dict(table) for name, table in (preset or SMALL).items()}
    document["run"] = {
        **document.get("run", {}),
        "name": scenario.name,
        "seed": scenario.seed,
        "steps": scenario.until.steps or ENDLESS,
        "start_when": {"stage_hosts": swarm.stages * swarm.replicas, "trainers": swarm.trainers},
    }
    document["split"] = {**document.get("split", {}), "stages": swarm.stages}
    document.setdefault("model", {}).setdefault("layers", swarm.stages)
    for name, table in swarm.manifest.items():
        document[name] = {**document.get(name, {}), **table}
    return document


def trainers_of(scenario: Scenario) -> tuple[str, ...]:
    """Return the peers that need a text, by name."""
    named = [f"trainer-{number}" for number in range(scenario.swarm.trainers)]
    return (*named, *(one.name for one in scenario.swarm.later if one.role == "trainer"))


def _hosts(swarm: SwarmSection) -> Iterator[CastPeer]:
    for number in range(swarm.stages * swarm.replicas):
        stage, replica = number % swarm.stages, number // swarm.stages
        yield _member(f"host-{stage}-{replica}", "stage", _region(swarm, replica), swarm, stage=stage)


def _trainers(swarm: SwarmSection, texts: Mapping[str, Path]) -> Iterator[CastPeer]:
    for number in range(swarm.trainers):
        name = f"trainer-{number}"
        yield _member(name, "trainer", _region(swarm, number), swarm, data=texts[name])


def _late(one: Later, swarm: SwarmSection, texts: Mapping[str, Path]) -> CastPeer:
    member = _member(one.name, one.role, one.region, swarm, stage=one.stage, data=texts.get(one.name))
    return CastPeer(member.spec, member.stage, later=True)


def _member(
    name: str, role: Role, region: str, swarm: SwarmSection, *, stage: int | None = None, data: Path | None = None
) -> CastPeer:
    arguments = [*JOIN, "--role", role, "--name", name, "--place", name]
    arguments += ["--stage", str(stage)] if stage is not None else []
    arguments += ["--data", "{data}"] if data is not None else []
    arguments += ["--region", region] if region else []
    arguments += ["--checkpoint-every", str(swarm.checkpoint_every)] if swarm.checkpoint_every else []
    spec = PeerSpec(
        name=name,
        role=role,
        arguments=tuple(arguments),
        files={} if data is None else {"data": data},
        region=region,
        behind_nat=any(_fits(name, region, pattern) for pattern in swarm.nat),
    )
    return CastPeer(_limited(spec, swarm), stage)


def _limited(spec: PeerSpec, swarm: SwarmSection) -> PeerSpec:
    for limit in swarm.limit:
        if _fits(spec.name, spec.region, limit.peer):
            spec = replace(spec, cpus=limit.cpus, memory_mib=limit.memory_mib, disk_mib=limit.disk_mib)
    return spec


def _region(swarm: SwarmSection, number: int) -> str:
    return swarm.regions[number % len(swarm.regions)] if swarm.regions else ""


def _fits(name: str, region: str, pattern: str) -> bool:
    if pattern.startswith(REGION):
        return bool(region) and region == pattern.removeprefix(REGION)
    return fnmatchcase(name, pattern)
