"""The table of codecs gives the manifest its keys; a codec that draws random numbers may rely on its context."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pytest
import torch

from swarm.averaging.config import AveragingConfig
from swarm.compression.codec import EncodeContext
from swarm.compression.dense import FLOAT32, DenseCodec
from swarm.compression.names import NAMED, ActivationCodec, AveragingCodec, exact_codec
from swarm.compression.registry import CODECS
from swarm.config import parse_manifest
from swarm.errors import ConfigError
from swarm.ids import MicrobatchId, PeerId, StepWork
from swarm.models.passes import Bound
from swarm.models.spec import TensorSpec
from swarm.phases import complete
from swarm.pipeline.boundary import BoundarySpecs, RowNotes
from swarm.pipeline.compute import EndsCompute, EndsMaterial, Material, StageCompute
from swarm.pipeline.messages import Direction

SPEC = TensorSpec((2, 3, 4), "float32")
MICROBATCH = MicrobatchId(PeerId("a"), "0" * 16, 0, 7)


def test_names_of_the_manifest_are_those_that_are_registered() -> None:
    assert get_args(ActivationCodec) == ("float32", "bfloat16", "float16", "int8", "int8h", "int4h")
    assert get_args(AveragingCodec) == ("float32", "int8", "int4h")
    assert [(name, codec.name) for name, codec in CODECS.items()] == [(one.name, one.name) for one in NAMED]


NAMES = "'float32', 'bfloat16', 'float16', 'int8', 'int8h' or 'int4h'"


@pytest.mark.parametrize(
    ("section", "key", "bad", "allowed"),
    [
        ("codecs", "activations", "float64", f"'exact', 'auto', {NAMES}"),
        ("codecs", "gradients", "float64", f"'same', 'exact', 'auto', {NAMES}"),
        ("averaging", "codec", "bfloat16", "'float32', 'int8' or 'int4h'"),
    ],
)
def test_codec_that_is_not_for_this_is_refused_with_those_that_are(
    section: str, key: str, bad: str, allowed: str
) -> None:
    document = {"tokenizer": {"digest": "0" * 64}, section: {key: bad}}
    with pytest.raises(ConfigError) as caught:
        parse_manifest(document, "a test")
    assert (caught.value.key, caught.value.allowed) == (f"{section}.{key}", allowed)
    assert AveragingConfig().codec == "float32"


def test_exact_activations_travel_as_they_are_computed() -> None:
    assert [exact_codec(dtype) for dtype in ("float32", "bfloat16", "float64")] == ["float32", "bfloat16", "float32"]
    tensor = torch.randn(SPEC.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    spec = TensorSpec(SPEC.shape, "bfloat16")
    context = EncodeContext(step=1, direction="forward", microbatch=MICROBATCH)
    sent = {}
    for name in ("float32", exact_codec("bfloat16")):
        wire = CODECS[name].encode(tensor, context)
        sent[name] = wire.nbytes
        assert torch.equal(CODECS[name].decode(wire, spec), tensor)
    assert sent == {"float32": 96, "bfloat16": 48}


def test_manifest_names_the_codec_that_it_has_chosen_itself() -> None:
    def parsed(**sections: Any) -> Any:
        return parse_manifest({"tokenizer": {"digest": "0" * 64}} | sections, "a test")

    rounded = {"compute": "bfloat16"}
    assert parsed().codecs.activations == parsed(codecs={}).codecs.activations == "float32"
    assert parsed(model=rounded).codecs.activations == "bfloat16"
    assert b'"activations":"bfloat16"' in parsed(model=rounded).canonical()
    silent, named = parsed(codecs={"activations": "exact"}), parsed(codecs={"activations": "float32"})
    assert silent.run_id == named.run_id == parsed().run_id
    assert parsed(model=rounded, codecs={"activations": "float32"}).codecs.activations == "float32"
    with pytest.raises(ConfigError) as caught:
        parsed(model={"dim": 3})
    assert caught.value.key == "model.dim"


def test_gradients_travel_as_activations_unless_another_codec_is_named() -> None:
    def parsed(**codecs: str) -> Any:
        return parse_manifest({"tokenizer": {"digest": "0" * 64}, "codecs": codecs}, "a test")

    assert parsed(activations="int4h").codecs.gradients == "int4h"
    assert parsed(activations="int4h", gradients="int8h").codecs.activations == "int4h"
    assert parsed(gradients="int8h").codecs.activations == "float32"
    assert parsed(gradients="float32").run_id == parsed().run_id != parsed(gradients="int8h").run_id


def test_codecs_chosen_by_records_stay_open_in_the_manifest_and_are_refused_where_weights_must_repeat() -> None:
    def parsed(reproducible: bool, **codecs: str) -> Any:
        document = {"tokenizer": {"digest": "0" * 64}, "codecs": codecs, "run": {"reproducible": reproducible}}
        return parse_manifest(document, "a test")

    codecs = parsed(False, activations="auto").codecs
    assert (codecs.activations, codecs.gradients) == ("auto", "auto")
    codecs = parsed(False, activations="auto", gradients="exact").codecs
    assert (codecs.activations, codecs.gradients) == ("auto", "float32")
    with pytest.raises(ConfigError) as caught:
        parsed(True, gradients="auto")
    assert caught.value.key == "codecs.gradients"
    assert 'codecs.gradients = "exact"' in caught.value.remedy
    assert "differs from run to run" in caught.value.why


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_each_direction_has_its_codec_and_its_size(direction: Direction) -> None:
    specs = BoundarySpecs(
        activation=SPEC, tokens=TensorSpec((2, 3), "int64"), codec=FLOAT32, back=CODECS["int8h"], hosted=False
    )
    context = EncodeContext(step=1, direction=direction, microbatch=MICROBATCH)
    wire = specs.leave(torch.ones(SPEC.shape), context, "tensor", None)
    sizes = {"forward": specs.activation_bytes, "backward": specs.gradient_bytes}
    assert sizes == {"forward": 96, "backward": 6 * 66}
    assert wire.nbytes == sizes[direction]
    assert torch.allclose(specs.arrive(wire, CPU, direction, 1), torch.ones(SPEC.shape), atol=0.02)


def test_exact_is_what_has_the_codecs_own_dtype() -> None:
    exact = {(name, dtype) for name, codec in CODECS.items() for dtype in ("float32", "float64") if codec.exact(dtype)}
    assert exact == {("float32", "float32"), ("float64", "float64")}


def test_float64_carries_sums_as_they_are() -> None:
    sums = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    context = EncodeContext(step=1, direction="sum")
    wire = CODECS["float64"].encode(sums, context)
    assert bytes(wire) == sums.numpy().tobytes()
    assert torch.equal(CODECS["float64"].decode(wire, TensorSpec((5,), "float64")), sums)


# --- a codec that draws random numbers -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Noisy:
    """float32 with noise that the context alone decides."""

    inner: DenseCodec = FLOAT32
    name: str = "noisy"

    def wire_bytes(self, spec: TensorSpec) -> int:
        return self.inner.wire_bytes(spec)

    def exact(self, dtype: str) -> bool:
        return False

    def encode(self, tensor: torch.Tensor, context: EncodeContext) -> memoryview:
        seed = int.from_bytes(hashlib.sha256(repr(context).encode()).digest()[:8], "little")
        noise = torch.from_numpy(np.random.default_rng(seed).random(tensor.shape, dtype=np.float32))
        return self.inner.encode(tensor + noise, context)

    def narrow(self, tensor: torch.Tensor, context: EncodeContext) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.encode(tensor, context)), dtype=torch.uint8)

    def widen(self, wire: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        return self.inner.widen(wire, spec)

    def decode(self, buffer: Any, spec: TensorSpec, *, check_finite: bool = False) -> torch.Tensor:
        return self.inner.decode(buffer, spec, check_finite=check_finite)


class Part:
    """A stage, and ends, that do next to nothing."""

    work: frozenset[StepWork] = frozenset()

    def forward(self, x: torch.Tensor, *, seed: int, work: StepWork, graph: bool = True) -> Any:
        return x * 2, "graph"

    def backward(self, graph: Any, grad_output: torch.Tensor) -> Any:
        return grad_output * 2, []

    def backward_input(self, graph: Any, grad_output: torch.Tensor) -> Any:
        return grad_output * 2, None

    def backward_weights(self, rest: Any) -> Any:
        return []

    def embed(self, tokens: torch.Tensor, *, seed: int, work: StepWork) -> Any:
        return torch.ones(SPEC.shape), "graph"

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor, *, work: StepWork) -> Any:
        return 1.0, 6, hidden, []

    def embed_backward(self, graph: Any, grad: torch.Tensor) -> Any:
        return []

    def check(self, gradients: Any) -> None:
        pass

    def is_open(self, step: int) -> bool:
        return step == 5

    def accumulated(self, step: int) -> frozenset[StepWork]:
        return self.work

    def accumulate(self, work: StepWork, gradients: Any, *, checked: bool = False, bound: Bound | None = None) -> None:
        self.work |= {work}


SPECS = BoundarySpecs(activation=SPEC, tokens=TensorSpec((2, 3), "int64"), codec=Noisy(), hosted=False)
CPU = torch.device("cpu")


def test_what_is_recalled_has_the_very_same_bytes_whatever_the_codec() -> None:
    replica, another = (StageCompute(Part(), SPECS, CPU) for _ in range(2))
    payload, work = bytes(96), StepWork(5, MICROBATCH)
    first = bytes(complete(replica.forward(payload, 0, work, first=False))[0])
    assert bytes(another.output(payload, 0, work, first=False)) == first
    assert bytes(another.output(payload, 0, StepWork(6, MICROBATCH), first=False)) != first
    material = Material(work=work, seed=0, first=False, input=payload, gradient=payload)
    contributed = complete(replica.contribute(material, None, None)).gradient
    again = another.gradient(material)
    assert contributed is not None
    assert again is not None
    assert bytes(contributed) == bytes(again)
    assert bytes(contributed) != first, "the directions differ"


def test_what_a_trainer_gives_again_has_the_very_same_bytes_whatever_the_codec() -> None:
    ends, tokens = EndsCompute(Part(), SPECS, CPU), torch.zeros((2, 3), dtype=torch.int64)
    work = StepWork(5, MICROBATCH)
    embedded, graph = ends.embed(tokens, 0, work, RowNotes())
    assert bytes(ends.embed(tokens, 0, work, RowNotes())[0]) == bytes(embedded)
    gradient = ends.loss(embedded, tokens, work)[2]
    assert bytes(ends.loss(embedded, tokens, work)[2]) == bytes(gradient) != bytes(embedded)
    ends.finish(graph, gradient, [], work)
    material = EndsMaterial(work=work, seed=0, tokens=tokens, targets=tokens, output=embedded, gradient=gradient)
    ends.replay(material)
    assert ends.held(5) == {work}
