"""Choose the world that a scenario is played in: containers where an engine answers, else processes of this machine."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from peers.chaos import faults
from peers.chaos.container_world import ContainerWorld
from peers.chaos.containers import IMAGE
from peers.chaos.engine import Unfit
from peers.chaos.faults import CannotInflict, Fault
from peers.chaos.process_world import LINKED, ProcessWorld
from peers.chaos.scenario import Scenario
from peers.chaos.shaping import shaped
from peers.chaos.world import PlayWorld
from swarm.errors import ConfigError, SwarmError

WorldName = Literal["containers", "processes"]
ANSWER_S = 10.0


class CannotPlay(SwarmError):
    """A world cannot be had as a play needs it, or has no means for a fault of this scenario; known before anybody is
    started."""


@dataclass(frozen=True, slots=True)
class Images:
    """The image of containers, and their image after an upgrade; None: the same."""

    image: str = IMAGE
    upgrade: str | None = None


def engine_answers() -> bool:
    """Return whether a Docker engine does. Takes at most some seconds."""
    if shutil.which("docker") is None:
        return False
    command = ["docker", "version", "--format", "{{.Server.Version}}"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=ANSWER_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def choose_world(scenario: Scenario, on: str | None) -> tuple[WorldName, str]:
    """(which, why). Raises ConfigError where the scenario needs containers and none can be had, or was told not to."""
    if on == "processes":
        if scenario.needs == "containers":
            raise ConfigError(
                "--on",
                on,
                f"containers: {scenario.name} has faults that only containers can have",
                "Leave the option out.",
            )
        return "processes", "as asked"
    if on == "containers" or (not scenario.swarm.links and engine_answers()):
        _check_links(scenario)
        return "containers", "as asked" if on else "a Docker engine answers"
    if scenario.needs == "containers":
        raise ConfigError(
            "needs", "containers", "a Docker engine that answers", "Start one; docker version says why none answers."
        )
    return "processes", "its links are described" if scenario.swarm.links else "no Docker engine answers"


def _check_links(scenario: Scenario) -> None:
    if scenario.swarm.links:
        raise ConfigError(
            "swarm.links",
            scenario.swarm.links,
            "no links for containers: the machine's kernel makes their networks",
            "Use --on processes, or a slow_links fault instead.",
        )


@contextlib.contextmanager
def world_of(
    name: WorldName, root: Path, scenario: Scenario, strikes: Iterable[Fault], images: Images
) -> Iterator[PlayWorld]:
    """The world, entered. Raises what says why it cannot be had, CannotPlay for an engine that no play can rest on and
    for a fault that the world has no means for."""
    struck = tuple(strikes)
    with contextlib.ExitStack() as stack:
        world: PlayWorld
        if name == "processes":
            world = _processes(root, scenario, struck, stack)
        else:
            try:
                contained = stack.enter_context(ContainerWorld(root, images.image, upgrade=images.upgrade))
            except Unfit as error:
                raise CannotPlay(f"{scenario.name} cannot be played among {name}: {error}") from error
            contained.networks.public = bool(scenario.swarm.nat)
            world = contained
        for fault in struck:
            if isinstance(fault, faults.Moment):
                continue
            try:
                world.check(fault)
            except CannotInflict as error:
                raise CannotPlay(f"{scenario.name} cannot be played among {name}: {error}") from error
        yield world


def _processes(root: Path, scenario: Scenario, struck: tuple[Fault, ...], stack: contextlib.ExitStack) -> PlayWorld:
    linked = bool(scenario.swarm.links) or any(isinstance(fault, LINKED) for fault in struck)
    links = stack.enter_context(shaped(scenario.swarm.links)) if linked else None
    skewed = any(isinstance(fault, faults.SkewClock) for fault in struck)
    return stack.enter_context(ProcessWorld(root, links, skewed=skewed))
