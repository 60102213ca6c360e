"""The guard before hivemind's decoder."""

from __future__ import annotations

import msgpack
import pytest
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils.serializer import MSGPackSerializer
from hypothesis import given
from hypothesis import strategies as st

from swarm.network.guard import MAX_DEPTH, TooDeep, check_nesting, install

install()

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=300)
    | st.text(max_size=80),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=20),
    max_leaves=30,
)


@given(PLAIN)
def test_guard_walks_whatever_msgpack_writes(value: object) -> None:
    check_nesting(msgpack.packb(value), limit=40)


@pytest.mark.parametrize("value", [(1, (2, (3,))), [b"x" * 300, "y" * 70_000], {"a": [1.5, None]}])
def test_guard_lets_honest_values_through(value: object) -> None:
    assert MSGPackSerializer.loads(MSGPackSerializer.dumps(value)) == value


def _extensions(depth: int) -> bytes:
    data = b"\xc0"
    for _ in range(depth):
        data = msgpack.packb(msgpack.ExtType(0x40, b"\x91" + data))
    return data


@pytest.mark.parametrize(
    "data",
    [
        _extensions(MAX_DEPTH),
        _extensions(500),
        b"\x91" * (MAX_DEPTH + 1) + b"\xc0",
        b"\x81\xa1a" * 3000 + b"\xc0",
        b"\xdd\x00\x00\x00\x01" * 50 + b"\xc0",
        b"\xdd" + (1 << 20).to_bytes(4, "big") + b"\xc0" * (1 << 20),
        b"\xc1",
        b"",
        b"\x92\x01",
        b"\xd9\xff",
        b"\xc9\x00\x00\x00\x05",
    ],
)
def test_guard_refuses_deep_or_broken_values_before_they_are_decoded(data: bytes) -> None:
    with pytest.raises(TooDeep):
        MSGPackSerializer.loads(data)


def test_guard_refuses_huge_values() -> None:
    with pytest.raises(TooDeep):
        MSGPackSerializer.loads(bytes(5 << 20))


def _dictionary(content: object) -> bytes:
    return bytes(msgpack.packb(msgpack.ExtType(0x50, msgpack.packb(content))))


def test_dictionary_value_goes_through_and_its_capacity_is_ours() -> None:
    value = MSGPackSerializer.loads(_dictionary([1, 5.0, [["a", b"1", 4e9], ["b", b"2", 4e9]]]))
    assert isinstance(value, DictionaryDHTValue)
    assert value.maxsize == float("inf")
    assert len(value) == 2
    again = MSGPackSerializer.loads(MSGPackSerializer.dumps(value))
    assert dict(again.items()) == dict(value.items())


@pytest.mark.parametrize(
    "content",
    [
        5,
        [1, 2],
        [1, 2, {}],
        [1, 2, [["a", b"1"]]],
        [1, 2, [["a", "1", 4e9]]],
        [1, 2, [[1, b"1", 4e9]]],
        [1, 2, [["a", b"1", 4]]],
        [1, 2, [["a", b"1", float("nan")]]],
        [1, 2, [["a", b"1", float("inf")]]],
    ],
)
def test_dictionary_value_of_another_shape_is_refused(content: object) -> None:
    with pytest.raises(TooDeep):
        MSGPackSerializer.loads(_dictionary(content))
