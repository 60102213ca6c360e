"""The manifest's ``[averaging]``."""

from __future__ import annotations

from typing import Literal

from swarm.averaging.wire import WireCodec
from swarm.schema import Section


class AveragingConfig(Section):
    """Who averages with whom, and how the numbers travel: as they are, or (``int8``) rounded to 8 bits on the way to
    the reducer and on the way back, for a quarter of the bytes; every replica gets the same bits either way.
    ``schedule`` is the way that sums travel; ``auto`` chooses it in each step from what was measured of the links, so
    that with float32 sums, which trees round at each hop, two runs of one manifest may differ in the last bit."""

    strategy: Literal["everyone", "grid", "butterfly-groups"] = "everyone"
    codec: WireCodec = "float32"
    schedule: Literal["auto", "direct", "ring", "tree", "halving", "butterfly"] = "direct"
