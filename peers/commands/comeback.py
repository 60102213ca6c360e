"""Decide whether a run is founded, or its founder comes back to it: what this home saw of the run, who of it answers,
and the decision, which is pure (:func:`judge`). A run that lives is never founded a second time beside itself."""

from __future__ import annotations

import asyncio
import dataclasses
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from peers.commands.history_source import RunMemory, remembered
from peers.commands.status_text import when
from peers.console.words import CommandError, command_name, listed, short_address
from peers.doctor.contacts import AddressProbe, probe_addresses
from peers.exit_codes import EXIT_UNREACHABLE, EXIT_USAGE
from peers.home.last_events import newest_closing
from peers.home.places import LOCK_FILE, RUNS, PlaceInfo, check_nobody_here, home_option, list_places, runs_still
from peers.home.run_directory import RunDirectory, known_runs, run_id_in, said_run_id
from peers.home.sessions import SESSIONS, founded_in, sessions_of
from peers.invites.invite import MAX_ADDRESSES, Invite
from swarm.config import Manifest
from swarm.errors import ConfigError
from swarm.ids import RunId
from swarm.network.addresses import is_loopback, parse_address, split_peer
from swarm.state.checkpoints.files import steps

MAX_ASKED = 64
"""Addresses that are probed: in a large run not those of all."""
MAX_SHOWN = 3
FOUNDER = "bootstrap"


@dataclass(frozen=True, slots=True)
class Past:
    """A founder's memory of its run: its place there and, where it comes back, the peers to ask to be let in again;
    else the manifest with which it founded the run."""

    place: PlaceInfo
    contacts: tuple[str, ...]
    manifest: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceInRun:
    """A place whose peer was in a run, or wanted to be; ``here`` is whether it is now. ``founder`` is whether it may
    come back as its founder: ``founded`` is the manifest then, unless it issued invites only. ``memory`` is None where
    it saw no record."""

    place: PlaceInfo
    here: bool
    founder: bool
    founded: Path | None = None
    memory: RunMemory | None = None

    @property
    def peer(self) -> str:
        """The id of its peer, "" where that is not known."""
        return self.place.state.peer if self.place.state is not None else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKnown:
    """What a home saw of a run: its places there, who remembers the newest first, the newest step whose checkpoint is
    kept here, None for none, and whether they saw its last step close."""

    run: RunId
    name: str
    witnesses: tuple[PlaceInRun, ...] = ()
    kept: int | None = None
    over: bool = False

    @property
    def founders(self) -> tuple[PlaceInRun, ...]:
        """Return those that may come back as its founder: where one has the files of the founding, no mere issuers."""
        found = tuple(witness for witness in self.witnesses if witness.founder)
        return tuple(witness for witness in found if witness.founded is not None) or found

    @property
    def begun(self) -> bool:
        """True if the run is known to have begun."""
        return self.kept is not None or any(witness.memory is not None for witness in self.witnesses)

    @property
    def step(self) -> int:
        """The newest step that is known; 0 for the genesis, and where nothing is known."""
        return max([self.kept or 0, *(one.memory.step for one in self.witnesses if one.memory is not None)])

    def contacts(self, without: Collection[str]) -> tuple[str, ...]:
        """Return the addresses of all that were in it, but of these peers, as they were known last."""
        known = [address for one in self.witnesses if one.memory is not None for address in one.memory.addresses]
        others = (one for one in dict.fromkeys(known) if _peer_at(one) not in {None, *without})
        return tuple(islice(others, MAX_ASKED))


def _peer_at(address: str) -> str | None:
    """None for what is no address: others said it."""
    try:
        return split_peer(parse_address(address))[1]
    except ConfigError:
        return None


