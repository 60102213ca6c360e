"""What a person names as sources of a run's checkpoints: directories, an invite or an address, a peer of this machine;
and as one of them: ``RUN@STEP``.

Imports no torch: a source that means nothing is refused at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.console.words import CommandError, another_path, command_name, command_to_invite, listed
from peers.exit_codes import EXIT_USAGE
from peers.home.places import RUNS
from peers.home.run_directory import RunDirectory, find_run_directory, said_run_id
from peers.invites.invite import Contacts, contacts_from, typed_invite
from swarm.errors import ConfigError
from swarm.security.credentials import Grant

CHECKPOINTS = RunDirectory(Path()).checkpoints.name


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSources:
    """Directories of one run, and how its living peers are reached. At least one of the two."""

    directories: tuple[RunDirectory, ...] = ()
    contacts: Contacts | None = None

    def lines(self) -> list[str]:
        """Each source in words."""
        found = [str(directory.root) for directory in self.directories]
        if self.contacts is not None:
            run = self.contacts.run_name or "a run"
            found += [f"peers of {run}, through {address}" for address in self.contacts.addresses]
        return found


def named_sources(sources: Sequence[str], home: Path) -> NamedSources:
    """Return what these words mean; without any the peer that runs here.

    Args:
        sources: Directories (a run's, one of its checkpoints, or a home or another directory of runs), and beside them
            one invite, multiaddr or name of a peer of this machine.
        home: Where peers of this machine are looked for.

    Raises:
        ConfigError: A directory holds no run, or several of which the others do not say one; or two peers are named.
        CommandError: The invite is an observer's, or the peer's run admits by invite.
    """
    # Not pathlib's: an invite is too long for a file's name, and then it raises.
    kept = {source: runs_in(Path(source)) for source in sources if os.path.isdir(source)}
    others = [source for source in sources if source not in kept]
    if len(others) > 1:
        remedy = "One peer of a run knows all the others: leave this one out."
        raise ConfigError("--from", others[1], "directories, and at most one invite or peer", remedy)
    contacts = None if kept and not others else _contacts(others[0] if others else None, home)
    if contacts is not None and contacts.granted is not None:
        grant = contacts.granted.grant.grant
        if grant.role == "observer":
            raise refused_role(grant, "an observer gets no part of the model")
    return NamedSources(directories=_of_one_run(kept, contacts), contacts=contacts)


def runs_in(path: Path) -> list[RunDirectory]:
    """Return the runs that a directory holds: it is one, or one of its checkpoints, or it has some inside, as a home
    and its ``runs`` have. Raises ConfigError for one that holds none."""
    below = path.name == CHECKPOINTS or path.parent.name == CHECKPOINTS
    above = [*path.absolute().parents][:2] if below else []
    for one in (path, *above):
        if os.path.isfile(one / "run.toml"):
            return [RunDirectory(one)]
    found = sorted({file.parent for pattern in ("*/run.toml", f"{RUNS}/*/run.toml") for file in path.glob(pattern)})
    if not found:
        allowed = "a run's directory, one of its checkpoints, or a home or directory that holds runs"
        raise ConfigError("--from", str(path), allowed, another_path(path), why="it holds no run.toml")
    return [RunDirectory(one) for one in found]


def _of_one_run(kept: dict[str, list[RunDirectory]], contacts: Contacts | None) -> tuple[RunDirectory, ...]:
    """Of homes with several runs take that which all sources name."""
    ids = [{said_run_id(one) for one in runs} for runs in kept.values()]
    if contacts is not None and contacts.run is not None and kept:
        ids.append({str(contacts.run)})
    shared = set.intersection(*ids) if ids else set()
    if len(shared) > 1:
        source, runs = next(iter(kept.items()))
        each = listed([f"{one.root} ({said_run_id(one)[:12]})" for one in runs])
        raise ConfigError("--from", source, "directories of one run", "Name the directory of the run that you mean.",
                          why=f"it holds several: {each}")  # fmt: skip
    found = []
    for source, runs in kept.items():
        wanted = [one for one in runs if said_run_id(one) in shared] or runs
        if len(wanted) > 1 and not shared:
            run = f"run {contacts.run[:12]}" if contacts is not None and contacts.run else "a run that the others hold"
            each = listed([f"{one.root} ({said_run_id(one)[:12]})" for one in runs])
            raise ConfigError("--from", source, run, "Leave it out, or name another.", why=f"it holds others: {each}")
        found += wanted
    return tuple(found)


def _contacts(source: str | None, home: Path) -> Contacts:
    """An invite or an address as it is; the name of a peer here is exchanged for that peer's invite."""
    from peers.commands.look import look_at
    from peers.control.choose import choose_speaker
    from peers.control.client import ask

    if source is not None:
        source = typed_invite(source, "ckpt pull --from -")
    if source is not None and (":" in source or source.lstrip().startswith("/")):
        return contacts_from([source])
    place = choose_speaker(home, source, command="ckpt pull")
    standing = look_at(place).standing
    if standing is not None and standing.admission is not None:
        raise CommandError(f"{place.title} cannot fetch for you: its run admits by invite",
                           check="which parts do you need? Role any gives all, stage the stages, trainer the ends",
                           next_=f"{command_to_invite(standing.admission.mode, 'any')}; then here: {command_name()} "
                           "ckpt pull --from INVITE", exit_code=EXIT_USAGE)  # fmt: skip
    return contacts_from([str(ask(place.control, "invite", who=place.described))])


def refused_role(grant: Grant, why: str) -> CommandError:
    """Return the error for an invite that is not for all that is to be fetched."""
    return CommandError(f"this invite is for {grant.name} as {grant.role}: {why}",
                        check="an invite as any gives all parts, as stage the stages, as trainer the ends (embedding "
                        "and head)", next_="at an issuer of the run: "
                        f"{command_name()} invite --for {grant.name} --role any; then here: {command_name()} ckpt pull "
                        "--from INVITE. Or add a directory that holds the rest: --from DIR",
                        exit_code=EXIT_USAGE)  # fmt: skip


# --- one checkpoint ---------------------------------------------------------------------------------------------------

BASE, SITE = "--base", "--site"
ROUNDED = 1e-6
"""How far from 1 the sum of weights may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedStep:
    """A checkpoint of a run, the newest complete one without ``step``; in the words and after the option ``key`` that
    name it."""

    key: str
    words: str
    directory: RunDirectory
    step: int | None


def named_step(words: str, key: str, home: Path | str | None) -> NamedStep:
    """Return what ``RUN[@STEP]`` names, RUN as for :func:`~peers.home.run_directory.find_run_directory`, which
    raises."""
    run, _, said = words.rpartition("@")
    if not run or not said.isdecimal():
        run, said = words, ""
    directory = find_run_directory(Path(run), home, key=key)
    return NamedStep(key=key, words=words, directory=directory, step=int(said) if said else None)


def weighted_steps(sites: Sequence[str], home: Path | str | None) -> list[tuple[NamedStep, float]]:
    """Return what several ``RUN[@STEP]=WEIGHT`` name. Raises ConfigError for weights below 0, or that are not 1
    together, and as :func:`named_step`."""
    named = [_weighted(site) for site in sites]
    total = sum(weight for _, weight in named)
    if abs(total - 1.0) > ROUNDED:
        said = " + ".join(f"{weight:g}" for _, weight in named)
        raise ConfigError(SITE, said, "weights that are 1 together", "Correct them.", why=f"they are {total:g}")
    return [(named_step(words, SITE, home), weight) for words, weight in named]


def _weighted(site: str) -> tuple[str, float]:
    words, _, said = site.rpartition("=")
    try:
        weight = float(said)
    except ValueError:
        weight = -1.0
    if not words or not 0.0 <= weight <= 1.0:
        raise ConfigError(SITE, site, "RUN@STEP=WEIGHT, the weight from 0 to 1", f"As in {SITE} out/mine@60=.7")
    return words, weight
