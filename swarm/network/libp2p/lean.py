"""hivemind without its own ``__init__``, which imports all of it: averaging, mixtures of experts, scipy and more.

We use its daemon client and its DHT node, whose packages import by themselves: half a second less to start a peer, and
some 45 MB less for as long as it lives.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types


def spare_init(name: str = "hivemind") -> None:
    """Let the package be found and its ``__init__`` be skipped, from now on; nothing when it was imported already, or
    is not installed (then importing it says so)."""
    spec = None if name in sys.modules else importlib.machinery.PathFinder.find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        return
    package = types.ModuleType(name)
    package.__spec__, package.__file__ = spec, spec.origin
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules[name] = package
