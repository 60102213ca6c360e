"""A part that does not fit into a machine's memory is refused before anything of it is downloaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from data_shards.tokenize import train_tokenizer
from swarm.errors import StateError
from swarm.ids import PartName
from swarm.membership import roles
from swarm.planning.costs import training_bytes
from swarm.sim.device import InlineDevice
from tests.harness.swarm import small_manifest


def test_part_that_does_not_fit_is_refused_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = small_manifest(train_tokenizer(["some words"], 300), 2, 1, {"split": {"stages": 2}})
    around = cast(Any, SimpleNamespace(manifest=manifest, device=InlineDevice(torch.device("cpu"))))
    name = PartName("stage-0")
    needed = training_bytes(manifest.model, roles.spec_of(manifest, name), exact=manifest.run.reproducible)
    monkeypatch.setattr(roles, "free_memory", lambda: needed - 1)
    with pytest.raises(StateError, match=r"training stage-0 takes .* GB of memory are free here"):
        roles.check_memory(around, name)
    monkeypatch.setattr(roles, "free_memory", lambda: needed)
    roles.check_memory(around, name)
