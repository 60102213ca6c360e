"""The programs of one machine: the command `swarm`, one peer as a process, local runs; and peers from Python.

:mod:`peers.api` has what this package offers, which is imported when it is first used: ``import peers`` alone loads
nothing.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peers.api import Peer, PeerFailed, Step, found, join, load, load_tokenizer
else:

    def __getattr__(name: str) -> object:
        if name in __all__:
            from peers import api

            return getattr(api, name)
        raise AttributeError(f"module 'peers' has no attribute {name!r}")


__all__ = ["Peer", "PeerFailed", "Step", "found", "join", "load", "load_tokenizer"]
