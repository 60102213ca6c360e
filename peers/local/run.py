"""Run the peers of one local run, from the first process to the last closed step; name who is to blame if it breaks."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.console.interrupt import check
from peers.exit_codes import EXIT_UNREACHABLE
from peers.home.run_directory import RunDirectory
from peers.local.launch import PeerExit, PeerGroup
from peers.local.progress import ExitNotice, RunView
from peers.options.model import PeerOptions
from peers.settings import PeerSettings, exact_settings
from swarm.clock import Clock
from swarm.config import Manifest
from swarm.errors import SwarmError
from swarm.events import LoopLag
from swarm.monitoring.reader import EventTail

BOOTSTRAP = "bootstrap"
POLL_S = 0.1
SILENCE_S = 300.0
"""No news of any peer for so long (its event loop's own pulse is none) means that the run hangs. Steps of a local run
take seconds, on a machine with much else to do a minute."""

BLAME_S = 0.5
"""How long to listen after the first bad end before naming one: the peer that caused it may be told of second."""

CHECKPOINTS_PER_RUN = 5
LOCAL = PeerOptions(listen=("/ip4/127.0.0.1/tcp/0",), grace=0.0)
"""What is said of every peer of a local run."""


class RunBroken(SwarmError):
    """A peer of the local run failed, or the run hangs; everything is to be stopped. ``peer`` is the one to blame."""

    exit_code = EXIT_UNREACHABLE

    def __init__(self, message: str, peer: str | None = None) -> None:
        super().__init__(message)
        self.peer = peer


def peer_names(manifest: Manifest) -> tuple[str, ...]:
    """All peers of a run: the bootstrap, ``stage-<stage>-<replica>``, ``trainer-<n>``."""
    stages, start = manifest.split.stages, manifest.run.start_when
    hosts = (f"stage-{host % stages}-{host // stages + 1}" for host in range(start.stage_hosts))
    return (BOOTSTRAP, *hosts, *(f"trainer-{trainer}" for trainer in range(start.trainers)))


@dataclass(slots=True, kw_only=True)
class LocalRun:
    """The shared objects of one run's loop. ``on_change`` is called after every look at the events; ``reports`` are the
    options ``report_to`` and ``report_dir`` of the one peer that reports; the run begins with the weights in
    ``model_files``, and is over at ``ends`` on the wall clock if not before."""

    manifest: Manifest
    directory: RunDirectory
    device: str
    group: PeerGroup
    tail: EventTail
    view: RunView
    clock: Clock
    on_change: Callable[[], None]
    model_files: Path | None = None
    reports: Mapping[str, Any] = field(default_factory=dict)
    ends: float | None = None
    _casualties: list[PeerExit] = field(default_factory=list)

    def train(self) -> None:
        """Start all peers and wait until the last step is closed and every peer that is left has ended well, or until
        the time is up.

        Raises RunBroken naming the peer to blame when those that are left cannot go on, StateError when the fork server
        fails, Interrupted. Stops nothing.
        """
        self.group.start(self._bootstrap())
        self._until(lambda: bool(self.view.addresses.get(BOOTSTRAP)), "the bootstrap's address")
        others = self._others(self.view.addresses[BOOTSTRAP])
        for settings in others:
            self.group.start(settings)
        self._until(lambda: self._closed or self.time_is_up, "the last step")
        self._until(lambda: not self.group.running or self.time_is_up, f"{', '.join(self.group.running)} to end")

    @property
    def time_is_up(self) -> bool:
        """Return whether the run ends with the steps that it has. Not before there are trained weights to be kept."""
        late = self.ends is not None and self.clock.wall() > self.ends
        return late and (self._closed or any(self.view.checkpoint_steps - {0}))

    @property
    def _closed(self) -> bool:
        return self.view.steps.last >= self.manifest.run.steps

    def _bootstrap(self) -> PeerSettings:
        return exact_settings(
            home=self.directory.home(BOOTSTRAP).absolute(),
            role="bootstrap",
            name=BOOTSTRAP,
            manifest=self.directory.manifest.absolute(),
            ends_seed=self.manifest.run.seed,
            frozen=self.directory.frozen.absolute(),
            model_files=self.model_files,
            options=dataclasses.replace(LOCAL, **self.reports),
        )

    def _others(self, bootstrap: tuple[str, ...]) -> list[PeerSettings]:
        peers = []
        for turn, name in enumerate(peer_names(self.manifest)[1:]):
            role, number = name.split("-")[:2]
            common: dict[str, Any] = {
                "home": self.directory.home(name).absolute(),
                "name": name,
                "turn": turn,
                "bootstrap": bootstrap,
                "run": self.manifest.run_id,
                "run_directory": self.directory.root.absolute(),
                "frozen": self.directory.frozen.absolute(),
                "alone": True,
            }
            every = math.ceil(self.manifest.run.steps / CHECKPOINTS_PER_RUN)
            options = dataclasses.replace(LOCAL, device=self.device, checkpoint_every=every)
            if role == "stage":
                options = dataclasses.replace(options, stage=int(number))
            else:
                options = dataclasses.replace(options, data=self.directory.shard(int(number)).absolute())
            peers.append(exact_settings(**common, role=role, options=options))
        return peers

    def _until(self, condition: Callable[[], bool], awaited: str) -> None:
        heard = self.clock.monotonic()
        while not condition():
            check()
            exits = self.group.poll(POLL_S)
            if self._look():
                heard = self.clock.monotonic()
            self._require_health(exits)
            if self.group.preload_seconds is None:
                heard = self.clock.monotonic()
            if self.clock.monotonic() - heard > SILENCE_S:
                raise RunBroken(f"no peer has reported anything for {SILENCE_S:.0f} s while waiting for {awaited}")

    def _look(self) -> bool:
        news = self.tail.read()
        for told in news:
            self.view.add(told)
        self.on_change()
        return any(not isinstance(told.record.event, LoopLag) for told in news)

    def _require_health(self, exits: list[PeerExit]) -> None:
        """Raises RunBroken when the run cannot start, or go on, without those that have ended."""
        early = [exit_ for exit_ in exits if exit_.code == 0 and not self._closed]
        if early:
            # Its process may have ended before its last events were read.
            self._look()
        early = early if not self._closed else []
        bad = [exit_ for exit_ in exits if exit_.code]
        self._casualties += bad
        wrong = [exit_ for exit_ in bad if exit_.code > 0]  # after the last step a peer that is killed is not missed
        if not early and (self._goes_on() or (self._closed and not wrong)):
            return
        if not early and not (self._casualties or self._bad_last_word()):
            return
        listened = self._listen()
        self._casualties += listened
        early += [exit_ for exit_ in listened if exit_.code == 0 and not self._closed]
        words = {exit_.name: last_words(self.directory.home(exit_.name) / "peer.log") for exit_ in self._casualties}
        found = blame(self._casualties, self.view.stopped, self.view.lost_peers, words)
        if early and (found is None or self._gave_up(found.name)):
            found = PeerFailure(early[0].name, "left before the last step was closed")
        if found is not None:
            raise RunBroken(f"{found.name} {found.reason}", found.name)

    def _goes_on(self) -> bool:
        """Return whether the run has begun and is not over, and enough are left to go on with it, for nobody joins
        here: those decide for themselves whether they can do without the others."""
        begun = self.view.steps.last > 0 and not self._closed
        roles = Counter(name.split("-")[0] for name in self.group.running)
        return begun and roles["stage"] >= self.manifest.split.stages and roles["trainer"] > 0

    def _bad_last_word(self) -> bool:
        return any(last.exit_code for last in self.view.stopped.values())

    def _gave_up(self, name: str) -> bool:
        """Return whether a peer ended for want of others: of two that end, it is not the cause."""
        last = self.view.stopped.get(name)
        return last is not None and last.exit_code == EXIT_UNREACHABLE

    def _listen(self) -> list[PeerExit]:
        exits: list[PeerExit] = []
        deadline = self.clock.monotonic() + BLAME_S
        while (left := deadline - self.clock.monotonic()) > 0:
            exits += self.group.poll(min(left, POLL_S))
        self._look()
        return exits


# --- blame for a local run that breaks -------------------------------------------------------------------------------
# It goes to the first peer to go, not to those that ended because of it.


_TAIL_BYTES = 8192


@dataclass(frozen=True, slots=True)
class PeerFailure:
    """The peer and why, in words that follow its name."""

    name: str
    reason: str


def blame(
    exits: Sequence[PeerExit], stopped: Mapping[str, ExitNotice], lost: Mapping[str, str], last_words: Mapping[str, str]
) -> PeerFailure | None:
    """Pick one peer out of those that ended badly, or None when none did.

    Peers that lose another end with an error of their own, so in this order: one killed by a signal (it could not even
    say so), one that ended without a last word, the first that the others report as lost (``lost``: names in the order
    of the reports, with reasons), the earliest last word with an error.
    """
    killed = [exit_ for exit_ in exits if exit_.code < 0]
    mute = [exit_ for exit_ in exits if exit_.code > 0 and exit_.name not in stopped]
    if killed or mute:
        first = (killed or mute)[0]
        words = f": {last_words[first.name]}" if last_words.get(first.name) else ""
        return PeerFailure(first.name, str(first).removeprefix(first.name).strip() + words)
    wrong = {name: last for name, last in stopped.items() if last.exit_code}
    for name, reason in lost.items():
        return _in_its_words(name, wrong) or PeerFailure(name, f"was lost: {reason}")
    if wrong:
        return _in_its_words(min(wrong, key=lambda name: (wrong[name].wall, name)), wrong)
    bad = next((exit_ for exit_ in exits if exit_.code), None)
    return PeerFailure(bad.name, str(bad).removeprefix(bad.name).strip()) if bad else None


def _in_its_words(name: str, wrong: Mapping[str, ExitNotice]) -> PeerFailure | None:
    last = wrong.get(name)
    return PeerFailure(name, f"ended the run: {last.reason} (exit code {last.exit_code})") if last else None


def last_words(log: Path) -> str:
    """The last line that a peer printed, which after a crash is the exception; empty when there is none."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
