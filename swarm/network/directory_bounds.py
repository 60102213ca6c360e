"""What the directory's questions and answers may be, and how large: a look at a message before hivemind, which builds
something for everything it holds, has it. Knows the fields of hivemind's messages by their names only."""

from __future__ import annotations

from typing import Any, Final

MAX_KEYS: Final = 16
"""Keys in one question. We look up and store one at a time; who meets a new node hands it all that it holds, which is
one key for each kind of record in the run."""

MAX_NEIGHBOURS: Final = 64
"""Nodes that one answer names for one key; hivemind names 20."""

MAX_ID_BYTES: Final = 64
"""One peer's or node's id. Ours have 38 and 20 bytes, the longest of libp2p's 42; base58 takes the square of this."""


def check_question(asked: Any) -> None:
    """Look at what another peer asks. Raises ValueError, which hivemind answers with an error."""
    keys = getattr(asked, "keys", ())
    if len(keys) > MAX_KEYS:
        raise ValueError(f"a question about {len(keys)} keys, more than {MAX_KEYS}")
    if len(set(keys)) < len(keys):
        raise ValueError("a question about one key twice")
    if any(getattr(asked, "in_cache", ())):  # none of us does; what is cached is answered before what is stored
        raise ValueError("a question to keep something in the cache")


def check_answer(asked: Any, answer: Any) -> None:
    """Look at what another peer answers. Raises ValueError, which hivemind takes for a call that failed."""
    results = getattr(answer, "results", ())
    if len(results) > len(getattr(asked, "keys", ())):
        raise ValueError(f"{len(results)} results, more than were asked for")
    for result in results:
        for ids in (result.nearest_node_ids, result.nearest_peer_ids):
            if len(ids) > MAX_NEIGHBOURS:
                raise ValueError(f"{len(ids)} neighbours of one key, more than {MAX_NEIGHBOURS}")
            check_ids(*ids)


def check_ids(*ids: bytes) -> None:
    """Look at ids of peers or nodes. Raises ValueError for one that is longer than any."""
    longest = max(map(len, ids), default=0)
    if longest > MAX_ID_BYTES:
        raise ValueError(f"an id of {longest} bytes, more than {MAX_ID_BYTES}")
