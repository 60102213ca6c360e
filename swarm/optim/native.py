"""The optimizer step in C: one pass over memory where torch makes fifteen, with the same bits.

``python -m swarm.optim.native`` compiles ``adamw.c`` into this directory, where the machine has a C compiler; set-up
does that. A peer takes what it finds if a trial gives the bits of :mod:`swarm.optim.adamw`, and else goes without it:
more slowly, with the same result. So replicas with and without it agree.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from swarm.errors import BugError

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("adamw.c")
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-shared",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-fast-math",
    "-fno-math-errno",
    "-fopenmp-simd",
)
"""``-fno-math-errno`` lets sqrtf be the processor's own instruction; it rounds as IEEE 754 says."""
COMPILERS = ("cc", "gcc", "clang")
SUFFIX = ".kernel"
"""Not one by which Python takes a library for a module of the package."""

Vectors = tuple[Tensor, Tensor, Tensor]
Kernel = Callable[[Vectors, Tensor, Vectors, tuple[float, ...]], None]
"""``kernel(old, gradient, new, scalars)``: parameters and both moments before and after the step, all contiguous
float32 (elements,) on the CPU; ``scalars`` are nine floats in the order of ``adamw.c``."""


def library(directory: Path = SOURCE.parent) -> Path:
    """Return where the compiled kernel of this source and these flags is, if there is one."""
    made_of = SOURCE.read_bytes() + " ".join(FLAGS).encode()
    return directory / f"_adamw-{hashlib.sha256(made_of).hexdigest()[:12]}{SUFFIX}"


def build(directory: Path = SOURCE.parent) -> Path | None:
    """Compile it, and remove what was made of an older source; None, with the reason logged, where that cannot be."""
    target = library(directory)
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        logger.info("no C compiler (%s): the optimizer step takes its slower path", ", ".join(COMPILERS))
        return None
    try:
        with tempfile.TemporaryDirectory(dir=directory, prefix="_adamw-") as scratch:
            made = Path(scratch) / target.name
            subprocess.run([compiler, *FLAGS, "-o", made, SOURCE, "-lm"], check=True, capture_output=True, text=True)
            made.replace(target)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        logger.warning("use the slower optimizer step: the one in C was not compiled: %s", said[-500:])
        return None
    for other in directory.glob(f"_adamw-*{SUFFIX}"):
        if other != target:
            other.unlink(missing_ok=True)
    return target


def load(path: Path) -> Kernel | None:
    """Return the kernel of a compiled library, not tried yet; None where there is none that can be loaded."""
    if not path.is_file():
        return None
    try:
        function = ctypes.CDLL(str(path)).swarm_adamw
    except (OSError, AttributeError) as error:
        logger.warning("use the slower optimizer step: %s cannot be loaded: %s", path, error)
        return None
    function.restype = None
    function.argtypes = [ctypes.c_size_t, *[ctypes.c_void_p] * 8]

    def kernel(old: Vectors, gradient: Tensor, new: Vectors, scalars: tuple[float, ...]) -> None:
        for vector in (*old, gradient, *new):
            if vector.dtype != torch.float32 or vector.numel() != gradient.numel() or not vector.is_contiguous():
                raise BugError(f"a vector of the optimizer step is {vector.dtype} {tuple(vector.shape)}")
        numbers = (ctypes.c_float * len(scalars))(*scalars)
        vectors = [vector.data_ptr() for vector in (*old, gradient, *new)]
        function(gradient.numel(), *vectors, ctypes.addressof(numbers))  # without the interpreter's lock

    return kernel


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    build()
