"""The manifest's ``[averaging]``: its keys, and the combinations of them that are refused."""

from __future__ import annotations

import operator
from typing import Annotated, Literal

from pydantic import Field

from swarm.compression.names import FED_BACK, AveragingCodec
from swarm.errors import ConfigError
from swarm.schema import Section

StrategyName = Literal["everyone", "grid", "butterfly-groups", "server", "hierarchy", "random", "push-sum"]


BY_PLACE = ("server", "hierarchy")
"""Strategies that bring all together by where they are, in `local` too."""


IN_ONE_ROUND = ("everyone", "server")
"""Strategies in which each replica's own sum goes straight to who adds it up."""


GRACE, MAY_MISS = 0.1, 3
"""What a manifest has that says nothing of who is late: not written then, so that the ids of earlier runs stay."""


class LocalConfig(Section):
    """``[averaging.local]``, of ``mode = "local"``: DiLoCo (arXiv 2311.08105), in fragments Streaming DiLoCo (arXiv
    2501.18512). :mod:`swarm.step.lateness` says who is late for a close."""

    steps: Annotated[int, Field(ge=1, le=1000)] = 8
    """Optimizer steps between two mixings, each for a batch of all replicas together."""
    sync_every: Annotated[int, Field(ge=1, le=100)] = 1
    """Mixings until all replicas synchronise and a step closes."""
    staleness: Annotated[int, Field(ge=1, le=100)] = 1
    """Largest age, in mixings, of another replica's version that is mixed in."""
    outer_lr: Annotated[float, Field(gt=0, le=2)] = 0.7
    """Rate of the outer Nesterov optimizer; 1 with ``outer_momentum`` 0 is plain averaging."""
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of the outer optimizer."""
    fragments: Annotated[int, Field(ge=1, le=64)] = 1
    """Fragments of the weights, of which each close averages one in turn, for as many times fewer bytes."""
    mixing_weight: Annotated[float, Field(ge=0.1, le=1)] = 1.0
    """Share of the new weights in what a replica goes on from, of what was averaged; the rest is its own."""
    quorum: Annotated[float, Field(ge=0.5, le=1, exclude_if=lambda value: value == 1.0)] = 1.0
    """Share of each stage's replicas that a close needs; who is late is averaged later."""
    grace: Annotated[float, Field(gt=0, le=1, exclude_if=lambda value: value == GRACE)] = GRACE
    """The longest that a close waits for the others once it has its quorum, as a share of the step's time."""
    may_miss: Annotated[int, Field(ge=1, le=8, exclude_if=lambda value: value == MAY_MISS)] = MAY_MISS
    """Closes in a row that a replica may miss before it is waited for."""


class AveragingConfig(Section):
    """``[averaging]``: the strategy, the averaged values, and their encoding and routes.

    With ``schedule`` ``auto`` and float32 sums, which trees round at each hop, two runs of one manifest may differ in
    the last bit.
    """

    mode: Literal["sync", "local"] = "sync"
    """``sync``: average the gradients of each batch; ``local``: average the weights of replicas that take optimizer
    steps of their own."""
    strategy: StrategyName = "everyone"
    """Groups of replicas; in ``local`` it says who mixes with whom between two synchronisations, which are of all."""
    codec: AveragingCodec = "float32"
    """Encoding of what is averaged: ``int8`` takes a quarter of the bytes, ``int4h`` an eighth, where each replica adds
    what was rounded off to its next contribution."""
    schedule: Literal["auto", "direct", "ring", "tree", "halving", "butterfly"] = "direct"
    """Route of sums: ``direct``, along trees, or ``auto``, the fastest over the measured links."""
    guard: Annotated[Literal["none", "leave-out"], Field(exclude_if=lambda value: value == "none")] = "none"
    """``leave-out``: a replica's sum that is far from the others' is left out of the mean, where three or more
    contribute."""
    check: Annotated[float, Field(ge=0, le=1, exclude_if=operator.not_)] = 0.0
    """Share of the means of others that each replica computes again, where three or more average; 0: none."""
    local: LocalConfig = LocalConfig()

    @property
    def inner_steps(self) -> int:
        """Batches between two closes."""
        return self.local.steps * self.local.sync_every if self.mode == "local" else 1

    @property
    def described(self) -> str:
        """The subjects and times of averaging, in words for people."""
        if self.mode == "sync":
            return f"the gradients of every step, {self.strategy}"
        local = self.local
        if local.sync_every == 1:
            which = "weights" if local.fragments == 1 else f"one of {local.fragments} fragments of the weights in turn"
            return f"{which}, after every {local.steps} batches trained apart"
        every = f"weights of replicas that train apart, mixed by {self.strategy} every {local.steps} batches"
        return f"{every}; of all after every {local.sync_every} times"

    @property
    def feeds_back(self) -> bool:
        """Return whether replicas add what is rounded off to what they contribute next."""
        return self.codec in FED_BACK

    @property
    def closing_strategy(self) -> str:
        """The strategy with which replicas average when a step closes."""
        return "everyone" if self.mode == "local" and self.strategy not in BY_PLACE else self.strategy


