"""What cannot be in the manifest's ``[averaging]`` together. Pure."""

from __future__ import annotations

from swarm.averaging.config import BY_PLACE, AveragingConfig
from swarm.errors import ConfigError


def check_averaging(averaging: AveragingConfig, *, reproducible: bool) -> None:
    """What holds between its keys, and between them and ``run.reproducible``. Raises ConfigError."""
    if reproducible and averaging.codec != "float32":
        raise ConfigError(
            "averaging.codec",
            averaging.codec,
            "float32 with run.reproducible = true: what is rounded on the way depends on who computed what",
            "Leave averaging.codec out, or set run.reproducible = false.",
        )
    if averaging.schedule not in ("auto", "direct") and (
        averaging.closing_strategy != "everyone" or averaging.codec != "float32"
    ):
        raise ConfigError(
            "averaging.schedule",
            averaging.schedule,
            "direct or auto, unless strategy = everyone and codec = float32: what is rounded at each hop must be "
            "rounded alike by all",
            "Leave averaging.schedule out, or the other two.",
        )
    _check_mode(averaging, reproducible=reproducible)


def _check_mode(averaging: AveragingConfig, *, reproducible: bool) -> None:
    """What is inexact, and what depends on who comes first, mixes weights only."""
    if averaging.mode == "local" and reproducible:
        raise ConfigError(
            "run.reproducible",
            True,
            'false where averaging.mode = "local": which replica computes what is in its weights',
            'Set it to false, or averaging.mode to "sync".',
        )
    if averaging.mode == "local" and averaging.strategy in BY_PLACE and averaging.local.sync_every > 1:
        raise ConfigError(
            "averaging.local.sync_every",
            averaging.local.sync_every,
            f"1 with averaging.strategy = {averaging.strategy}, with which all meet at once",
            "Set it to 1, or choose a strategy of groups that swap.",
        )
    if averaging.mode == "sync" and averaging.strategy in ("random", "push-sum"):
        raise ConfigError(
            "averaging.strategy",
            averaging.strategy,
            'exact in averaging.mode = "sync": everyone, grid, butterfly-groups, server or hierarchy',
            'Choose one of those, or averaging.mode = "local", where weights are mixed and not gradients.',
        )
