"""The whole state of one part after one step: what is digested, stored and downloaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from swarm.errors import StateError
from swarm.ids import PartName
from swarm.models.layout import FlatLayout
from swarm.state.chunks import hashes_of, root_of

MOMENTS = ("exp_avg", "exp_avg_sq")
_FORMAT = "swarm-part/2"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """Parameters and both AdamW moments: flat float32 CPU vectors of ``layout.elements``. Nobody writes to them."""

    part: PartName
    step: int
    layout: FlatLayout
    params: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def __post_init__(self) -> None:
        for vector in self.vectors:
            if (
                vector.shape != (self.layout.elements,)
                or vector.dtype != torch.float32
                or vector.is_cuda
                or not vector.is_contiguous()
            ):
                raise StateError(f"{self.part}: a vector of {vector.dtype} {tuple(vector.shape)} on {vector.device}")

    @property
    def vectors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three vectors in the order of the digest and of the wire."""
        return self.params, self.exp_avg, self.exp_avg_sq

    @property
    def weights(self) -> dict[str, Tensor]:
        """Parameters by name, as views."""
        return self.layout.views(self.params)

    def buffers(self) -> tuple[memoryview, memoryview, memoryview]:
        """The vectors' bytes, little-endian, without a copy."""
        params, exp_avg, exp_avg_sq = (vector.view(torch.uint8).numpy().data for vector in self.vectors)
        return params, exp_avg, exp_avg_sq


def initial_snapshot(part: PartName, layout: FlatLayout, weights: Mapping[str, Tensor]) -> Snapshot:
    """Step 0: these weights and zero moments. Raises StateError when a weight is missing or misshapen."""
    params = layout.flatten(weights)
    return Snapshot(
        part=part,
        step=0,
        layout=layout,
        params=params,
        exp_avg=torch.zeros_like(params),
        exp_avg_sq=torch.zeros_like(params),
    )


def digest(snapshot: Snapshot) -> str:
    """Hex sha256 over part, names, shapes and the hashes of all chunks: see :mod:`swarm.state.chunks`.

    Replicas compare these after every step. About 1 GB/s and more; lets go of the interpreter lock meanwhile.
    """
    return root_of(snapshot.part, snapshot.layout, hashes_of(snapshot.buffers()))


def to_tensors(snapshot: Snapshot) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) for a safetensors file: parameters under their own names, so that any tool reads them, the
    moments as ``exp_avg.NAME`` and ``exp_avg_sq.NAME``; all views. The metadata carries the digest."""
    tensors = snapshot.weights
    for prefix, vector in zip(MOMENTS, snapshot.vectors[1:], strict=True):
        tensors |= {f"{prefix}.{name}": view for name, view in snapshot.layout.views(vector).items()}
    metadata = {"format": _FORMAT, "state": json.dumps(_header(snapshot)), "digest": digest(snapshot)}
    return tensors, metadata


def from_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Snapshot:
    """The inverse of :func:`to_tensors`, verified. Raises StateError with what is wrong."""
    if metadata.get("format") != _FORMAT:
        raise StateError(f"format {metadata.get('format')!r} is not {_FORMAT!r}")
    try:
        part, step, shapes = json.loads(metadata["state"])
        layout = FlatLayout.from_shapes((str(name), tuple(map(int, shape))) for name, shape in shapes)
        if len(set(layout.names)) < len(layout.names):
            raise StateError("it names a parameter twice")
        snapshot = Snapshot(
            part=PartName(str(part)),
            step=int(step),
            layout=layout,
            params=layout.flatten(tensors),
            exp_avg=layout.flatten(_without_prefix(tensors, MOMENTS[0])),
            exp_avg_sq=layout.flatten(_without_prefix(tensors, MOMENTS[1])),
        )
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise StateError(f"unreadable metadata: {error}") from error
    if digest(snapshot) != metadata.get("digest"):
        raise StateError("the content does not match the digest written with it")
    return snapshot


def to_bytes(snapshot: Snapshot) -> bytes:
    """One safetensors file in memory; about three times the state in memory while it is made."""
    tensors, metadata = to_tensors(snapshot)
    return save_safetensors(tensors, metadata=metadata)


def from_bytes(data: bytes) -> Snapshot:
    """Read what :func:`to_bytes` made. Raises StateError for anything else."""
    try:
        tensors = load_safetensors(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (SafetensorError, ValueError) as error:
        raise StateError(f"not a safetensors file: {error}") from error
    return from_tensors(tensors, header.get("__metadata__", {}))


def _header(snapshot: Snapshot) -> list[object]:
    return [snapshot.part, snapshot.step, snapshot.layout.shapes]


def _without_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    start = prefix + "."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