# --- checks between keys (pure) --------------------------------------------------------------------------------------


def check_averaging(averaging: AveragingConfig, *, reproducible: bool) -> None:
    """Check the relations between its keys, and between them and ``run.reproducible``. Raises ConfigError."""
    if reproducible and averaging.codec != "float32":
        raise ConfigError(
            "averaging.codec",
            averaging.codec,
            "float32 with run.reproducible = true: rounding on the way depends on which replica computed what",
            "Leave averaging.codec out, or set run.reproducible = false.",
        )
    if averaging.schedule not in ("auto", "direct") and (
        averaging.closing_strategy != "everyone" or averaging.codec != "float32"
    ):
        raise ConfigError(
            "averaging.schedule",
            averaging.schedule,
            "direct or auto, unless strategy = everyone and codec = float32: all members must round alike at each hop",
            "Leave averaging.schedule out, or the other two.",
        )
    if averaging.guard != "none":
        _check_guard(averaging, reproducible=reproducible)
    if averaging.check:
        _check_checked(averaging)
    if averaging.mode == "local":
        _check_fragments(averaging)
        _check_quorum(averaging)
    else:
        _check_unread(averaging)
    if averaging.feeds_back:
        _check_feedback(averaging)
    _check_mode(averaging, reproducible=reproducible)


def _check_guard(averaging: AveragingConfig, *, reproducible: bool) -> None:
    """Refuse where a mean may not leave a sum out, or where sums of several replicas travel as one."""
    for key, value, wanted, why in (
        ("run.reproducible", reproducible, False, "the bits would depend on which replica computed what"),
        ("averaging.mode", averaging.mode, "sync", "replicas that train apart are far from each other by design"),
        ("averaging.strategy", averaging.strategy, "everyone", "the others add up sums of several replicas"),
        ("averaging.schedule", averaging.schedule, "direct", "along trees sums of several replicas travel as one"),
        ("averaging.codec", averaging.codec, "float32", "what a replica is owed would be lost with a sum left out"),
    ):
        if value != wanted and not (key == "averaging.codec" and not averaging.feeds_back):
            said = str(wanted).lower() if isinstance(wanted, bool) else f'"{wanted}"'
            raise ConfigError(
                key,
                value,
                f'{said} with averaging.guard = "{averaging.guard}"',
                f"Set {key} to {said}, or leave averaging.guard out.",
                why=why,
            )


def _check_checked(averaging: AveragingConfig) -> None:
    """Refuse where sums of several replicas travel as one, so that nobody could ask for those of each."""
    for key, value, wanted in (
        ("averaging.mode", averaging.mode, "sync"),
        ("averaging.strategy", averaging.strategy, "everyone"),
        ("averaging.schedule", averaging.schedule, "direct"),
    ):
        if value != wanted:
            raise ConfigError(
                key,
                value,
                f'"{wanted}" with averaging.check = {averaging.check:g}',
                f'Set {key} to "{wanted}", or leave averaging.check out.',
                why="else a mean is not of one sum of each replica, added up by one of them",
            )


