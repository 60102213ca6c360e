"""A guard in front of hivemind's msgpack decoder, which every directory message passes before any validator sees it,
and of its store, which takes all that a validator lets through.

Nested extension values make that decoder recurse in C until the process dies; a dictionary value may name its own
capacity, which then applies to what honest peers stored; a store without bounds grows until no answer has room for
what one key holds. All are closed here, once per process, by replacing ``MSGPackSerializer.loads``,
``DictionaryDHTValue.unpackb`` and ``DictionaryDHTValue.store``.
"""

from __future__ import annotations

import math
import struct
import warnings
from typing import Any, Final

from swarm.network.discovery.records import LONGEST_S
from swarm.network.libp2p.lean import spare_init

spare_init()
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.utils.serializer import MSGPackSerializer
    from hivemind.utils.timed_storage import get_dht_time

MAX_VALUE_BYTES: Final = 4 << 20
"""The daemon's own limit of one message."""

MAX_DEPTH: Final = 12
"""An honest dictionary of records has depth 4: extension, list, items, item."""

MAX_ENTRIES: Final = 2560
"""Peers in one directory value: a run has 1,687 members at most, which is what a step's record has room for. All are
looked at whenever the value is read, and who may announce is anybody."""

MAX_HELD_BYTES: Final = MAX_VALUE_BYTES * 7 // 8
"""What one key's entries may take, so that they fit into one answer."""

_ENTRY_BYTES: Final = 32
"""What an entry takes beside its owner and its value."""

MAX_ELEMENTS: Final = 8 * MAX_ENTRIES
"""A dictionary entry has four. Without a limit one message of 4 MiB of nothing would hold the loop up for a second."""

_original_loads = MSGPackSerializer.__dict__["loads"].__func__
_original_unpackb = DictionaryDHTValue.__dict__["unpackb"].__func__
_original_store = DictionaryDHTValue.store


class TooDeep(ValueError):
    """A message that no honest peer sends. hivemind reports it as a failed call."""


def install() -> None:
    """Guard this process. Idempotent."""
    if MSGPackSerializer.loads.__func__ is not _guarded_loads:
        MSGPackSerializer.loads = classmethod(_guarded_loads)
        DictionaryDHTValue.unpackb = classmethod(_strict_unpackb)
        DictionaryDHTValue.store = _bounded_store


def check_nesting(data: bytes | memoryview, limit: int = MAX_DEPTH) -> None:
    """Walk msgpack bytes without building anything. Raises TooDeep when arrays, maps and extension values together nest
    deeper than ``limit`` or hold more than MAX_ELEMENTS, or when the bytes are no msgpack. Cost: one step per element,
    about 0.5 µs."""
    view = memoryview(data)
    remaining = [1]  # elements still to read, per open container
    position = announced = 0
    while remaining:
        if remaining[-1] == 0:
            remaining.pop()
            continue
        remaining[-1] -= 1
        try:
            position, children = _element(view, position)
        except (IndexError, struct.error) as error:
            raise TooDeep("truncated msgpack") from error
        if position > len(view):
            raise TooDeep("truncated msgpack")
        if children:
            announced += children
            if announced > MAX_ELEMENTS:
                raise TooDeep(f"msgpack of more than {MAX_ELEMENTS} elements")
            remaining.append(children)
            if len(remaining) - 1 > limit:
                raise TooDeep(f"msgpack nested deeper than {limit}")


_FIXED: Final = {
    0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
}  # fmt: skip
_SIZED: Final = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_COUNTED: Final = {0xDC: (">H", 1), 0xDD: (">I", 1), 0xDE: (">H", 2), 0xDF: (">I", 2)}
_EXTENSION: Final = {0xC7: ">B", 0xC8: ">H", 0xC9: ">I"}
_FIXED_EXTENSION: Final = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


def _element(view: memoryview, position: int) -> tuple[int, int]:
    """Return the offset of the next element, and the number of elements in this one.

    An extension's content is decoded in turn by hivemind's hook, so it counts as a container whose elements lie in
    line.
    """
    code = view[position]
    position += 1
    if code < 0x80 or code >= 0xE0:
        return position, 0
    if code < 0xC0:
        if code < 0x90:
            return position, 2 * (code & 0x0F)
        return (position, code & 0x0F) if code < 0xA0 else (position + (code & 0x1F), 0)
    if code in _FIXED:
        return position + _FIXED[code], 0
    if code in _SIZED:
        (size,) = struct.unpack_from(_SIZED[code], view, position)
        return position + struct.calcsize(_SIZED[code]) + size, 0
    if code in _COUNTED:
        kind, width = _COUNTED[code]
        (count,) = struct.unpack_from(kind, view, position)
        return position + struct.calcsize(kind), count * width
    if code in _FIXED_EXTENSION or code in _EXTENSION:
        return position + (struct.calcsize(_EXTENSION[code]) if code in _EXTENSION else 0) + 1, 1
    raise TooDeep(f"byte {code:#x} is no msgpack")


def _guarded_loads(cls: Any, buf: bytes) -> object:
    if len(buf) > MAX_VALUE_BYTES:
        raise TooDeep(f"a value of {len(buf)} bytes")
    check_nesting(buf)
    return _original_loads(cls, buf)


def _strict_unpackb(cls: Any, raw: bytes) -> Any:
    """A dictionary value whose capacity is ours and whose entries have the types that the storage compares."""
    content = MSGPackSerializer.loads(raw)
    if not isinstance(content, list) or len(content) != 3 or not isinstance(content[2], list):
        raise TooDeep("malformed dictionary value")
    if len(content[2]) > MAX_ENTRIES:
        raise TooDeep(f"a dictionary value with {len(content[2])} entries")
    with DictionaryDHTValue().freeze() as value:
        for entry in content[2]:
            if not isinstance(entry, list) or [type(part) for part in entry] != [str, bytes, float]:
                raise TooDeep("malformed dictionary entry")
            if not math.isfinite(entry[2]):
                raise TooDeep("an expiry that is no date")
            _original_store(value, *entry)
    return value


def _bounded_store(self: Any, key: Any, value: Any, expiration_time: float) -> bool:
    """hivemind's, for as many entries as there is room for: those that are there are renewed, no more are taken.

    What lives longer than any validator believes gives way: it was stored before our clock was set back, and would keep
    its owner's newer entries out for as long as that was.
    """
    held = self.get(key)
    if held is not None and held.expiration_time > get_dht_time() + LONGEST_S:
        del self[key]
        held = None
    if held is not None and held.expiration_time >= expiration_time:
        return False
    if held is None and len(self) >= MAX_ENTRIES:
        return False
    more = _entry_bytes(key, value) - (0 if held is None else _entry_bytes(key, held.value))
    total = getattr(self, "held_bytes", MAX_HELD_BYTES) + more
    if total > MAX_HELD_BYTES:  # what has expired since the last look is still counted there
        total = sum(_entry_bytes(each, entry.value) for each, entry in self.items()) + more
        if total > MAX_HELD_BYTES:
            return False
    taken = bool(_original_store(self, key, value, expiration_time))
    if taken:
        self.held_bytes = total
    return taken


def _entry_bytes(key: Any, value: bytes) -> int:
    return len(key) + len(value) + _ENTRY_BYTES