def seen_here(home: Path, run: RunId, name: str, founders: Collection[str]) -> RunKnown:
    """Look what this home knows of a run, of which these peers may found it again. Reads the end of one history of each
    place. Raises ConfigError for a home that cannot be read."""
    found = [_witness(place, run, founders) for place in list_places(home) if not place.owner]
    witnesses = [witness for witness in found if witness is not None]
    witnesses.sort(key=lambda one: one.memory.at if one.memory is not None else -1.0, reverse=True)
    own = (home / RUNS).absolute()
    kept = [one for one in known_runs(home) if one.root.absolute().parent == own and said_run_id(one) == run]
    newest = max((step for one in kept for step in steps(one.checkpoints)), default=None)
    return RunKnown(run=run, name=name, witnesses=tuple(witnesses), kept=newest)


def _witness(place: PlaceInfo, run: RunId, founders: Collection[str]) -> PlaceInRun | None:
    state = place.state
    now = state is not None and state.run == run
    if not now and not sessions_of(place.path, run):
        return None
    peer, role = (state.peer, state.role) if state is not None else ("", "")
    founded = founded_in(place.path, run)
    # Who founds a run notes it before its role, and before it has written its files.
    founds = founded is not None or (now and role in (FOUNDER, ""))
    memory = remembered(place.path, run, peer if founds or peer in founders else "")
    founder = founds or (peer in founders and memory is not None)
    return PlaceInRun(place=place, here=now and place.live, founder=founder, founded=founded, memory=memory)


def whom_to_ask(seen: RunKnown) -> tuple[str, ...]:
    """Return where peers of a run that has begun may answer, but for those who would come back. Pure.

    Loopback addresses are of use where a peer has no other: at that of another machine's peer may be anybody here.
    """
    known = seen.contacts({one.peer for one in seen.founders})
    outward = {_peer_at(address) for address in known if not is_loopback(parse_address(address))}
    return tuple(one for one in known if _peer_at(one) not in outward or not is_loopback(parse_address(one)))


def _probed(seen: RunKnown) -> list[AddressProbe]:
    """Probe where peers of a run may answer. Takes three seconds, and some more where names cannot be resolved."""
    asked = whom_to_ask(seen)
    return asyncio.run(probe_addresses(asked)) if asked else []


def way_back(home: Path, seen: RunKnown, wanted: str | None) -> Past | None:
    """Probe the others of a run, where it has begun, and :func:`judge`. Takes three seconds, and some more to read
    what peers of weeks have said, and where names of theirs cannot be resolved."""
    probes = _probed(seen)
    if not any(probe.may_answer for probe in probes):
        end = newest_closing(home, seen.run)
        seen = dataclasses.replace(seen, over=end is not None and end.is_last)
    return judge(seen, wanted, probes)


def judge(seen: RunKnown, wanted: str | None, probes: Sequence[AddressProbe]) -> Past | None:
    """Decide what ``swarm new`` does about a run, in the place that is ``wanted``, if one is. Pure.

    Returns None where the run is to be founded and nobody here founded it before; a past with contacts where its
    founder comes back, one without where it founds the run again, in its place: it had not begun.

    Raises CommandError where a founder of it runs here, where another machine founded it, and, exit code 3, where it
    has begun and nobody answers; ConfigError for another place than the founder's.
    """
    if not seen.witnesses and not seen.step:
        return None
    check_no_founder(seen)
    lives = any(one.here and one.memory is not None for one in seen.witnesses)
    answered = [probe.address for probe in probes if probe.answered == "peer"]
    if not seen.founders:
        raise _of_another_machine(seen, answered) if answered or lives or not seen.begun else _nobody(seen, probes)
    back = next((one for one in seen.founders if wanted in (None, one.place.name)), None)
    if back is None:
        best = seen.founders[0].place.name
        raise ConfigError("--place", wanted, f"{best}, the place of the run's founder",
                          f"Leave --place out, or give --place {best}.", why="another place has founded that run",
                          )  # fmt: skip
    contacts = seen.contacts({back.peer})
    if back.place.live:  # not in this run, or it had been refused
        raise _taken(back.place)
    # What cannot be probed, as a peer behind a relay, may well answer; and who comes back is told if it is over.
    if contacts and (lives or seen.over or any(probe.may_answer for probe in probes)):
        at = tuple(dict.fromkeys([*answered, *contacts]))  # an invite has room for few, first for who answers
        invited = Invite(run=seen.run, name=seen.name, at=at[:MAX_ADDRESSES]).text()
        return Past(back.place, (invited, *at[MAX_ADDRESSES:]), None)
    if seen.begun:  # even if no step was closed then: others may have gone on, at ports that are not known here
        raise _nobody(seen, probes)
    return Past(back.place, (), back.founded)


