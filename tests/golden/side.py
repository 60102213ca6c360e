"""One side of the comparison: live through stories with the checkout that is the working directory, and write down what
came of them: ``python -m tests.golden.side OUT --stories a,b --seeds 8``.

OUT has a JSON object a line, one for each story and seed and one, last, of the sweeps. Where the directory of the run,
the run's id and the hashes of records would stand, names of them do: the run's id depends on the version of the wire.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import hashlib
import io
import json
import logging
import os
import re
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import swarm
from tests.golden.names import (
    FaultPlan,
    MemoryWorld,
    SimSwarm,
    as_peer,
    crashes,
    live,
    messages_told,
    run_world,
    vectors_of,
)
from tests.golden.stories import HOSTED, STORIES, Story, links, shape_of

EVERY = 1_000_000
LATE_S = 30.0
"""How long, in virtual seconds, those whom something happened to are waited for when all others have ended."""
LONGEST_S = 600.0
HASH = re.compile(r"[0-9a-f]{64}")


class Recording:
    """One story with one seed, and what is told of it while it is lived through."""

    def __init__(self, root: Path, story: Story, seed: int) -> None:
        shape = shape_of(story, seed)
        sites = {name: _placed(site, root) for name, site in shape.pop("sites", {}).items()}
        self.swarm = SimSwarm(root, links=links(seed), may_fail=True, sites=sites, **shape)
        self._story, self._root = story, root
        self._plan: FaultPlan | None = None
        self._kinds, self._acted, self._seen = Counter[str](), list[str](), Counter[str]()

    def live(self) -> dict[str, Any]:
        """To the end of everybody who is still there. Returns what is to be compared."""
        error = ""
        with MemoryWorld(self.swarm) as world, messages_told(world):
            world.listen(self._hear)
            self._plan = FaultPlan(*self._story.strikes, world=world)
            try:
                run_world(self._to_its_end())
            except Exception:  # noqa: BLE001 - it is what came of this story
                error = traceback.format_exc()
        found = {
            "digests": {name: _digest(peer) for name, peer in sorted(self.swarm.peers.items())},
            "events": {name: self._events(name) for name in sorted(self.swarm.peers)},
            "faults": [[one.label, sorted(self._plan.fired[one.label].peers)] for one in self._fired()] + self._acts(),
            "missing": [*self._plan.missing(), *self._plan.broken(), *self._idle()],
            "counts": dict(sorted(self._kinds.items())),
            "error": error,
        }
        found["events"]["(records)"] = self._records()
        return json.loads(self._named(json.dumps(found)))

    def _fired(self) -> list[Any]:
        assert self._plan is not None
        return [one for one in self._story.strikes if one.label in self._plan.fired]

    def _acts(self) -> list[list[Any]]:
        return [[label, []] for label in self._acted]

    def _idle(self) -> list[str]:
        idle = [f"{act.label}: not done" for act in self._story.acts if act.label not in self._acted]
        shows = self._story.shows
        return idle if shows is None or self._seen["shows"] >= shows.nth else [*idle, f"never seen: {shows.described}"]

    def _hear(self, peer: str, kind: str, fields: Mapping[str, Any]) -> None:
        self._kinds[kind] += 1
        self._seen["shows"] += bool(self._story.shows and self._story.shows.matches(peer, kind, fields))
        for act in self._story.acts:
            if act.label not in self._acted and act.on.matches(peer, kind, fields):
                self._seen[act.label] += 1
                if self._seen[act.label] == act.on.nth:
                    self._acted.append(act.label)
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
                self.swarm.kill(name)
        waiting.cancel()
        await run

    async def _ended(self, first: list[str]) -> None:
        clock = self.swarm.network.clock
        steady = [name for name in first if not any(name in peers for _, peers in self._hit())]
        while any(self.swarm.peers[name].outcome is None for name in steady):
            await clock.sleep(1.0)
            steady = [name for name in steady if not any(name in peers for _, peers in self._hit())]
        end = clock.monotonic() + LATE_S
        while clock.monotonic() < end:
            await clock.sleep(1.0)

    def _hit(self) -> list[tuple[str, tuple[str, ...]]]:
        assert self._plan is not None
        return [(label, fired.peers) for label, fired in self._plan.fired.items()]

    # --- what is compared ----------------------------------------------------------------------------------------

    def _events(self, name: str) -> list[dict[str, Any]]:
        """As they are in the peer's file, and at last how it ended."""
        peer = self.swarm.peers[name]
        lines = (peer.settings.home / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        for event in events:
            event.pop("peer")  # who wrote it; an event's own field of that name is stored as another
        return [*events, {"kind": "(outcome)", "what": _outcome(peer.outcome)}]

    def _records(self) -> list[dict[str, Any]]:
        """Every close record that any peer has, once."""
        found: dict[str, dict[str, Any]] = {}
        for name in sorted(self.swarm.peers):
            with contextlib.suppress(FileNotFoundError):
                for record in self.swarm.history(name):
                    found.setdefault(json.dumps(record, sort_keys=True), record)
        return sorted(({"kind": "(record)", **one} for one in found.values()), key=lambda one: one["step"])

    def _named(self, text: str) -> str:
        """Paths, ids and hashes by name, numbered as they come."""
        text = text.replace(str(self._root), "ROOT").replace(self.swarm.manifest.run_id, "RUN")
        known: dict[str, str] = {}
        for found in re.findall(r'"(?:record|previous)": "([0-9a-f]{64})"', text):
            known.setdefault(found, f"record {len(known)}")
        return HASH.sub(lambda one: known.get(one[0], one[0]), text)


def _placed(site: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """Directories of a peer's settings, in this run's."""
    return {key: root / value if key.endswith("_directory") else value for key, value in site.items()}


def _digest(peer: Any) -> list[Any] | None:
    found = vectors_of(peer)
    if found is None:
        return None
    part, step, vectors = found
    return [part, step, hashlib.sha256(b"".join(vectors)).hexdigest()]


def _outcome(outcome: str | BaseException | None) -> Any:
    """In words; of a group of errors those in it."""
    if isinstance(outcome, BaseExceptionGroup):
        return [_outcome(one) for one in outcome.exceptions]
    return f"{type(outcome).__name__}: {outcome}" if isinstance(outcome, BaseException) else outcome


def sweeps(root: Path) -> dict[str, int]:
    """How many deaths the sweeps have to draw from, by what they die at, over the runs in peace that they are of."""
    found: dict[str, int] = {}
    for title, more in {"private": {}, "hosted": HOSTED}.items():
        calm = live(root / title, **more)
        for what, fits in {"events": lambda kind: " " not in kind, "messages": lambda kind: " " in kind}.items():
            drawn = crashes(calm, most=EVERY, seed=1, kinds=fits)
            kinds, victims = {str(one.moment.on.kind) for one in drawn}, {one.victim for one in drawn}
            sizes = {"moments": len(drawn), "kinds": len(kinds), "victims": len(victims)}
            found |= {f"{title} {what}: {name}": size for name, size in sizes.items()}
    return found


class _Collector:
    """Counts test functions by their name, whatever file they are in: files move."""

    def __init__(self) -> None:
        self.names = Counter[str]()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """What pytest calls."""
        self.names.update(getattr(item, "originalname", item.name) for item in session.items)


def tests() -> dict[str, int]:
    """Every test of this checkout but those of the golden runs, which the base does not have."""
    collector, here = _Collector(), Path.cwd()
    options = ["--collect-only", "-q", "-m", "", "-p", "no:cacheprovider", "--ignore", str(here / "tests/golden")]
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        ended = pytest.main([*options, str(here / "tests")], plugins=[collector])
    if ended:
        raise SystemExit(f"pytest cannot collect the tests of {here}:\n{told.getvalue()}")
    return dict(sorted(collector.names.items()))


def prepare() -> None:
    """One thread, and no time for disks that nobody will read, nor for rubbish before a story is over."""
    torch.set_num_threads(1)
    os.fsync = lambda file: None
    gc.disable()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--stories", required=True)
    parser.add_argument("--seeds", type=int, required=True)
    chosen = parser.parse_args()
    here = Path(swarm.__file__).resolve().parents[1]
    if here != Path.cwd().resolve():
        raise SystemExit(f"this is {Path.cwd()}, but its modules come from {here}: set PYTHONPATH to it")
    os.umask(0o077)
    logging.disable(logging.CRITICAL)
    prepare()
    with chosen.out.open("w") as out, tempfile.TemporaryDirectory() as temporary:
        for name in chosen.stories.split(","):
            for seed in range(chosen.seeds):
                root = Path(temporary) / f"{name}-{seed}"
                root.mkdir()
                line = {"story": name, "seed": seed, **Recording(root, STORIES[name], seed).live()}
                out.write(json.dumps(line) + "\n")
                out.flush()
                gc.collect()
        out.write(json.dumps({"sweeps": sweeps(Path(temporary) / "sweeps"), "tests": tests()}) + "\n")


if __name__ == "__main__":
    main()
