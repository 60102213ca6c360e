"""How long a fault of each kind may have others take a peer for lost: said once, for checkers and reports."""

from __future__ import annotations

from collections.abc import Mapping

ENDED_BY: Mapping[str, str] = {
    "pause": "resume",
    "partition": "heal",
    "disconnect": "reconnect",
    "fill_disk": "free_disk",
}
"""Which fault ends which, where that has no seconds."""
MARKS = frozenset((*ENDED_BY.values(), "moment"))
"""Lines of ``faults.jsonl`` that are no faults: they end one, or name a moment."""
SLOW = frozenset(("slow_link", "slow_links", "slow_device", "limit_cpu"))
"""Of links, of a device, or of all processors of a peer: no reason to be lost."""
HARMLESS = MARKS | SLOW
"""They excuse nobody."""
PASSING = frozenset(("skew_clock", "corrupt_bytes", "twin"))
"""A connection breaks, or a second process gives up: over as soon as it is done."""
REBORN = frozenset(("kill", "kill_daemon", "restart", "joiner_storm", "stop", "limit_memory", "upgrade", "start"))
"""Over once the peer is ready, or its daemon runs again."""
