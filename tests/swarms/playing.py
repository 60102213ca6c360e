"""A story of :mod:`tests.swarms.stories`, lived through: the tests of whole swarms say what is true afterwards, and
golden runs whether it is the same as at another commit, which runs this file, too: it imports names from
:mod:`tests.golden.names` alone."""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.golden.names import FaultPlan, MemoryWorld, SimSwarm, as_peer, messages_told, run_world
from tests.swarms.stories import Story, links, shape_of

LATE_S = 30.0
"""How long, in virtual seconds, those whom something happened to are waited for when all others have ended."""
LONGEST_S = 600.0


class Play:
    """One story with one seed: the swarm, and what is told of it while it is lived through."""

    def __init__(self, root: Path, story: Story, seed: int = 0) -> None:
        root.mkdir(parents=True, exist_ok=True)
        shape = shape_of(story, seed)
        sites = {name: _placed(site, root) for name, site in shape.pop("sites", {}).items()}
        self.swarm = SimSwarm(root, links=links(seed), may_fail=True, sites=sites, **shape)
        self.story, self.root = story, root
        self.plan: FaultPlan | None = None
        self.error = ""
        self.unended = list[str]()
        """Who was still there, whom something had happened to, when all others had ended."""
        self.kinds, self.acted = Counter[str](), list[str]()
        self._seen = Counter[str]()

    def live(self) -> Play:
        """To the end of everybody who is still there."""
        with MemoryWorld(self.swarm) as world, messages_told(world):
            world.listen(self._hear)
            self.plan = FaultPlan(*self.story.strikes, world=world)
            try:
                run_world(self._to_its_end())
            except Exception:  # noqa: BLE001 - it is what came of this story
                self.error = traceback.format_exc()
        return self

    def fired(self) -> list[list[Any]]:
        """Faults and acts, with whom they hit."""
        assert self.plan is not None
        struck = [one for one in self.story.strikes if one.label in self.plan.fired]
        hit = [[one.label, sorted(self.plan.fired[one.label].peers)] for one in struck]
        return hit + [[label, []] for label in self.acted]

    def missing(self) -> list[str]:
        """What the story tells, and did not happen."""
        assert self.plan is not None
        idle = [f"{act.label}: not done" for act in self.story.acts if act.label not in self.acted]
        shows = self.story.shows
        unseen = [] if shows is None or self._seen["shows"] >= shows.nth else [f"never seen: {shows.described}"]
        return [*self.plan.missing(), *self.plan.broken(), *idle, *unseen]

    def hit(self) -> set[str]:
        """Whom any fault has hit."""
        assert self.plan is not None
        return {name for fired in self.plan.fired.values() for name in fired.peers}

    def _hear(self, peer: str, kind: str, fields: Mapping[str, Any]) -> None:
        self.kinds[kind] += 1
        self._seen["shows"] += bool(self.story.shows and self.story.shows.matches(peer, kind, fields))
        for act in self.story.acts:
            if act.label not in self.acted and act.on.matches(peer, kind, fields):
                self._seen[act.label] += 1
                if self._seen[act.label] == act.on.nth:
                    self.acted.append(act.label)
                    as_peer("").run(self._do, act.do)

    def _do(self, act: Callable[[SimSwarm], Any]) -> None:
        work = act(self.swarm)
        if asyncio.iscoroutine(work):
            self.swarm._group.create_task(work)

    async def _to_its_end(self) -> None:
        await self.swarm.open()
        first = list(self.swarm.peers)
        run = asyncio.ensure_future(self.swarm.run(timeout_s=LONGEST_S))
        waiting = asyncio.ensure_future(self._ended(first))
        await asyncio.wait([run, waiting], return_when=asyncio.FIRST_COMPLETED)
        for name, peer in self.swarm.peers.items():
            if peer.outcome is None and not self.swarm.is_dead(name):
                self.unended.append(name)
                self.swarm.kill(name)
        waiting.cancel()
        await run

    async def _ended(self, first: list[str]) -> None:
        clock = self.swarm.network.clock
        while any(self.swarm.peers[name].outcome is None for name in first if name not in self.hit()):
            await clock.sleep(1.0)
        end = clock.monotonic() + LATE_S
        while clock.monotonic() < end:
            await clock.sleep(1.0)


def _placed(site: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """Directories of a peer's settings, in this run's."""
    return {key: root / value if key.endswith("_directory") else value for key, value in site.items()}
