"""What of torch and transformers is imported when, in a process that begins with nothing."""

from __future__ import annotations

import subprocess
import sys

STORY = """
import sys
from swarm.models.gpt_config import GptConfig
from swarm.models.registry import family_of
from swarm.models.spec import SplitConfig
from tests.unit.models.test_hf_config import model

model().check()
invited = family_of(model())
invited.parts(SplitConfig())
invited.boundary(1, 16)
assert "transformers" not in sys.modules, "an invite is read without it"

family = family_of(GptConfig())
built = family.build(family.whole)
assert built.embedding.weight.is_meta and built.embedding.weight.requires_grad
assert not {"torch._dynamo", "torch._inductor"} & set(sys.modules), "what is built on the meta device asks no compiler"

import torch
from torch import nn
from peers.local.fork_client import PRELOAD
from swarm.models.passes import rehearse
from swarm.models.recompute import recomputed

assert "torch.fx.experimental.symbolic_shapes" not in sys.modules, "then it need not be preloaded"
rehearse()
before = set(sys.modules)
assert before.issuperset(name for name in PRELOAD if name.startswith("torch")), "not what a backward needs"
module, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
y = module(x)
torch.autograd.grad((y,), (x, *module.parameters()), (torch.ones_like(y),))
y = recomputed(module, module, x)
torch.autograd.grad((y,), (x, *module.parameters()), (torch.ones_like(y),))
assert set(sys.modules) == before, sorted(set(sys.modules) - before)
"""


def test_imports_of_the_models_come_when_they_are_needed_and_none_with_the_first_backward() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", STORY], check=True)
