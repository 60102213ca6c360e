"""From what a person calls a source to a pull: a blocking story for the command line."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from peers.ckpt_pull import Pulled, Say, destination, pull
from peers.ckpt_source import Source, directory_source, peer_source
from peers.invite import Contacts, contacts_from
from peers.places import home_directory
from peers.run_directory import RunDirectory, find_run_directory
from peers.session import aloud, silent
from peers.words import amount
from swarm.ids import PartName

TELL_EVERY = 10
"""Lines about a part's progress."""


def pull_from(source: str | None, into: Path | None, home: str | None, *, words: bool) -> Pulled:
    """Pull from an invite, multiaddrs, a peer of this machine or a directory; None: the peer that runs here.

    Raises ConfigError, Incompatible or Complaint for what cannot be used, RunEnded when nobody answers, and as
    :func:`peers.ckpt_pull.pull`. Imports torch and hivemind: some seconds.
    """
    say, root = aloud if words else silent, home_directory(home)
    kept = _directory(source)
    if kept is not None:
        return asyncio.run(_pull(directory_source(kept), into, root, say))
    contacts = _contacts(source, root)
    say("source", f"peers of {contacts.run_name or 'a run'}, through {contacts.addresses[0]}")

    async def from_peers() -> Pulled:
        async with peer_source(contacts) as found:
            return await _pull(found, into, root, say)

    return asyncio.run(from_peers())


async def _pull(source: Source, into: Path | None, home: Path, say: Say) -> Pulled:
    told: dict[PartName, int] = {}

    def progress(part: PartName, done: int, total: int) -> None:
        tenth = TELL_EVERY * done // max(1, total)
        if told.get(part) != tenth:
            told[part] = tenth
            say("fetching", f"{part}: {amount(done)}B of {amount(total)}B")

    return await pull(source, destination(into, source.manifest, home), say, progress)


def _directory(source: str | None) -> RunDirectory | None:
    # Not pathlib's: an invite is too long for a file's name, and then it raises.
    return find_run_directory(Path(source)) if source is not None and os.path.isdir(source) else None


def _contacts(source: str | None, home: Path) -> Contacts:
    """An invite or an address as it is; the name of a peer here is exchanged for that peer's invite."""
    from peers.choose import choose_speaker
    from peers.control_client import ask

    if source is not None and (":" in source or source.lstrip().startswith("/")):
        return contacts_from([source])
    place = choose_speaker(home, source, command="ckpt pull")
    return contacts_from([str(ask(place.control, "invite", who=place.described))])
