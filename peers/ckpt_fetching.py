"""From what a person calls a source to a pull: a blocking story for the command line."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from peers.ckpt_pull import Pulled, Say, destination, pull
from peers.ckpt_source import Source, beside, directory_source, peer_source
from peers.invite import Contacts, contacts_from
from peers.places import home_directory
from peers.run_directory import RunDirectory, find_run_directory
from peers.session import aloud, silent
from peers.words import amount
from swarm.errors import ConfigError
from swarm.ids import PartName

TELL_EVERY = 10
"""Lines about a part's progress."""


def pull_from(sources: Sequence[str], into: Path | None, home: str | None, *, words: bool) -> Pulled:
    """Pull from any number of directories and one invite, multiaddr or peer of this machine, together; without any from
    the peer that runs here.

    Raises ConfigError, Incompatible or Complaint for what cannot be used, RunEnded when nobody answers, and as
    :func:`peers.ckpt_pull.pull`. Imports torch and hivemind: some seconds.
    """
    say, root = aloud if words else silent, home_directory(home)
    found = {source: _directory(source) for source in sources}
    kept = [directory for directory in found.values() if directory is not None]
    others = [source for source, directory in found.items() if directory is None]
    if len(others) > 1:
        remedy = "One peer of a run knows all the others: leave this one out."
        raise ConfigError("--from", others[1], "directories, and one invite or peer beside them", remedy)
    if kept and not others:
        return asyncio.run(_pull(directory_source(kept), into, root, say))
    contacts = _contacts(others[0] if others else None, root)
    say("source", f"peers of {contacts.run_name or 'a run'}, through {contacts.addresses[0]}")

    async def from_peers() -> Pulled:
        async with peer_source(contacts) as peers:
            return await _pull(beside(peers, kept), into, root, say)

    return asyncio.run(from_peers())


async def _pull(source: Source, into: Path | None, home: Path, say: Say) -> Pulled:
    told: dict[PartName, int] = {}

    def progress(part: PartName, done: int, total: int) -> None:
        tenth = TELL_EVERY * done // max(1, total)
        if told.get(part) != tenth:
            told[part] = tenth
            say("fetching", f"{part}: {amount(done)}B of {amount(total)}B")

    return await pull(source, destination(into, source.manifest, home), say, progress)


def _directory(source: str) -> RunDirectory | None:
    # Not pathlib's: an invite is too long for a file's name, and then it raises.
    return find_run_directory(Path(source)) if os.path.isdir(source) else None


def _contacts(source: str | None, home: Path) -> Contacts:
    """An invite or an address as it is; the name of a peer here is exchanged for that peer's invite."""
    from peers.choose import choose_speaker
    from peers.control_client import ask

    if source is not None and (":" in source or source.lstrip().startswith("/")):
        return contacts_from([source])
    place = choose_speaker(home, source, command="ckpt pull")
    return contacts_from([str(ask(place.control, "invite", who=place.described))])
