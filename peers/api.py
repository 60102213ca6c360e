"""Peers from Python: found a run, join one, be told of its steps, and load what it has learnt. ::

    import peers

    with peers.join(invite, data="texts/") as peer:
        peer.on_step(lambda step: print(step.number, step.loss))

    model = peers.load(peer.run)

The block ends when the run does, or this peer has left it. An exception in it, Ctrl-C too, has the peer leave in order,
within its ``grace``, and goes on.

Each peer is a process of its own, which runs what ``swarm join`` and ``swarm new`` run (:mod:`peers.commands.start`): a
peer has one event loop, takes signals as orders to leave, and starts a daemon that must not outlive it, all of which
needs the main thread of a process; and a program that hangs in its own work must not make a whole run wait. The process
ends with the one that started it, however that ends. A thread of ours starts it, reads what it tells and waits for it,
so that the caller may use any thread. Callbacks are called on the thread that waits (:meth:`Peer.wait`, or the end of
the block), one after the other, and never later.

Nothing here imports torch but :func:`load` and :func:`load_tokenizer`.
"""

from __future__ import annotations

import collections
import contextlib
import difflib
import json
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Literal, Self

from swarm.errors import SwarmError

if TYPE_CHECKING:
    from data_shards.tokenize import Tokenizer
    from peers.home.run_directory import RunDirectory
    from peers.local.peer_order import PeerOrder
    from swarm.models.family import PartModule

MAX_SAID = 40
"""Lines of a peer's stderr that are kept for the message of its failure; and steps that are known again."""
_ENDED_WELL = (0, 75)
"""It is done, or left in order because it was told to: see :mod:`peers.exit_codes`."""