def check_no_founder(seen: RunKnown, beside: str = "") -> None:
    """Check that no founder of the run lives here, but in the place ``beside``: it would be begun a second time. Pure.
    Raises CommandError."""
    for one in seen.founders:
        if one.here and one.place.name != beside:
            raise runs_still(one.place)


def check_gone(home: Path, manifest: Manifest, *, on_purpose: bool, whole: bool = True) -> None:
    """Check that no peer of a run that is to go on from a checkpoint lives in this home, nor, unless that checkpoint
    was named ``on_purpose``, answers where it was known here. Takes three seconds, and some more where names cannot be
    resolved. Raises CommandError, also (exit code 3) where it cannot find out, as of peers behind relays, if there is a
    ``whole`` checkpoint to go on from."""
    check_nobody_here(home, manifest.run_id)
    if on_purpose:
        return
    seen = seen_here(home, manifest.run_id, manifest.run.name, manifest.admission.issuers)
    probes = _probed(seen)
    by_name = "repeat it with the directory of the checkpoint, DIR/checkpoints/step-…: that asks no peer"
    if answered := [probe.address for probe in probes if probe.answered == "peer"]:
        files = next((one.founded for one in seen.founders if one.founded is not None), None)
        back = _joining(seen, answered) if files is None else f"{command_name()} new {shlex.quote(str(files))}"
        back += "" if files is None else home_option(home)
        raise CommandError(f"that run still runs: a peer of it answers at {_shown(answered)}. Starting from a "
                           "checkpoint now would make two runs of it",
                           check="does it train, or wait for the run to go on? swarm status, on its machine",
                           next_=f"{back} to take part in it{f'; where it only waits: {by_name}' if whole else ''}",
                           exit_code=EXIT_USAGE)  # fmt: skip
    if whole and (unknown := _unknown(probes)):
        raise CommandError(f"this machine cannot reach peers that may still run: {_shown(unknown)}",
                           check="is this machine on a network (ip route)? swarm status, on their machines",
                           next_=f"repeat the command once they can be reached; if they are gone for good: {by_name}",
                           exit_code=EXIT_UNREACHABLE)  # fmt: skip


def _unknown(probes: Sequence[AddressProbe]) -> list[str]:
    """Return the addresses of peers of which probing told nothing, as of those behind relays; of all of them where no
    probe shows that this machine is on a network. Pure."""
    if all(probe.answered in ("no route", "no name") for probe in probes):
        return [probe.address for probe in probes]
    asked = {_peer_at(probe.address) for probe in probes if probe.answered != "untried"}
    return [probe.address for probe in probes if _peer_at(probe.address) not in asked]


def _taken(place: PlaceInfo) -> CommandError:
    """Return the error for a founder whose place, and with it its identity, a peer of another run has now."""
    swarm, at = command_name(), home_option(place.path.parent)
    return CommandError(f"the place of the run's founder, {place.name}, has a peer of another run: {place.described}",
                        check=f"{swarm} status --peer {place.name}{at}", exit_code=EXIT_USAGE,
                        next_=f"have that leave: {swarm} drain --peer {place.name}{at}; "
                        "then the same command")  # fmt: skip


def _joining(seen: RunKnown, answered: Sequence[str]) -> str:
    """Return what somebody types to take part in it."""
    at = tuple(answered[:MAX_ADDRESSES])
    return f"{command_name()} join {Invite(run=seen.run, name=seen.name, at=at).text() if at else 'INVITE'}"


