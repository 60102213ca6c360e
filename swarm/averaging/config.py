"""The manifest's ``[averaging]``."""

from __future__ import annotations

from typing import Literal

from swarm.schema import Section


class AveragingConfig(Section):
    """Who averages with whom, and how the numbers travel."""

    strategy: Literal["everyone", "grid", "butterfly-groups", "server", "hierarchy"] = "everyone"
    codec: Literal["float32"] = "float32"
