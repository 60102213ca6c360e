"""What a part says that it holds is what lies there, by kind, and what was predicted."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from swarm.membership.memory import storage_bytes
from swarm.models.layout import FACTORS, full_vectors
from swarm.models.lora import LoraFamily
from swarm.models.lora_config import BaseDType, LoraConfig
from swarm.models.registry import family_of
from swarm.models.spec import SplitConfig
from swarm.optim.adafactor import Adafactor
from swarm.optim.adamw import AdamW
from swarm.optim.local_part import LocalPart
from swarm.optim.muon import Muon
from swarm.optim.part import PartState, TrainedPart
from swarm.optim.schedules import OptimizerConfig
from swarm.optim.sgd import Sgd
from swarm.optim.update import Update
from swarm.planning.costs import ROUND_BYTES, bytes_by_kind, copy_bytes, held_bytes, training_bytes
from swarm.state.snapshot import Snapshot, initial_snapshot
from tests.harness.rigs.optim import MODEL
from tests.unit.optim.test_local_part import RULES, SPEC, train

CONFIG = OptimizerConfig()


def blank(part: PartState) -> PartState:
    part.install(Snapshot.blank(part.spec.name, 0, part.layout))
    return part


UPDATES = {"adamw": AdamW(CONFIG), "sgd": Sgd(CONFIG), "muon": Muon(CONFIG), "adafactor": Adafactor(CONFIG)}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
@pytest.mark.parametrize(("compute", "exact"), [("float32", False), ("float32", True), ("bfloat16", False)])
def test_trained_part_holds_what_is_predicted_of_it(update: Update, compute: str, exact: bool) -> None:
    model = MODEL.model_copy(update={"compute": compute})
    part = TrainedPart(SPEC, model, update, accumulator="float64" if exact else "float32")
    assert storage_bytes(part.tensors())["optimizer"] == 0, "nothing is installed"
    blank(part)
    elements = part.layout.elements
    each = bytes_by_kind(model, vectors=full_vectors(update.vectors), exact=exact)
    found = storage_bytes(part.tensors())
    assert found["gradients"] == each["gradients"] * elements
    factors = 4 * part.layout.kept_in(FACTORS).elements if FACTORS in update.vectors else 0
    assert found["optimizer"] == each["optimizer"] * elements + factors
    assert 0.9 < found["weights"] / (each["weights"] * elements) < 1.02, "buffers; a table stays float32 in bfloat16"
    assert found["round"] == 0
    part.prepare(torch.zeros(elements), lr=1e-3, clip=1.0, step=1)
    assert storage_bytes(part.tensors())["round"] >= 4 * elements, "the mean"
    part.swap()
    assert storage_bytes(part.tensors()) == found


def test_part_that_trains_apart_holds_its_own_weights_beside_the_anchor() -> None:
    part = LocalPart(SPEC, MODEL, RULES)
    part.install(initial_snapshot(SPEC.name, part.layout, family_of(MODEL).initial_weights(0)))
    train(part, 0, 1, 2)
    elements = part.layout.elements
    each, found = (
        bytes_by_kind(MODEL, vectors=len(RULES.outer.vectors), local=True),
        storage_bytes(part.tensors()),
    )
    assert found["weights"] == pytest.approx(each["weights"] * elements, rel=0.02)
    assert each["weights"] == 8
    assert found["optimizer"] == each["optimizer"] * elements
    assert found["round"] <= 4 * elements


def test_copy_holds_the_state_alone() -> None:
    spec = family_of(MODEL).parts(SplitConfig(stages=2))[0]
    copy = blank(PartState.of(spec, MODEL, AdamW(CONFIG)))
    found = storage_bytes(copy.tensors())
    assert sum(found.values()) == 12 * copy.layout.elements
    assert copy_bytes(MODEL, spec) == pytest.approx(sum(found.values()), rel=0.02)


@pytest.mark.parametrize("base", ["nf4", "bfloat16", "float32"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("ends", ["private", "hosted"])
def test_part_beside_frozen_weights_holds_no_more_of_them_than_is_predicted(
    base: BaseDType, compute: str, ends: str
) -> None:
    model = MODEL.model_copy(update={"compute": compute, "lora": LoraConfig(rank=2, base=base)})
    family = family_of(model)
    assert isinstance(family, LoraFamily)
    for spec in family.parts(SplitConfig(stages=2, ends=ends)):
        layout, part = family.base(spec), TrainedPart(spec, model, AdamW(CONFIG))
        part.install_base(layout.views(layout.pack(family.base_weights(0, spec, None))))
        found, predicted = storage_bytes(part.tensors())["frozen"], family.cost(spec, model.context).frozen_held
        assert 0.6 * predicted <= found <= predicted, "what nothing uses of the string is let go"
        others = training_bytes(model, spec) - held_bytes(model) * family.cost(spec, model.context).parameters
        assert others - ROUND_BYTES * family.cost(spec, model.context).parameters == predicted


def test_storage_that_several_tensors_share_counts_once_and_one_without_memory_not_at_all() -> None:
    vector, other = torch.zeros(10), torch.zeros(3)
    held = {"weights": [vector[:4], vector], "round": [vector, other], "graphs": [torch.zeros(9, device="meta")]}
    assert storage_bytes(cast(Any, held)) == {"weights": 40, "round": 12, "graphs": 0}