_Path = str | PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of the run that is decided.

    Attributes:
        number: Which one, from 1; none is told twice by one peer, unless the run goes back to a checkpoint.
        loss: Nats a target token, the mean over the step.
        tokens: How many were learnt from.
        seconds: Since the step before it; of the first that a peer takes part in, since then.
    """

    number: int
    loss: float
    tokens: int
    seconds: float


class PeerFailed(SwarmError):
    """A peer ended otherwise than in order; the message is what it said, ``exit_code`` as of ``swarm join``."""

    def __init__(self, said: str, exit_code: int) -> None:
        super().__init__(said)
        self.exit_code = exit_code


def join(
    invite: str,
    *,
    data: _Path | None = None,
    role: Literal["auto", "stage", "trainer", "all"] | None = None,
    device: str | None = None,
    home: _Path | None = None,
    **options: object,
) -> Peer:
    """Start a peer that joins a run; returns at once. As ``swarm join``.

    Args:
        invite: The invite, or the multiaddr of a peer.
        data: Text for a trainer, a file or directory, or a shard; it stays on this machine.
        role: ``stage`` holds a slice of the model, ``trainer`` feeds text, ``all`` does both, with every stage;
            ``auto``, the default, is trainer with ``data``, else stage.
        device: ``auto``, the default, ``cpu``, ``cuda``, ``cuda:N``, or several with commas.
        home: Directory of this machine's places and runs; by default that of the command.
        options: Any other option of ``swarm join`` by its key, as ``max_upload="20mbit"`` or ``port=4001``. What is not
            given is taken from its variable ``SWARM_…``, where that is set.

    Raises:
        TypeError: An option that there is not.
        ConfigError: A value that cannot be used. What only the peer finds out is PeerFailed, raised where it is waited
            for.
    """
    from peers.commands.start import to_join

    given = {"invite": (invite,), "data": data, "role": role, "device": device, "home": home, **options}
    return Peer(to_join(_offered("join", given)), invite)


def found(
    run: _Path | None = None,
    *,
    preset: str | None = None,
    steps: int | None = None,
    resume: bool = False,
    home: _Path | None = None,
    **options: object,
) -> Peer:
    """Start a peer that founds a run and serves it; returns at once. As ``swarm new``. It holds no part: others join
    with its :attr:`Peer.invite`.

    Args:
        run: The RUN.toml; with ``resume`` the directory of a run, or of one of its checkpoints.
        preset: Instead of a file: ``tiny``, ``small`` or ``medium``.
        steps: Optimizer steps until the run is over.
        resume: Go on with a run whose peers are all gone.
        home: As of :func:`join`.
        options: Any other option of ``swarm new`` by its key: ``stages=2``, ``hosts=4``, ``model="models/llama"``.

    Raises:
        TypeError: An option that there is not.
        ConfigError: A value that cannot be used, as of :func:`join`.
    """
    from peers.commands.start import to_found

    given = {"file": run, "preset": preset, "steps": steps, "resume": resume, "home": home, **options}
    return Peer(to_found(_offered("new", given)))


def load(
    run: _Path | None = None,
    *,
    step: int | None = None,
    path: str | None = None,
    device: str = "auto",
    home: _Path | None = None,
) -> PartModule:
    """Return the model of a run's checkpoint, a ``torch.nn.Module`` in evaluation mode, as ``swarm sample`` loads it.

    ``model.logits(model(tokens))`` are the float32 logits (B, T, V) of int64 ids (B, T); ``model.generate`` continues a
    text, ``model.evaluate`` sums its loss. Takes the model's size in memory; verifies the digest of every part.

    Args:
        run: A run's directory, or the beginning of its id (:attr:`Peer.run`); by default the newest on this machine.
        step: The checkpoint after this step; by default the newest complete one.
        path: Of a run whose stages have variants, the domain, or the number of the kind of text, whose model it is.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        home: As of :func:`join`.

    Raises:
        ConfigError: There is no such run, step, path or device here.
        CommandError: Parts of the checkpoint are on other machines: ``swarm ckpt pull`` fetches them.
        StateError: The checkpoint is damaged.
    """
    directory = _directory(run, home)  # first: a wrong one should not cost the seconds that torch takes
    import torch

    from peers.commands.evaluate import load_checkpoint

    return load_checkpoint(directory, step, path=path, device=device, threads=torch.get_num_threads()).model


def load_tokenizer(run: _Path | None = None, *, home: _Path | None = None) -> Tokenizer:
    """Return a run's tokenizer: ``encode`` makes token ids of a text, ``decode`` a text of them. Arguments and errors
    are those of :func:`load`: the run has a checkpoint here."""
    from peers.checkpoints.choose_checkpoint import choose_step, run_tokenizer

    return run_tokenizer(choose_step(_directory(run, home)))[1]


def _directory(run: _Path | None, home: _Path | None) -> RunDirectory:
    from peers.home.run_directory import find_run_directory

    return find_run_directory(None if run is None else Path(run), None if home is None else Path(home), key="run")


class Peer:
    """A peer of this machine, from :func:`join` or :func:`found`; it runs from then on. Use it in a ``with`` block.

    One thread at a time may wait for it. Once it has ended its attributes stay what they are.
    """

    def __init__(self, order: PeerOrder, invite: str = "") -> None:
        self._callbacks: list[Callable[[Step], object]] = []
        self._news: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._said: collections.deque[str] = collections.deque(maxlen=MAX_SAID)
        self._told: collections.deque[str] = collections.deque(maxlen=MAX_SAID)
        self._sent: set[int] = set()
        self._invite, self._run, self._reason = invite, "", ""
        self._known, self._started = threading.Event(), threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self.exit_code: int | None = None
        """How it ended, as a shell has it; None while it runs."""
        self._thread = threading.Thread(target=self._live, args=(order,), name="peer", daemon=True)
        self._thread.start()

    # --- what the caller does ------------------------------------------------------------------------------------

    @property
    def invite(self) -> str:
        """Return what others join with; of a founder once its run is founded, which is waited for. Raises PeerFailed
        when it ends before. A run that admits by invite gives its own, one for each peer: ``swarm invite --for
        NAME``."""
        if not self._invite:
            self._wait_known()
        return self._invite

    @property
    def run(self) -> str:
        """The id of its run, once it has found it, which is waited for. Raises PeerFailed when it ends before."""
        if not self._run:
            self._wait_known()
        return self._run

    def on_step(self, callback: Callable[[Step], object]) -> None:
        """Call back with each step that nobody has waited for yet, on the thread that waits. What the callback raises
        ends the waiting."""
        self._callbacks.append(callback)

    def wait(self, step: int | None = None) -> None:
        """Wait until the run is over or this peer has left; with ``step`` until that one is decided, at most. Callbacks
        are called meanwhile, for the steps that were decided before, too. Raises PeerFailed when it ends badly."""
        while (news := self._news.get()) is not None:
            for callback in self._callbacks:
                callback(news)
            if step is not None and news.number >= step:
                return
        self._news.put(None)  # for the next one who waits
        self._check()

    def leave(self) -> None:
        """Have it leave in order, however long that takes, as the first Ctrl-C does; returns at once. Who holds the
        only replica of a part stays until another has it."""
        self._send(signal.SIGINT)

    def close(self) -> None:
        """Have it leave in order within its ``grace``, 60 seconds by default, and wait for that; called again, or
        interrupted by Ctrl-C, it leaves at once, which can cost the open step. Calls nobody back."""
        self._send(signal.SIGTERM)
        try:
            self._thread.join()
        except KeyboardInterrupt:
            self._send(signal.SIGTERM)
            self._thread.join()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for its end, as :meth:`wait`; after an exception, or at one of a callback, :meth:`close` it."""
        try:
            if kind is None:
                self.wait()
        finally:
            if self._thread.is_alive():
                self.close()

    # --- its process, in a thread of ours ------------------------------------------------------------------------

    def _live(self, order: PeerOrder) -> None:
        """Start the process and hear it to its end. It is killed when this thread ends: see
        :func:`peers.local.launcher.launched`."""
        try:
            self.exit_code = self._hear_out(order)
        except OSError as error:
            self._said.append(f"the process of a peer cannot be started: {error}")
            self.exit_code = 1
        finally:
            self._started.set()
            self._known.set()
            self._news.put(None)

    def _hear_out(self, order: PeerOrder) -> int:
        from dataclasses import replace

        from peers.local.launcher import launched
        from peers.local.peer_order import PEER_COMMAND, order_for

        pipe = subprocess.PIPE
        process = subprocess.Popen(
            launched(PEER_COMMAND), stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace",
            start_new_session=True,  # Ctrl-C is the caller's to act on
        )  # fmt: skip
        self._process = process
        self._started.set()
        assert process.stdin is not None and process.stdout is not None  # noqa: S101, PT018 - asked for
        assert process.stderr is not None  # noqa: S101 - asked for
        words = threading.Thread(target=self._keep_said, args=(process.stderr,), daemon=True)
        words.start()
        with contextlib.suppress(OSError), process.stdin as orders:  # who is dead already says so by its code
            orders.write(order_for(replace(order, words=False, json_lines=True)))
        with process.stdout as lines:
            for line in lines:
                if (event := _event(line)) is not None:
                    self._hear(event)
        words.join()
        code = process.wait()
        return 128 - code if code < 0 and -code not in self._sent else max(code, 0)

    def _keep_said(self, stderr: IO[str]) -> None:
        with stderr:
            for line in stderr:
                self._said.append(line.rstrip())

    def _hear(self, event: Mapping[str, Any]) -> None:
        match event["kind"]:
            case "StepClosed" if event["microbatches"] and event["record"] not in self._told:
                self._told.append(event["record"])  # of several devices each tells it
                self._news.put(Step(number=event["step"], loss=event["loss"], tokens=event["tokens"],
                                    seconds=event["seconds"]))  # fmt: skip
            case "Invited":
                self._invite = event["invite"]
            case "RunFound":
                self._run = event["run"]
            case "PeerStopped":
                self._reason = event["reason"]
        if self._run and self._invite:
            self._known.set()

    def _wait_known(self) -> None:
        self._known.wait()
        if not (self._run and self._invite):
            self._thread.join()
            self._check()
            raise PeerFailed(f"the peer ended before it had found its run: {self._reason or 'it was told to'}", 0)

    def _check(self) -> None:
        """Raises PeerFailed for an end that is none in order."""
        self._thread.join()
        code = self.exit_code or 0
        if code not in _ENDED_WELL:
            raise PeerFailed("\n".join(self._said) or self._reason or f"the peer ended with exit code {code}", code)

    def _send(self, number: signal.Signals) -> None:
        self._started.wait()
        if self._process is not None and self.exit_code is None:
            self._sent.add(number)
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


def _event(line: str) -> Mapping[str, Any] | None:
    """Return the event that a line is; None for what a library of the peer's prints."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "kind" in event else None


def _offered(command: str, given: Mapping[str, object]) -> dict[str, object]:
    """Return the options as the command has them from its parser. Raises TypeError for one that it does not have."""
    from peers.options.fields import settings_of
    from peers.options.foundation import Foundation, Invocation
    from peers.options.model import PeerOptions

    models = (PeerOptions, Invocation) if command == "join" else (Foundation, PeerOptions, Invocation)
    known = {key for model in models for key, one in settings_of(model).items() if command in one.option.of}
    known -= {"quiet", "json"}  # of what is printed
    if strange := sorted(given.keys() - known):
        close = difflib.get_close_matches(strange[0], known, n=1)
        meant = f"; did you mean {close[0]}?" if close else f": swarm {command} --help has those there are"
        raise TypeError(f"swarm {command} has no option {strange[0]!r}{meant}")
    return dict(given)
