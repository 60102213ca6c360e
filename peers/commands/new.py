"""``swarm new``: from a preset, a RUN.toml or a checkpoint to a run that others can join, served by this peer."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

from peers.commands.preflight import check_announce, check_listen, check_output, check_reporting, check_through
from peers.console.words import CommandError, command_name, count, listed
from peers.doctor.contacts import knock_at, knock_at_relays
from peers.doctor.machine import check_before_start
from peers.exit_codes import EXIT_UNREACHABLE
from peers.home.places import check_nobody_here, home_directory, list_places, take_place
from peers.options.foundation import Foundation
from peers.options.model import PeerOptions
from peers.profiles import profile_lines
from peers.session import echo, know_thyself, live, open_session, silent
from peers.settings import exact_settings
from swarm import __version__
from swarm.clock import SystemClock
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from peers.founding_files import Founded
    from peers.invites.invite_file import Past
    from swarm.config import Manifest
    from swarm.ids import PeerId


def new(foundation: Foundation, options: PeerOptions, *, words: bool, json_lines: bool) -> int:
    """Found a run and serve it in the foreground until it is over; returns the exit code. Blocking.

    Waits for its peers for ever. ``options`` say where it listens and lives; what is about data and stages is not
    used. When their ``invite_file`` holds an invite this founder was here before: it goes back to its run, or founds
    the very same one again where that had not begun.

    Raises ConfigError, Incompatible, CommandError or StateError, having left nothing, for what cannot be run.
    """
    say = echo if words else silent
    if options.invite_file is not None:
        check_output("--invite-file", options.invite_file)
    past = None if foundation.resume or options.invite_file is None else _past(options.invite_file, options)
    if past is not None:
        options = dataclasses.replace(options, place=past.place.name)
        if past.contacts:
            say(f"swarm {__version__}", "comes back to the run that it founded")
            return _come_back(past, options, words=words, json_lines=json_lines)
        foundation = Foundation(file=past.manifest)
    home = home_directory(options.home)  # first: it may not be there, and a tokenizer takes seconds
    say(f"swarm {__version__}", "goes on with a run" if foundation.resume else "founds a run")
    _check(options, home, say)
    founded = _founded(foundation, options, say)
    begun = None if foundation.resume or foundation.file is None else _begun(founded.manifest, home, options, say)
    if begun is not None:
        options = dataclasses.replace(options, place=begun.place.name)
        return _come_back(begun, options, words=words, json_lines=json_lines)
    options = _as_issuer(founded, home, options, say)
    from peers.frozen import frozen_store, store_of, with_frozen

    store = frozen_store(options.home) if founded.resumed is None else store_of(founded.resumed.directory)
    frozen = with_frozen(founded.manifest, founded.model_files, store, lambda text: say("frozen", text))
    founded = dataclasses.replace(founded, manifest=frozen)
    taken = take_place(home, options.place, clock=SystemClock(), run=founded.manifest.run_id, role="bootstrap")
    with taken as place:
        who = know_thyself(place, options.name)
        founded = with_issuer(founded, who.peer)
        for label, text in summary(founded):
            say(label, text)
        say("identity", who.described())
        run, run_id = founded.manifest.run, founded.manifest.run_id
        session = open_session(place, who, role="bootstrap", run=run_id, run_name=run.name)
        manifest_file, tokenizer_file = founded.write(session)
        say("files", f"{session}")
        peer = exact_settings(
            home=session,
            identity=place.identity.absolute(),
            role="bootstrap",
            name=who.name,
            manifest=manifest_file,
            tokenizer=tokenizer_file,
            model_files=founded.model_files,
            frozen=store.root.absolute(),
            **_resumed(founded),
            patience_s=None,
            credential=place.credential(run_id),
            control=place.control.absolute(),
            options=options.of_founder(),
            verbose=words,
            json_lines=json_lines,
        )
        return live(place, peer)


def with_issuer(founded: Founded, founder: PeerId) -> Founded:
    """Return a run that not everybody may join with its founder as the issuer, where it names none yet."""
    manifest = founded.manifest
    if not manifest.admission.closed or manifest.admission.issuers:
        return founded
    named = manifest.admission.model_copy(update={"issuers": (str(founder),)})
    return dataclasses.replace(founded, manifest=manifest.model_copy(update={"admission": named}))


def _as_issuer(founded: Founded, home: Path, options: PeerOptions, say: Callable[[str, str], None]) -> PeerOptions:
    """Return the options with the place of an issuer, where a run that not everybody may join goes on: whoever else
    resumes it can invite nobody. Raises ConfigError where that place is not the one that is named, or is taken."""
    resumed = founded.resumed
    if resumed is None or not founded.manifest.admission.closed:
        return options
    issuers = resumed.issuers()
    here = [place for place in list_places(home) if place.state is not None and place.state.peer in issuers]
    if any(place.name == options.place for place in here):
        return options
    if not here:
        say("no issuer", f"is here: only those who were admitted before can join, until {command_name()} issuers "
            f"--appoint names one or a place with an issuer's key resumes it: {listed(issuers)}")  # fmt: skip
        return options
    best = min(here, key=lambda place: place.live)
    if options.place is not None or best.live:
        why = f"process {best.state.pid} has it" if best.live and best.state else "another can invite nobody"
        raise ConfigError("--place", options.place, f"{best.name}, whose peer may invite to this run",
                          f"Resume it with --place {best.name}, once no process has that.", why=why)  # fmt: skip
    return dataclasses.replace(options, place=best.name)


def _check(options: PeerOptions, home: Path, say: Callable[[str, str], None]) -> None:
    """Check what a founder was given, and this machine. Raises ConfigError and CommandError."""
    check_listen(options.listen)
    check_announce(options.announce)
    if options.through:
        check_through(options.through)
        for label, text in knock_at_relays(options.through):
            say(label, text)
    if options.dashboard is not None:
        from peers.dashboard.start import check_dashboard

        check_dashboard(options.dashboard, None if options.home is None else str(options.home))
    check_reporting(options.report_to, options.report_dir)
    check_before_start(home, say)


def _past(file: Path, options: PeerOptions) -> Past | None:
    """Find in this home the run whose invite the file holds; None if it holds none. Raises ConfigError when
    this home knows nothing of it: another peer founded it, or the home was lost."""
    from peers.invites.invite_file import find_past, read_invite

    invite = read_invite(file) if file.is_file() else None  # to read a pipe would wait for who writes into it
    if invite is None:
        return None
    past = find_past(home_directory(options.home), invite)
    if past is None or not (past.contacts or past.manifest):
        raise ConfigError("--invite-file", str(file), "no file yet, or the invite to a run that this home has founded",
                          "To found another: name another file. To join that one: "
                          f"{command_name()} join --invite-file {file}",
                          why=f"it invites to {invite.name}, {invite.run[:12]}, a run that this home does not know",
                          )  # fmt: skip
    return past


def _begun(manifest: Manifest, home: Path, options: PeerOptions, say: Callable[[str, str], None]) -> Past | None:
    """Find here the founder of a run that has begun, so that it comes back; None where the run is to be founded.

    It is founded again where none of its peers answers and nothing of it is kept. Raises CommandError while a peer of
    it runs here, and, exit code 3, where nobody answers though there is a checkpoint. Takes three seconds at most.
    """
    from peers.home.run_directory import known_runs, said_run_id
    from peers.invites.invite import contacts_from
    from peers.invites.invite_file import find_founder
    from swarm.state.checkpoints.files import steps

    run = manifest.run_id
    check_nobody_here(home, run)
    past = find_founder(home, manifest, options.place)
    if past is None:
        return None
    addresses = contacts_from(past.contacts).addresses
    if any(knock.may_answer for knock in asyncio.run(knock_at(addresses))):
        say("known", f"the run has begun: {past.place.described} comes back to it")
        return past
    nobody = f"the run has begun, and none of its other peers answers where this founder knew them: {listed(addresses)}"
    if any(said_run_id(one) == run and steps(one.checkpoints) for one in known_runs(options.home)):
        swarm = command_name()
        raise CommandError(nobody, check="do they run? swarm status, on their machines; is this one on a network?",
                           next_=f"the same command once they answer; if none is left, {swarm} new --resume {run[:12]}",
                           exit_code=EXIT_UNREACHABLE)  # fmt: skip
    say("known", f"{nobody}; no checkpoint is kept here: it is founded again, from its beginning")
    return None


def _come_back(past: Past, options: PeerOptions, *, words: bool, json_lines: bool) -> int:
    """Join as who it was, through the others: whoever has the old invite finds it again at the same address. It holds
    no part, as before: a stage host could keep no copy of private ends."""
    from peers.commands.join import join

    member = dataclasses.replace(options, invite=tuple(past.contacts), invite_file=None)
    return join(member, words=words, json_lines=json_lines, founder=True)


def summary(founded: Founded) -> list[tuple[str, str]]:
    """Describe the run as (label, text), for a person who is about to invite others to it."""
    from swarm.models.registry import family_of
    from swarm.planning.costs import model_parameter_count

    manifest = founded.manifest
    run, model, batch, optimizer = manifest.run, manifest.model, manifest.batch, manifest.optimizer
    tokens = batch.microbatch_size * manifest.step_microbatches * model.context
    start, warmup = run.start_when, count(optimizer.warmup_steps, "step")
    return [
        ("run", f"{run.name}, {manifest.run_id[:12]}, wire version {run.wire}"),
        ("model", f"{model_parameter_count(model):,} parameters: {family_of(model).described}"),
        ("memory", _memory(manifest)),
        ("stages", f"{manifest.split.stages}, sending {manifest.codecs.described}; ends {manifest.split.ends}"),
        ("step", f"{manifest.step_microbatches} microbatches of {batch.microbatch_size} rows: {tokens:,} tokens"),
        ("optimizer", f"{optimizer.described}, learning rate {optimizer.lr:g} after {warmup}"),
        ("averaging", manifest.averaging.described),
        *(profile_lines(founded.profile, manifest.model_dump(mode="json")) if founded.profile else ()),
        ("tokenizer", f"{manifest.tokenizer.digest[:16]}, from {founded.tokenizer_from}"),
        ("starts", f"when {count(start.stage_hosts, 'stage host')} and {count(start.trainers, 'trainer')} are here"),
        *_admission(manifest),
        *_votes(manifest),
        ("ends", f"after {count(run.steps, 'step')}"),
        *_private(manifest),
        *founded.said,
        *_goes_on(founded),
    ]  # fmt: skip


def _memory(manifest: Manifest) -> str:
    """What the largest part takes of whoever trains it."""
    from swarm.membership.part_memory import part_training_bytes
    from swarm.models.registry import family_of

    specs = family_of(manifest.model).parts(manifest.split)
    parts = {spec.name: part_training_bytes(manifest, spec) for spec in specs}
    largest = max(parts, key=lambda name: parts[name])
    return f"{parts[largest] / 1e9:.2g} GB and activations for the largest part, {largest}"


def _admission(manifest: Manifest) -> list[tuple[str, str]]:
    """Who may join, where that is not everybody."""
    admission = manifest.admission
    if not admission.closed:
        return []
    how = "who has an invite for one peer" if admission.mode == "token" else "the peers that issuers name"
    return [("admits", f"{how}; {count(len(admission.issuers), 'issuer')}, {admission.threshold} must sign")]


def _votes(manifest: Manifest) -> list[tuple[str, str]]:
    """Of a run that may start with fewer than three voters: what the death of one costs."""
    from swarm.step.blocked import few_voters

    start = manifest.run.start_when
    said = few_voters(start.stage_hosts + (start.trainers if manifest.split.ends == "private" else 0))
    return [("votes", f"at the start {said}")] if said else []


def _private(manifest: Manifest) -> list[tuple[str, str]]:
    """Of private ends: who can read the text all the same, and how many copies there are of them."""
    if manifest.split.ends != "private":
        return []
    trusted = "whoever hosts the first or the last stage can read the trainers' text: trust them with it"
    told, copies = [("private", trusted)], manifest.run.copies
    if getattr(manifest.model, "lora", None) is not None:
        told.append(("", "the ends are frozen, and every peer can have them: whoever hosts a stage reads more of it"))
    if getattr(manifest.model, "scratch", True) is False:
        told.append(("", "whoever has the model's files has the ends that it begins with, and reads more of it"))
    if copies > 1:
        told.append(("copies", f"{copies} of each stage; of the ends 1, the founder's: stage hosts keep none"))
    return told


def _goes_on(founded: Founded) -> list[tuple[str, str]]:
    resumed = founded.resumed
    if resumed is None:
        return []
    passed_over = [("not from", why) for why in resumed.passed_over]
    return [*passed_over, ("goes on", f"after step {resumed.step}, as kept in {resumed.directory.checkpoints}")]


def _resumed(founded: Founded) -> dict[str, Any]:
    """The settings with which a founder begins with a checkpoint."""
    resumed = founded.resumed
    if resumed is None:
        return {}
    return {"resume": resumed.step, "run_directory": resumed.directory.root.absolute()}


def _founded(foundation: Foundation, options: PeerOptions, say: Callable[[str, str], None]) -> Founded:
    # Manifests import torch: after the first line, and after what can be refused without them.
    from peers.founding_files import load_foundation, make_run, resume_run, sized_document

    if foundation.resume:
        if foundation.cut_said:
            say("cut anew", "the checkpoint is read three times and written once: some 20 s a GB")
        return resume_run(foundation, options.home)
    if foundation.model is not None:
        say("model", f"{foundation.model}: is tried, cut and whole; some seconds")
    document, said = sized_document(foundation, load_foundation(foundation))
    if foundation.tokenizer is None and foundation.model is None and "tokenizer" not in document:
        say("tokenizer", "is made from text: some seconds")
    founded = dataclasses.replace(make_run(foundation, document), said=said)
    if founded.model_files is not None:
        from swarm.models.hf.files import check_weights

        check_weights(founded.model_files)  # before anybody is invited
    return founded
