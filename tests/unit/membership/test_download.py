"""A download as this peer's events tell it: how far it is, who gave, who was dropped and why."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm.errors import Busy, RunEnded, StateError, Unreachable, Violation
from swarm.events import DonorDropped, StateDownloaded, SyncProgress
from swarm.ids import PartName, PeerId
from swarm.membership import download
from swarm.membership.download import PartDownload, StateFetch, download_part
from swarm.network.protocols import Answer
from swarm.optim.part import PartState
from swarm.state.frozen import ModelFiles
from swarm.state.snapshot import digest, initial_snapshot
from swarm.state.transfer import CHUNK, DESCRIBE
from tests.harness.expect import eventually
from tests.harness.rigs.membership import ME, Donors, EventList, big_state, in_time, inline

A, B, C = (PeerId(name) for name in "abc")


class Scene:
    """A peer that downloads from the donors of a world in memory."""

    def __init__(self) -> None:
        self.world, self.events = Donors(big_state()), EventList()
        self.installed: list[str] = []

    async def open(self) -> None:
        await self.world.open()
        state = self.world.state
        self.record: Any = SimpleNamespace(step=state.step, digests={state.part: digest(state)})
        self.part: Any = SimpleNamespace(
            spec=SimpleNamespace(name=state.part),
            layout=state.layout,
            install=lambda snapshot: self.installed.append(digest(snapshot)),
        )
        self.around: Any = SimpleNamespace(
            endpoint=self.world.network.find(ME),
            clock=self.world.clock,
            events=self.events,
            device=SimpleNamespace(run=inline),
            files=ModelFiles(),
        )

    async def run(self, work: Any) -> None:
        await in_time(self.world.clock, asyncio.create_task(work))


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr("swarm.state.snapshot.CHUNK_BYTES", 256)
    real = download.DownloadContext
    monkeypatch.setattr(download, "DownloadContext", lambda **given: real(**given, run=inline))
    scene = Scene()
    await scene.open()
    return scene


async def test_download_tells_who_gave_how_much_and_installs_once(scene: Scene) -> None:
    scene.world.slow({"a": 0.1, "b": 0.3, "c": 0.3})
    work = PartDownload(scene.around, scene.record, scene.part)
    await scene.run(work.run([A, B, C]))
    (done,) = scene.events.of(StateDownloaded)
    total = scene.world.cut.total_bytes
    assert (done.donor, set(done.donors), done.bytes_received) == (A, {A, B, C}, total)
    assert (work.verified_bytes, done.seconds) == (total, scene.world.clock.now)
    assert scene.events.of(SyncProgress)[-1].bytes_received == total
    assert scene.installed == [digest(scene.world.state)]


async def test_download_tells_of_a_liar_and_of_its_end(scene: Scene) -> None:
    async def lie(body: Any, answer: Answer[Any]) -> Answer[Any]:
        return Answer(answer.body, bytes(len(answer.payload)))

    scene.world.slow(dict.fromkeys("abc", 0.1))
    scene.world.twists[A, CHUNK] = lie
    work = PartDownload(scene.around, scene.record, scene.part)
    await scene.run(work.run([A, B, C]))
    (dropped,) = scene.events.of(DonorDropped)
    assert (dropped.donor, dropped.code, work.liars) == (A, Violation.code, {A})
    assert "not what its hash says" in dropped.reason
    assert A not in scene.events.of(StateDownloaded)[0].donors


async def test_download_at_the_start_of_a_run_waits_for_a_busy_donor(scene: Scene) -> None:
    busy = [Busy("enough")] * 5

    async def refuse(body: Any, answer: Answer[Any]) -> Answer[Any]:
        if busy:
            raise busy.pop()
        return answer

    scene.world.twists[A, DESCRIBE] = refuse
    await scene.run(download_part(scene.around, scene.record, scene.part, A))
    assert busy == []
    assert scene.installed == [digest(scene.world.state)]
    assert scene.world.clock.now > 0.5, "it did not pause"


async def test_download_of_a_part_that_the_record_does_not_name_is_an_error(scene: Scene) -> None:
    scene.part.spec.name = PartName("stage-9")
    with pytest.raises(StateError, match="names no stage-9"):
        PartDownload(scene.around, scene.record, scene.part)


async def test_owners_host_whose_last_donor_died_holds_on_with_what_its_disk_has(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = scene.world.state
    part = PartState(cast(Any, scene.part.spec), state.layout, cast(Any, SimpleNamespace(vectors=state.layout.vectors)))
    monkeypatch.setattr(download, "build_empty", lambda *_: inline(lambda: part))
    monkeypatch.setattr(download, "check_memory", lambda *_: None)
    fetch, scene.record.members = StateFetch(scene.around), SimpleNamespace(replicas=lambda part: (), peers=(A,))
    scene.record.hash = lambda: "0" * 64

    async def die(body: Any, answer: Answer[Any]) -> Answer[Any]:
        raise Unreachable("it died", peer=A)

    scene.world.twists[A, CHUNK] = die
    with pytest.raises(Unreachable):
        await scene.run(fetch.run(state.part, [A], scene.record))
    assert part.empty
    with pytest.raises(RunEnded, match="no state of"):
        await fetch.revive(state.part, scene.record, lambda: None)
    await fetch.revive(state.part, scene.record, lambda: replace(state, step=state.step - 1))
    assert (fetch.begun, part.step, await fetch.digest()) == (None, state.step, digest(state))


@pytest.mark.parametrize("same", [True, False])
async def test_part_is_read_from_the_models_files_at_the_start_if_they_are_the_runs(
    scene: Scene, same: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = scene.world.state
    weights = state.layout.views(state.params if same else state.params + 1)
    family = SimpleNamespace(initial_weights=lambda seed, spec, files: weights if files == tmp_path else None)
    begun = initial_snapshot(state.part, state.layout, state.layout.views(state.params))
    scene.around.files, scene.record.step = ModelFiles(tmp_path), 0
    scene.record.digests = {state.part: digest(begun)}
    scene.around.manifest = SimpleNamespace(model=None, run=SimpleNamespace(seed=0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download, "family_of", lambda model: family)
        work = asyncio.create_task(download_part(scene.around, scene.record, scene.part, A))
        if same:
            await in_time(scene.world.clock, work)
        else:
            await eventually(lambda: "have other weights" in caplog.text)
            work.cancel()
    assert scene.installed == ([digest(begun)] if same else [])
    assert [(one.bytes_received, one.donors) for one in scene.events.of(StateDownloaded)] == (
        [(0, (ME,))] if same else []
    )