def _check_fragments(averaging: AveragingConfig) -> None:
    """Refuse what would average other weights beside the fragment whose turn it is. Raises ConfigError."""
    local = averaging.local
    if local.mixing_weight < 1.0 < local.outer_lr:
        raise ConfigError(
            "averaging.local.outer_lr",
            local.outer_lr,
            f"at most 1 with averaging.local.mixing_weight = {local.mixing_weight:g}",
            "Lower it, or leave averaging.local.mixing_weight out.",
            why="replicas that keep a share of their own weights follow so fast an anchor by swinging around it",
        )
    key = "fragments" if local.fragments > 1 else "mixing_weight"
    apart = local.fragments > 1 or local.mixing_weight < 1.0
    if apart and local.sync_every > 1:
        raise ConfigError(
            f"averaging.local.{key}",
            getattr(local, key),
            f"1 with averaging.local.sync_every = {local.sync_every}",
            f"Leave averaging.local.{key} out, or set averaging.local.sync_every to 1.",
            why="mixing in between sends whole weights, and expects replicas to begin each step at the same ones",
        )
    if local.fragments > 1 and averaging.feeds_back:
        raise ConfigError(
            "averaging.codec",
            averaging.codec,
            "float32 or int8 with averaging.local.fragments: what is rounded off one fragment is none of the next one",
            'Set it to "int8", or leave averaging.local.fragments out.',
        )
    if local.mixing_weight < 1.0 and averaging.feeds_back:
        raise ConfigError(
            "averaging.codec",
            averaging.codec,
            "float32 or int8 with averaging.local.mixing_weight below 1",
            'Set it to "int8", or leave averaging.local.mixing_weight out.',
            why="some of what is rounded off stays in a replica's own weights, and would be added twice",
        )


def _check_quorum(averaging: AveragingConfig) -> None:
    """Refuse a quorum where replicas mix between two closes, or sums go through several of them. Raises ConfigError."""
    local = averaging.local
    if local.quorum < 1.0 and (local.sync_every > 1 or averaging.strategy in BY_PLACE):
        key = "averaging.local.sync_every" if local.sync_every > 1 else "averaging.strategy"
        raise ConfigError(
            key,
            local.sync_every if local.sync_every > 1 else averaging.strategy,
            f"{'1' if local.sync_every > 1 else 'everyone'} with averaging.local.quorum = {local.quorum:g}",
            f"Leave {key} out, or averaging.local.quorum.",
            why="who is late goes on from other weights than those that mix, or may be one whom others need",
        )


def _check_unread(averaging: AveragingConfig) -> None:
    """Refuse what only replicas that train apart read. Raises ConfigError."""
    for key, standard in LocalConfig():
        if (value := getattr(averaging.local, key)) != standard:
            raise ConfigError(
                f"averaging.local.{key}",
                value,
                f'nothing with averaging.mode = "{averaging.mode}", in which replicas do not train apart',
                'Set averaging.mode to "local", or leave [averaging.local] out.',
            )


def _check_feedback(averaging: AveragingConfig) -> None:
    """Refuse where nobody can add to its next contribution what was rounded off. Raises ConfigError. In `local` mode
    only the closes are encoded, whose deltas are sums like any other; what is mixed in between is float32."""
    if averaging.closing_strategy not in IN_ONE_ROUND:
        raise ConfigError(
            "averaging.codec",
            averaging.codec,
            f"float32 or int8 with averaging.strategy = {averaging.strategy}: in several rounds it would round sums of"
            " several replicas, and what it rounds off belongs to none of them",
            'Set it to "int8", or averaging.strategy to "everyone" or "server".',
        )


def _check_mode(averaging: AveragingConfig, *, reproducible: bool) -> None:
    """Refuse modes and strategies whose results are inexact, or depend on the order of arrival, except for mixing
    weights."""
    if averaging.mode == "local" and reproducible:
        raise ConfigError(
            "run.reproducible",
            True,
            'false with averaging.mode = "local": the weights depend on which replica computed what',
            'Set it to false, or averaging.mode to "sync".',
        )
    if averaging.mode == "local" and averaging.strategy in BY_PLACE and averaging.local.sync_every > 1:
        raise ConfigError(
            "averaging.local.sync_every",
            averaging.local.sync_every,
            f"1 with averaging.strategy = {averaging.strategy}, which synchronises all replicas every time",
            "Set it to 1, or choose a strategy whose groups swap.",
        )
    if averaging.mode == "sync" and averaging.strategy in ("random", "push-sum"):
        raise ConfigError(
            "averaging.strategy",
            averaging.strategy,
            'exact in averaging.mode = "sync": everyone, grid, butterfly-groups, server or hierarchy',
            'Choose one of those, or averaging.mode = "local", which mixes weights instead of gradients.',
        )