def check_founded_nowhere(file: Path, run: RunId, home: Path) -> None:
    """Check that a run of which this home knows nothing was not founded with this file: then the file says the run's
    id, as those say that a founder or a run keeps, and copies of them. Raises CommandError."""
    real = file.resolve()
    if run_id_in(real) != run or real.is_relative_to(home.resolve()):
        return
    session = real.parent.parent.name == SESSIONS and (real.parents[2] / LOCK_FILE).is_file()
    swarm, at = command_name(), ""
    back = f"where it was founded, to come back to it: {swarm} new FILES/run.toml"
    if RunDirectory(real.parent).checkpoints.is_dir():
        back = f"once all its peers are gone: {swarm} new --resume {shlex.quote(str(file.parent))}"
    if session or real.parent.parent.name == RUNS:
        at = home_option(real.parents[3 if session else 2])
        back = f"to come back to it: {swarm} new {shlex.quote(str(file))}{at}"
    raise CommandError("this file has founded a run before, and this home does not know that run: founding it here "
                       "would make two runs with one id",
                       check=f"{swarm} status --all{at}: who is, or was, in it?",
                       next_=f"{back}; to found another run: the same command with --name NAME, or a copy of the file "
                       "with another [run] nonce", exit_code=EXIT_USAGE)  # fmt: skip


def nobody_left(seen: RunKnown) -> str:
    """Say what to do where no peer of a run is left. Pure."""
    swarm = command_name()
    resume = f"{swarm} new --resume {seen.run[:12]}"
    resume += home_option(seen.witnesses[0].place.path.parent) if seen.witnesses else ""
    if seen.kept is None:
        resume = f"{swarm} new --resume, with a checkpoint of the machines that keep one ({swarm} ckpt pull --from DIR)"
    anew = "the same command with --name NAME, and with another --invite-file if there is one"
    return f"if none is left: {resume}; or, to begin anew as another run, {anew}"


def _nobody(seen: RunKnown, probes: Sequence[AddressProbe]) -> CommandError:
    who = "none of its other peers is known here"
    if probes:
        who = f"none of its other peers answers where it was known: {_shown([probe.address for probe in probes])}"
    memory = next((one.memory for one in seen.witnesses if one.memory is not None), None)
    last = f"a checkpoint of step {seen.kept} is kept here"
    if memory is not None:
        names = f" with {_few(memory.names)}" if memory.names else ""
        last = f"it was seen here last at step {memory.step}, {when(memory.at)},{names}"
    again = "the same command" if seen.founders else f"where it was founded: {command_name()} new FILES/run.toml,"
    return CommandError(f"the run has begun, and {who}; {last}",
                        check="do they run? swarm status, on their machines; is this machine on a network?",
                        next_=f"{again} once they answer; {nobody_left(seen)}", exit_code=EXIT_UNREACHABLE)  # fmt: skip


def _of_another_machine(seen: RunKnown, answered: Sequence[str]) -> CommandError:
    swarm, place = command_name(), seen.witnesses[0].place.described
    known = f"{place} was in that run, or wanted to be"
    if answered:
        known = f"that run lives: peers of it answer at {_shown(answered)}"
    return CommandError(f"{known}; it was founded elsewhere, and cannot be founded here a second time",
                        check=f"{swarm} status --all, here and on the machine where it was founded",
                        next_=f"{_joining(seen, answered)}, to take part in it; or, to found another run of its "
                        "kind, the same command with --name NAME", exit_code=EXIT_USAGE)  # fmt: skip


def _shown(addresses: Sequence[str]) -> str:
    return _few([short_address(address) for address in addresses])


def _few(names: Sequence[str]) -> str:
    more = len(names) - MAX_SHOWN
    return listed([*names[:MAX_SHOWN], *([f"{more} more"] if more > 0 else [])])
