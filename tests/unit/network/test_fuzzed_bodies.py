"""Whatever a body holds: little of it is looked at before it is refused, and nothing but a Violation comes out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgpack
import pytest

from peers.chaos.strangers.bodies import AnyRpc, all_rpcs, frames, schema_of
from swarm.errors import Violation
from swarm.network.rpc.bodies import FREE_ELEMENTS, decode, unpack
from swarm.network.rpc.strangers import MAX_STRANGER_BODY_BYTES
from swarm.schema import LISTED, MAX_LISTED, Message
from swarm.state.transfer import DESCRIBE
from tests.harness.fuzzed_bodies import fields_of, problems_of

EACH = 24
SEED = 1


@pytest.mark.parametrize("rpc", all_rpcs(), ids=lambda rpc: rpc.name)
def test_errors_collected_for_a_fuzzed_body_do_not_grow_with_it(rpc: AnyRpc) -> None:
    most = fields_of(schema_of(rpc.request))
    seen = [problems_of(rpc, packed) for packed in frames(rpc, EACH, SEED, MAX_STRANGER_BODY_BYTES)]
    assert max(seen) <= most
    assert any(seen) or not rpc.request.model_fields


def test_fuzzed_bodies_are_more_than_a_thousand() -> None:
    assert len(all_rpcs()) * EACH >= 1000


def unbounded(schema: Any, where: str) -> Iterator[str]:
    """The lists and maps of a schema that may be of any length."""
    kind = schema["type"]
    if kind == "model-fields":
        for name, field in schema["fields"].items():
            yield from unbounded(field["schema"], f"{where}.{name}")
        return
    if (kind == "dict" or "variadic_item_index" in schema) and "max_length" not in schema:
        yield where
    for inner in [schema[key] for key in ("schema", "values_schema") if key in schema] + schema.get("items_schema", []):
        yield from unbounded(inner, where)


@pytest.mark.parametrize("rpc", all_rpcs(), ids=lambda rpc: rpc.name)
def test_every_list_of_a_message_has_a_bound(rpc: AnyRpc) -> None:
    for message in (rpc.request, rpc.reply):
        assert list(unbounded(schema_of(message), message.__name__)) == []


class Inner(Message):
    """Has one field."""

    number: int


class Listing(Message):
    """Has a list that is bounded."""

    many: Annotated[tuple[int, ...], LISTED]


class Outer(Message):
    """Has lists of everything."""

    plain: tuple[int, ...] = ()
    inner: tuple[Inner, ...] = ()
    table: dict[str, Inner] = {}


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        ({"other": 1}, r"Outer\.other: extra_forbidden"),
        ({"inner": ({"number": 1}, {"number": 1, "more": 2})}, r"Outer\.inner\.more: extra_forbidden"),
        ({"table": {"a": {"more": 2}}}, r"Outer\.table\.more: extra_forbidden"),
        ({"plain": ("a",) * 1000}, r"Outer\.plain\.0: int_type"),
        ({"table": dict.fromkeys(map(str, range(1000)), 1)}, r"Outer\.table\.0: "),
    ],
)
def test_first_thing_that_is_wrong_is_named(plain: Any, words: str) -> None:
    with pytest.raises(Violation, match=words):
        decode(Outer, plain)


def test_list_that_is_too_long_is_refused_before_its_elements_are_looked_at() -> None:
    with pytest.raises(Violation, match=r"Listing\.many: too_long"):
        decode(Listing, {"many": ("no number",) * (MAX_LISTED + 1)})


def test_body_may_hold_few_elements_for_its_size() -> None:
    unpack(msgpack.packb((0,) * FREE_ELEMENTS))
    with pytest.raises(Violation, match="elements|malformed"):
        unpack(msgpack.packb(((0,) * FREE_ELEMENTS, (0,) * FREE_ELEMENTS)))


@pytest.mark.parametrize("part", ["stage-\u0661", "stage-1\n", "Stage-1", "stage-1234", "ends "])
def test_part_is_named_in_ascii_alone(part: str) -> None:
    with pytest.raises(Violation, match=r"DescribeRequest\.part: string_pattern_mismatch"):
        decode(DESCRIBE.request, {"part": part, "step": 1, "digest": "0" * 16})
