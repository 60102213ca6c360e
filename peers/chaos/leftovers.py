"""Remove what plays leave with an engine: one's own at its end, that of a play that was killed by the next one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator

from peers.chaos.engine import CALL_S, OWNER, PLAY, Engine, EngineError, is_dead, is_of_another_boot

GONE_S = 30.0
"""How long what a play has made may refuse to go: others may hold it for a moment, or be removing it."""
SWEPT_S = 3.0
"""The same of what dead plays have left; what stays then, a later play removes."""
PAUSE_S = 0.2
_REMOVE_NETWORK = ("network", "rm")
_ON_IT = "{{range .Containers}}{{.Name}} {{end}}"
_KINDS = (
    (("ps", "--all", "--quiet"), ("rm", "--force", "--volumes")),
    (("network", "ls", "--quiet"), _REMOVE_NETWORK),
    (("volume", "ls", "--quiet"), ("volume", "rm", "--force")),
)
_never = threading.Event()


def remove_all(engine: Engine) -> None:
    """Containers, networks and volumes of this play, in whatever state they are. Idempotent. Raises EngineError for
    what is still there after :data:`GONE_S`. Blocks."""
    if stays := remove(engine, {engine.play}, GONE_S):
        raise EngineError(f"{'; '.join(stays)}. The next play tries again")


def sweep(engine: Engine) -> list[str]:
    """Remove what plays have left whose owner is dead; returns what is said against what stays, which is in nobody's
    way. Blocks."""
    try:
        return remove(engine, _dead(engine), SWEPT_S)
    except EngineError as error:
        return [str(error)]


def remove(engine: Engine, plays: Iterable[str], within_s: float) -> list[str]:
    """Remove everything with the labels of these plays. Somebody else may be removing the same: what counts is that
    nothing is listed any more. Returns what the engine says against what is, after so many seconds; each is tried once
    in any case. Blocks."""
    ends = time.monotonic() + within_s
    said = []
    for play in sorted(plays):
        for listing, removal in _KINDS:
            if words := _removed(engine, (*listing, "--filter", f"label={PLAY}={play}"), removal, ends):
                said.append(f"some of play {play} could not be removed: {words}")
    return said


def _removed(engine: Engine, listing: tuple[str, ...], removal: tuple[str, ...], ends: float) -> str:
    """Return the engine's last error; "" once nothing is listed."""
    words, names = "", []
    while True:
        try:
            names = engine.call(*listing).split()
            if not names:
                return ""
            if words and time.monotonic() >= ends:
                return words
            words = f"{' '.join(names)} is still there"
            engine.call(*removal, *names, timeout_s=2 * CALL_S)
        except EngineError as error:
            words = str(error)
            if time.monotonic() >= ends:
                return words
            if removal == _REMOVE_NETWORK:
                detach(engine, names)
            _never.wait(PAUSE_S)


def detach(engine: Engine, networks: Iterable[str]) -> None:
    """Take everybody off these. The engine may keep the endpoint of a container that is gone, and refuses for ever to
    remove the network then. What cannot be taken off is met again by anyone who removes."""
    for network in networks:
        with contextlib.suppress(EngineError):
            for name in engine.call("network", "inspect", "--format", _ON_IT, network).split():
                engine.call("network", "disconnect", "--force", network, name)


def _dead(engine: Engine) -> set[str]:
    """Plays whose owner is dead. One that was of another boot is so once nothing of it runs: a copied machine may use
    the same engine."""
    listed = set(_labelled(engine))
    dead = {play for play, who in listed if is_dead(who)}
    if old := {play for play, who in listed if is_of_another_boot(who)}:
        running = engine.call("ps", "--filter", f"label={PLAY}", "--format", f'{{{{.Label "{PLAY}"}}}}').split()
        dead |= old - set(running)
    return dead


def _labelled(engine: Engine) -> Iterator[tuple[str, str]]:
    by = ("--filter", f"label={PLAY}", "--format", f'{{{{.Label "{PLAY}"}}}} {{{{.Label "{OWNER}"}}}}')
    for command in (("ps", "--all"), ("network", "ls"), ("volume", "ls")):
        for line in engine.call(*command, *by).splitlines():
            play, _, who = line.partition(" ")
            yield play, who
