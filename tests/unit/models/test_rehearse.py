"""The first backward of a process."""

from __future__ import annotations

import subprocess
import sys

STORY = """
import sys
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


def test_rehearse_leaves_nothing_to_be_imported_by_the_first_backward() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", STORY], check=True, timeout=300)
