"""Who knows the manifest does not know the weights with which private ends begin: nor does any file say them."""

from __future__ import annotations

import itertools
import secrets
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from peers.simulate.sim_swarm import SimSwarm
from swarm.config import Manifest
from swarm.ids import ENDS, stage_part
from swarm.membership.founder import SEED_BITS, InitialWeights
from swarm.membership.settings import MemberSettings
from swarm.models.registry import family_of
from swarm.sim.device import InlineDevice
from swarm.sim.loop import run_world
from swarm.state.frozen import ModelFiles
from swarm.state.snapshot import digest, initial_snapshot
from tests.harness.rigs.membership import manifest as manifest_of
from tests.harness.settings import checked_settings

SECRET = 0x1F3A_9C52_77E0_4B86_D15E_2A94_C3B7_6083


async def _founding(manifest: Manifest, ends_seed: int | None = None) -> dict[str, str]:
    """Digest of each part with which a founder begins."""
    around = SimpleNamespace(manifest=manifest, device=InlineDevice(torch.device("cpu")), files=ModelFiles())
    origin, snapshots = await InitialWeights(cast(Any, around), ends_seed).load(lambda *_: None)
    assert origin.digests == {snapshot.part: digest(snapshot) for snapshot in snapshots}
    return dict(origin.digests)


def _of_seed(manifest: Manifest, seed: int) -> dict[str, str]:
    """The same of weights that are all made of one seed."""
    family = family_of(manifest.model)
    return {
        spec.name: digest(
            initial_snapshot(spec.name, family.layout(family.build(spec)), family.initial_weights(seed, spec))
        )
        for spec in family.parts(manifest.split)
    }


async def test_two_foundings_of_one_manifest_differ_in_private_ends_and_agree_in_stages() -> None:
    manifest = manifest_of()
    first, second = await _founding(manifest), await _founding(manifest)
    known = _of_seed(manifest, manifest.run.seed)
    assert len({first[ENDS], second[ENDS], known[ENDS]}) == 3
    for stage in map(stage_part, range(2)):
        assert first[stage] == second[stage] == known[stage]


async def test_hosted_ends_are_made_of_the_manifest_s_seed_for_a_host_holds_them_anyway() -> None:
    manifest = manifest_of(ends="hosted")
    assert await _founding(manifest) == _of_seed(manifest, manifest.run.seed) == await _founding(manifest, SECRET)


async def test_ends_seed_that_is_given_makes_the_same_ends_again() -> None:
    manifest = manifest_of()
    assert await _founding(manifest, manifest.run.seed) == _of_seed(manifest, manifest.run.seed)
    assert (await _founding(manifest, SECRET))[ENDS] == _of_seed(manifest, SECRET)[ENDS]


def test_secret_seed_is_in_no_file_no_event_and_no_record_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(secrets, "randbits", lambda bits: drawn.append(bits) or SECRET)
    sites: dict[str, dict[str, Any]] = {
        "bootstrap": {"ends_seed": None},
        "host-0": {"run_directory": tmp_path / "kept", "checkpoint_every": 1},
        "trainer-0": {"run_directory": tmp_path / "kept", "checkpoint_every": 1},
    }
    swarm = SimSwarm(tmp_path, sites=sites, run={"steps": 2, "copies": 1})
    run_world(swarm.run())
    assert drawn == [SEED_BITS]
    assert swarm.history()[0]["digests"][ENDS] == _of_seed(swarm.manifest, SECRET)[ENDS], "it was not made of it"
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {"events.jsonl", "history.jsonl", "vote"} <= {path.name for path in written}
    assert any(path.is_relative_to(tmp_path / "kept") for path in written)
    told = repr([peer.events.events for peer in swarm.peers.values()]).encode()
    in_words = (f"{SECRET}".encode(), f"{SECRET:x}".encode())
    spellings = (*in_words, SECRET.to_bytes(16, "big"), SECRET.to_bytes(16, "little"))
    for (where, said), spelling in itertools.product({**written, "events": told}.items(), spellings):
        assert spelling not in said, f"{where} has it"


def test_secret_seed_is_not_in_what_settings_say_of_themselves() -> None:
    given = checked_settings(home=Path("h"), role="bootstrap", manifest=Path("m"), ends_seed=SECRET)
    member = MemberSettings(role="bootstrap", name="p", ends_seed=SECRET, history=Path("h"), votes=Path("v"))
    assert str(SECRET) not in f"{given!r} {given} {member!r}"
