"""The guard before hivemind's decoder."""

from __future__ import annotations

import msgpack
import pytest
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils.serializer import MSGPackSerializer
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.network.discovery.directory import _REMEMBERED
from swarm.network.discovery.records import LONGEST_S
from swarm.network.libp2p import guard
from swarm.network.libp2p.guard import MAX_DEPTH, MAX_ENTRIES, TooDeep, check_nesting, install

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


@settings(max_examples=40)
@given(PLAIN)
def test_guard_walks_whatever_msgpack_writes(value: object) -> None:
    check_nesting(msgpack.packb(value), limit=40)


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


NOW = 4e9


@pytest.fixture
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("swarm.network.libp2p.guard", "hivemind.utils.timed_storage"):
        monkeypatch.setattr(f"{module}.get_dht_time", lambda: NOW)


@pytest.mark.usefixtures("_clock")
def test_store_takes_no_more_entries_than_a_value_may_have_and_renews_those_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard, "MAX_ENTRIES", 3)
    value = DictionaryDHTValue()
    assert [value.store(name, b"1", NOW + 30) for name in "abcd"] == [True, True, True, False]
    assert value.store("a", b"2", NOW + 40)
    assert not value.store("a", b"0", NOW + 35)
    assert dict(value.items())["a"].value == b"2"
    for module in ("swarm.network.libp2p.guard", "hivemind.utils.timed_storage"):
        monkeypatch.setattr(f"{module}.get_dht_time", lambda: NOW + 35)
    assert value.store("d", b"1", NOW + 50), "others have expired"


@pytest.mark.usefixtures("_clock")
def test_store_takes_no_more_bytes_than_an_answer_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MAX_HELD_BYTES", 400)
    value = DictionaryDHTValue()
    assert [value.store(name, b"x" * 100, NOW + 30) for name in "abcd"] == [True, True, True, False]
    assert value.store("d", b"", NOW + 20) is False
    assert value.store("a", b"x" * 60, NOW + 40), "shorter than it was"
    assert value.store("d", b"", NOW + 20)
    assert not value.store("a", b"x" * 100, NOW + 50)


@pytest.mark.usefixtures("_clock")
def test_store_replaces_what_lives_longer_than_anybody_believes() -> None:
    value = DictionaryDHTValue()
    assert value.store("a", b"old", NOW + LONGEST_S + 1)
    assert value.store("a", b"new", NOW + LONGEST_S)
    assert not value.store("a", b"older", NOW + LONGEST_S - 1)
    assert [(key, entry.value) for key, entry in value.items()] == [("a", b"new")]


def test_all_signatures_of_a_full_value_are_remembered_from_one_look_to_the_next() -> None:
    assert 4 * MAX_ENTRIES <= _REMEMBERED


def test_dictionary_value_with_too_many_entries_is_refused() -> None:
    entries = [[f"{number}", b"", NOW] for number in range(MAX_ENTRIES + 1)]
    assert len(MSGPackSerializer.loads(_dictionary([1, 5.0, entries[1:]]))) == MAX_ENTRIES
    with pytest.raises(TooDeep, match="entries"):
        MSGPackSerializer.loads(_dictionary([1, 5.0, entries]))
