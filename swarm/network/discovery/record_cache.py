"""What one node of the directory keeps of others, where not everybody may announce: :class:`RecordCache`.

Who may announce is asked before anything is decoded or verified, as far as the owner's name and the record's bytes
tell. Nobody in the middle decides it: each node asks what it knows of the run itself. Because two nodes may know
different records, some room is left for owners that this one does not know (yet); they give way to those it knows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from swarm.errors import Violation
from swarm.ids import PeerId
from swarm.network.discovery.records import PeerRecord, decode_record, opened, unwrap
from swarm.network.libp2p.lean import spare_init
from swarm.security.credentials import Credential

spare_init()
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
    from hivemind.utils.serializer import MSGPackSerializer
    from hivemind.utils.timed_storage import get_dht_time

MAX_UNATTESTED = 64
"""Entries under one key of owners that are not known to be of the run: who was admitted a moment ago, as another node
knows already."""
MAX_LOOKED_AT = 512
"""Credentials that are looked at in one dictionary that another node tells: 0.25 ms each."""
SHOWS_ONE = b"credential"
"""In the bytes of every record that has a credential: it is the key's name."""

Attests = Callable[[PeerId, Credential | None], bool]
"""Whether what a peer says of itself counts, if it shows this. Without a credential it must answer at once; with one
it may verify a signature that it has not seen before."""


class RecordCache(DHTLocalStorage):  # type: ignore[misc]
    """The storage of one node. Until :meth:`admit` everybody's records are kept, as far as there is room."""

    def __init__(self) -> None:
        super().__init__()
        self._attests: Attests | None = None
        self._unattested: dict[DHTID, set[str]] = {}

    def admit(self, attests: Attests) -> None:
        """Ask this from now on. What was taken before counts as nobody's until it is renewed, unless its owner is
        known."""
        self._attests = attests
        for key, (held, _) in self.items():
            if isinstance(held, DictionaryDHTValue):
                self._unattested[key] = {owner for owner, _ in held.items() if not attests(PeerId(owner), None)}

    def refuses(self, key: bytes, subkey: bytes, value: bytes) -> bool:
        """Return whether a record is not even looked at: its owner is not known, it shows nothing, and there is no room
        for such ones. Decodes nothing but the owner's name, of 80 bytes at most."""
        if self._attests is None:
            return False
        try:
            owner = MSGPackSerializer.loads(subkey) if len(subkey) <= 80 else None
        except ValueError:
            return True
        if not isinstance(owner, str):
            return True
        if SHOWS_ONE in value or self._attests(PeerId(owner), None):
            return False
        return not self._has_room(DHTID.from_bytes(key), owner)

    def sift(self, dictionary: Any) -> None:
        """Take out of a dictionary that another node tells what is not of the run: one entry that is wrong costs all
        the others, and those of nobody would take the place of theirs."""
        if self._attests is None:
            return
        left = MAX_LOOKED_AT
        with dictionary.freeze():
            for owner, (value, _) in list(dictionary.items()):
                if isinstance(owner, str) and self._attests(PeerId(owner), None):
                    continue
                shows = isinstance(owner, str) and SHOWS_ONE in value and left > 0
                left -= shows
                if not shows or not self._attested(owner, value):
                    del dictionary[owner]

    def store_subkey(self, key: DHTID, subkey: str, value: bytes, expiration_time: float) -> bool:
        """Keep an entry that the validator found right. See hivemind's."""
        if self._attests is None:
            return bool(super().store_subkey(key, subkey, value, expiration_time))
        unattested = self._unattested.setdefault(key, set())
        if not self._attested(subkey, value):
            if not self._has_room(key, subkey) or not super().store_subkey(key, subkey, value, expiration_time):
                return False
            unattested.add(subkey)
            return True
        stored = super().store_subkey(key, subkey, value, expiration_time)
        held = self._dictionary(key)
        refused = not stored and held is not None and subkey not in held
        if refused and unattested and expiration_time > get_dht_time():  # it is full, and has whom to send away
            for owner in unattested:
                del held[owner]
            unattested.clear()
            stored = super().store_subkey(key, subkey, value, expiration_time)
        if stored:
            unattested.discard(subkey)
        return bool(stored)

    def _has_room(self, key: DHTID, owner: str) -> bool:
        """For one whom nobody attests: renewed is what is there, as long as its owner was not of the run."""
        unattested, held = self._unattested.get(key, set()), self._dictionary(key)
        if held is None:
            unattested.clear()
            return True
        if owner in held:
            return owner in unattested
        if len(unattested) >= MAX_UNATTESTED:
            unattested.intersection_update({each for each in unattested if each in held})
        return len(unattested) < MAX_UNATTESTED

    def _dictionary(self, key: DHTID) -> Any:
        found = self.get(key)
        return found.value if found is not None and isinstance(found.value, DictionaryDHTValue) else None

    def _attested(self, owner: str, value: bytes) -> bool:
        assert self._attests is not None  # noqa: S101 - asked only then
        if self._attests(PeerId(owner), None):
            return True
        if SHOWS_ONE not in value:
            return False
        try:
            shown = decode_record(PeerRecord, unwrap(opened(value))).credential
        except Violation:
            return False
        return shown is not None and self._attests(PeerId(owner), shown)


def with_cache(protocol: Any) -> RecordCache:
    """Give a node's protocol a cache in the place of its storage, and have it ask that first of what others send."""
    cache = protocol.storage = RecordCache()
    validate, validate_all = protocol._validate_record, protocol._validate_dictionary

    def validate_record(key: bytes, subkey: bytes, value: bytes, expiration_time: float) -> bool:
        return not cache.refuses(key, subkey, value) and bool(validate(key, subkey, value, expiration_time))

    def validate_dictionary(key: bytes, dictionary: Any) -> bool:
        cache.sift(dictionary)
        return bool(validate_all(key, dictionary))

    protocol._validate_record, protocol._validate_dictionary = validate_record, validate_dictionary
    return cache
