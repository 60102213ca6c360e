"""``swarm new``: from a preset, a RUN.toml or a checkpoint to a run that others can join, served by this peer."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from peers.commands.preflight import check_announce, check_listen, check_output, check_reporting, check_through
from peers.console.lasting import Lasting
from peers.console.words import command_name, count, listed, print_error
from peers.doctor.contacts import probe_relays
from peers.doctor.machine import check_before_start
from peers.exit_codes import EXIT_UNREACHABLE
from peers.home.places import RUNS, Tenant, home_directory, list_places, take_place
from peers.home.run_directory import RunDirectory
from peers.home.sessions import founded_in
from peers.options.foundation import Foundation
from peers.options.model import PeerOptions
from peers.profiles import profile_lines
from peers.session import echo, live, load_identity, open_session, silent
from peers.settings import exact_settings
from swarm import __version__
from swarm.clock import SystemClock
from swarm.columns import host_parts
from swarm.consensus.trials import FEWEST_TRAINERS
from swarm.disk import size_text
from swarm.errors import ConfigError
from swarm.ids import PeerId

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from peers.commands.comeback import Past
    from peers.founding_files import Founded
    from peers.home.places import HeldPlace
    from peers.local.peer_order import PeerOrder
    from peers.sharing.limit_options import Return
    from swarm.config import Manifest
    from swarm.models.spec import SplitConfig
    from swarm.state.frozen import FrozenStore


def keep_founding(foundation: Foundation, options: PeerOptions, *, words: bool, json_lines: bool) -> int:
    """Found a run, and start its founder again after a crash or when nobody of the run could be reached: then it comes
    back to that run. Returns the exit code of the last life; blocking. Raises ConfigError for a home that is not there.
    """
    from peers.local.peer_order import PeerOrder
    from peers.sharing.keeper import keep

    home, known = home_directory(options.home), foundation

    def order(back: Return, last: int) -> PeerOrder:
        nonlocal known
        if (file := founded_by(home, last)) is not None:
            known = Foundation(file=file)
        return PeerOrder(options=options, foundation=known, back=back, words=words, json_lines=json_lines)

    return keep(options, order, echo if words else silent)


def founded_by(home: Path, process: int) -> Path | None:
    """Return the manifest of the run that a process founded in a place of this home; None where it has not."""
    for place in list_places(home):
        if place.state is not None and place.state.pid == process and place.state.run:
            return founded_in(place.path, place.state.run)
    return None


def new(
    foundation: Foundation, options: PeerOptions, *, words: bool, json_lines: bool, back: Return | None = None
) -> int:
    """Found a run and serve it in the foreground until it is over; returns the exit code. Blocking.

    Waits for its peers for ever. ``options`` say where it listens and lives; what is about data and stages is not
    used. Who founded that very run before, as its files or the invite in ``invite_file`` say, comes back to it, or
    founds it again where it had not begun.

    ``back`` is who starts this one again. Raises ConfigError, Incompatible, CommandError or StateError, having left
    nothing, for what cannot be run.
    """
    say = echo if words else silent
    if options.invite_file is not None:
        check_output("--invite-file", options.invite_file)
    past = None if foundation.resume or options.invite_file is None else _invited(options.invite_file, options)
    if past is not None:
        if past.contacts:
            say(f"swarm {__version__}", "comes back to the run that it founded")
            return _come_back(past, options, words=words, json_lines=json_lines, back=back)
        foundation = Foundation(file=past.manifest)
    home = home_directory(options.home)  # first: it may not be there, and a tokenizer takes seconds
    say(f"swarm {__version__}", "goes on with a run" if foundation.resume else "founds a run")
    _check(options, home, say)
    founded = _founded(foundation, options, say)
    from peers.checkpoints.writer import keep_run
    from peers.frozen import frozen_store, store_of

    store = frozen_store(options.home) if founded.resumed is None else store_of(founded.resumed.directory)
    if past is None and foundation.file is not None and not foundation.resume:
        founded = _as_known(founded, home, store, say)
        past = _past(founded.manifest, foundation.file, home, options, say)
        if past is not None and past.contacts:
            return _come_back(past, options, words=words, json_lines=json_lines, back=back)
    if past is not None:
        options = dataclasses.replace(options, place=past.place.name)
    options = _as_issuer(founded, home, options, say)
    founded = _frozen(founded, store, say)
    taken = take_place(
        home, options.place, clock=SystemClock(), tenant=Tenant(run=founded.manifest.run_id, role="bootstrap")
    )
    with taken as place:
        who = load_identity(place, options.name)
        founded = with_issuer(founded, who.peer)
        _check_alone(founded.manifest, home, place)
        for label, text in summary(founded):
            say(label, text)
        say("identity", who.described())
        run, run_id = founded.manifest.run, founded.manifest.run_id
        session = open_session(place, who, role="bootstrap", run=run_id, run_name=run.name)
        directory = RunDirectory(session)
        keep_run(directory, founded.manifest, founded.files)
        say("files", f"{session}")
        peer = exact_settings(
            home=session,
            identity=place.identity.absolute(),
            role="bootstrap",
            name=who.name,
            manifest=directory.manifest,
            model_files=founded.model_files,
            frozen=store.root.absolute(),
            **_kept(founded, home),
            patience_s=None,
            credential=place.credential(run_id),
            control=place.control.absolute(),
            options=options.of_founder(),
            back=back,
            verbose=words,
            json_lines=json_lines,
        )
        return live(place, peer)


def print_config(foundation: Foundation, *, as_json: bool) -> None:
    """Print the manifest of a run that could be founded, with every key and where its value comes from.

    What founding adds is left open: nonce, tokenizer, digests of frozen weights, the issuer. Raises ConfigError as
    founding does.
    """
    from peers.founding_files import load_foundation, origins_of, pending, sized_document
    from peers.manifest_file import render_config
    from swarm.config import parse_manifest

    document, _ = sized_document(foundation, load_foundation(foundation))
    manifest, origins = parse_manifest(pending(document), str(foundation.file or "the preset")), {"run.nonce": "random"}
    origins |= origins_of(foundation, document)
    if as_json:
        told = json.dumps({"schema": 1, "config": manifest.model_dump(mode="json"), "from": origins})
    else:
        beside = "" if foundation.model is None else f" --model {shlex.quote(foundation.model)}"
        told = f"# Found a run with it: {command_name()} new RUN.toml{beside}\n{render_config(manifest, origins)}"
    sys.stdout.write(f"{told.rstrip()}\n")


def with_issuer(founded: Founded, founder: PeerId) -> Founded:
    """Return a run that not everybody may join with its founder as the issuer, where it names none yet."""
    manifest = founded.manifest
    if not manifest.admission.closed or manifest.admission.issuers:
        return founded
    named = manifest.admission.model_copy(update={"issuers": (str(founder),)})
    return dataclasses.replace(founded, manifest=manifest.model_copy(update={"admission": named}))


def _as_issuer(founded: Founded, home: Path, options: PeerOptions, say: Callable[[str, str], None]) -> PeerOptions:
    """Return the options with the place of an issuer, where a run that not everybody may join goes on: anyone else who
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
        for label, text in probe_relays(options.through):
            say(label, text)
    if options.dashboard is not None:
        from peers.dashboard.start import check_dashboard

        check_dashboard(options.dashboard, None if options.home is None else str(options.home))
    check_reporting(options.report_to, options.report_dir)
    check_before_start(home, say)


def _as_known(founded: Founded, home: Path, store: FrozenStore, say: Callable[[str, str], None]) -> Founded:
    """Return a run as its founder here completed it, so that its id is known: with the digests of its frozen weights
    and the issuer that its file may leave out. Raises as :func:`peers.frozen.with_frozen`."""
    from peers.home.sessions import sessions_of
    from swarm.models.registry import lora_of

    if (lora := lora_of(founded.manifest.model)) is not None and not lora.digests:
        founded = _frozen(founded, store, say)
    for place in list_places(home):
        if place.state is not None and place.state.peer:
            completed = with_issuer(founded, PeerId(place.state.peer))
            if sessions_of(place.path, completed.manifest.run_id):
                return completed
    return founded


def _frozen(founded: Founded, store: FrozenStore, say: Callable[[str, str], None]) -> Founded:
    """Return a run with its frozen weights in the store, and says how far that is. Raises as
    :func:`peers.frozen.with_frozen`."""
    from peers.frozen import with_frozen

    told = partial(say, "frozen")
    lasting = Lasting(partial(say, "freezing"), size_text).told
    manifest = with_frozen(founded.manifest, founded.model_files, store, told, lasting)
    return dataclasses.replace(founded, manifest=manifest)


def _past(
    manifest: Manifest, file: Path, home: Path, options: PeerOptions, say: Callable[[str, str], None]
) -> Past | None:
    """Find here the founder of a run that was founded before, so that it comes back or founds it again; None where the
    run is to be founded first. Raises CommandError and ConfigError as :func:`peers.commands.comeback.judge`, and
    CommandError for a ``file`` with which it was founded elsewhere."""
    from peers.commands.comeback import check_founded_nowhere, seen_here, way_back

    seen = seen_here(home, manifest.run_id, manifest.run.name, manifest.admission.issuers)
    past = way_back(home, seen, options.place)
    if past is None:
        check_founded_nowhere(file, manifest.run_id, home)
    else:
        here = past.place.described
        say("known", f"the run has begun: {here} comes back to it" if past.contacts else f"{here} founds it again")
    return past


def _check_alone(manifest: Manifest, home: Path, place: HeldPlace) -> None:
    """Note the run in this place, and check that no other founder of it has done so: of two that are started at once
    one sees the other. Raises CommandError, and ConfigError where the disk refuses."""
    from peers.commands.comeback import check_no_founder, seen_here

    try:
        place.joined(manifest.run_id, manifest.run.name)
    except OSError as error:
        raise ConfigError("--home", str(place.path), "a directory with room for a session",
                          "Make room, or choose another with --home.", why=str(error.strerror)) from None  # fmt: skip
    seen = seen_here(home, manifest.run_id, manifest.run.name, manifest.admission.issuers)
    check_no_founder(seen, beside=place.name)


def _invited(file: Path, options: PeerOptions) -> Past | None:
    """Find in this home the run whose invite the file holds, and whether its founder comes back to it; None if it holds
    none. Raises ConfigError when this home did not found it, or was lost, and as :func:`_past`."""
    from peers.commands.comeback import seen_here, way_back
    from peers.invites.invite_file import read_invite
    from swarm.network.addresses import parse_address, split_peer

    invite = read_invite(file) if file.is_file() else None  # to read a pipe would wait for who writes into it
    if invite is None:
        return None
    founders = {split_peer(parse_address(address))[1] for address in invite.at}
    home = home_directory(options.home)
    seen = seen_here(home, invite.run, invite.name, founders)
    past = way_back(home, seen, options.place) if seen.founders else None
    if past is None or not (past.contacts or past.manifest):
        raise ConfigError("--invite-file", str(file), "a new file, or one with the invite of a run founded here",
                          "To found another: name another file. To join that one: "
                          f"{command_name()} join --invite-file {file}",
                          why=f"it is the invite to {invite.name}, {invite.run[:12]}, which this home did not found",
                          )  # fmt: skip
    return past


def _come_back(past: Past, options: PeerOptions, *, words: bool, json_lines: bool, back: Return | None) -> int:
    """Join as who it was, through the others: a holder of the old invite finds it again at the same address. It holds
    no part, as before: a stage host could keep no copy of private ends."""
    from peers.commands.join import join
    from peers.invites.invite import parse_invite

    member = dataclasses.replace(  # what was said of data and stages founds a run, too, where it is not used
        options.of_founder(),
        name=options.name,
        place=past.place.name,
        invite=past.contacts,
        invite_file=None,
    )
    code = join(member, words=words, json_lines=json_lines, back=back, founder=True)
    if code == EXIT_UNREACHABLE:
        from peers.commands.comeback import nobody_left, seen_here

        invite = parse_invite(past.contacts[0])
        seen = seen_here(home_directory(options.home), invite.run, invite.name, ())
        print_error("nobody of the run that could be asked let its founder in", label="note",
                    next_=f"the same command once they do; {nobody_left(seen)}")  # fmt: skip
    return code


def summary(founded: Founded) -> list[tuple[str, str]]:
    """Describe the run as (label, text), for a person who is about to invite others to it."""
    from swarm.models.registry import family_of
    from swarm.planning.costs import model_parameter_count

    manifest = founded.manifest
    run, model, batch, optimizer = manifest.run, manifest.model, manifest.batch, manifest.optimizer
    family = family_of(model)
    tokens = batch.microbatch_size * manifest.step_microbatches * model.context
    start, warmup = run.start_when, count(optimizer.warmup_steps, "step")
    if manifest.averaging.mode == "local":  # whose steps are many batches, each with a learning rate
        warmup = f"{optimizer.warmup_steps} batches"
    return [
        ("run", f"{run.name}, {manifest.run_id[:12]}, wire version {run.wire}"),
        ("model", f"{model_parameter_count(model):,} parameters: {family.described}"),
        *([("mixture", family.mixing)] if family.mixing else []),
        ("memory", _memory(manifest)),
        ("stages", f"{manifest.split.stages}, sending {manifest.codecs.described}; ends {manifest.split.ends}"),
        *_experts(manifest.split),
        *_shared(manifest),
        ("step", f"{manifest.step_microbatches} microbatches of {batch.microbatch_size} rows: {tokens:,} tokens"),
        ("optimizer", f"{optimizer.described}, learning rate {optimizer.lr:g} after {warmup}"),
        ("averaging", manifest.averaging.described),
        *(profile_lines(founded.profile, manifest.model_dump(mode="json")) if founded.profile else ()),
        ("tokenizer", f"{manifest.tokenizer.digest[:16]}, from {founded.tokenizer_from}"),
        ("starts", f"when {count(start.stage_hosts, 'stage host')} and {count(start.trainers, 'trainer')} are here"),
        *_admission(manifest),
        *_checks(manifest),
        *_votes(manifest),
        ("ends", f"after {count(run.steps, 'step')}"),
        *_private(manifest),
        *_alone(manifest),
        *founded.said,
        *_goes_on(founded),
    ]  # fmt: skip


def _experts(split: SplitConfig) -> list[tuple[str, str]]:
    """Return how many variants stages have, and how microbatches find theirs, where any stage has more than one."""
    if not split.variants:
        return []
    by = f"the domain of its trainer: {listed(split.domains)}" if split.route_by == "domain" else "its text"
    widths = ", ".join(map(str, split.variants))
    said = [("experts", f"{widths} a stage; a microbatch passes one of each, by {by}")]
    return said + [("own", f"{domain}: {owner} alone holds and feeds it") for domain, owner in split.own.items()]


def _shared(manifest: Manifest) -> list[tuple[str, str]]:
    """Return how long stages share their layers, where they do, and what that gives."""
    from swarm.models.registry import delinked_at, shares

    if not shares(manifest.model):
        return []
    step = delinked_at(manifest.model)
    until = f"to the end of step {step}, then each goes on by itself" if step else "to the end"
    return [("shared", f"all stages have the same layers {until}: any host serves any of them")]


def _memory(manifest: Manifest) -> str:
    """Return what the largest part takes of the one who trains it."""
    from swarm.membership.part_memory import part_training_bytes
    from swarm.models.registry import family_of

    specs = family_of(manifest.model).parts(manifest.split)
    parts = {spec.name: part_training_bytes(manifest, spec) for spec in specs}
    largest = max(parts, key=lambda name: parts[name])
    return f"{size_text(parts[largest])} and activations for the largest part, {largest}"


def _admission(manifest: Manifest) -> list[tuple[str, str]]:
    """Return who may join, where that is not everybody."""
    admission = manifest.admission
    if not admission.closed:
        return []
    how = "who has an invite for one peer" if admission.mode == "token" else "the peers that issuers name"
    said = [("admits", f"{how}; {count(len(admission.issuers), 'issuer')}, {admission.threshold} must sign")]
    if manifest.split.own_routes:
        own = f"microbatches stay in the organisation of their trainer; this one is {admission.organisation}"
        said.append(("routes", f"{own}; each needs a host of every stage, and only sums leave it"))
    return said


def _checks(manifest: Manifest) -> list[tuple[str, str]]:
    """Return what is checked of what others compute, where anything is."""
    averaging, influence, audit = manifest.averaging, manifest.optimizer.influence, manifest.verify.audit
    compared = [
        *(["sums far from the others are left out"] if averaging.guard != "none" else []),
        *([f"{100 * averaging.check:g} % of the means are computed again"] if averaging.check else []),
    ]
    said = [
        *([f"where three or more replicas hold a part, {' and '.join(compared)}"] if compared else []),
        *([f"no microbatch weighs more than {influence:g} times the usual"] if influence else []),
        *([_tested(manifest.run.start_when.trainers)] if manifest.optimizer.trainer_test else []),
        *([f"{100 * audit:g} % of what replicas compute is computed again by others"] if audit else []),
    ]
    return [("checks", "; ".join(said))] if said else []


def _tested(trainers: int) -> str:
    few = f"; with {trainers} at the start nobody is judged" if trainers < FEWEST_TRAINERS else ""
    return f"of {FEWEST_TRAINERS} trainers and more one that pulls against the others feeds nothing{few}"


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
    trusted = "hosts of the first and the last stage can read the trainers' text: trust them with it"
    told, copies = [("private", trusted)], manifest.run.copies
    if getattr(manifest.model, "lora", None) is not None:
        told.append(("", "the ends are frozen, and every peer can have them: the hosts of stages read more of it"))
    if getattr(manifest.model, "scratch", True) is False:
        told.append(("", "anyone with the model's files has the ends that it begins with, and reads more of it"))
    if copies > 1:
        told.append(("copies", f"{copies} of each stage; of the ends 1, the founder's: stage hosts keep none"))
    return told


def _alone(manifest: Manifest) -> list[tuple[str, str]]:
    """Of a run that keeps no copies: the parts that one peer alone holds at its start, and so one machine. Where copies
    are kept, who is on which machine is known once they have joined: ``swarm status`` says it then. Pure."""
    start, split = manifest.run.start_when, manifest.split
    if manifest.run.copies:
        return []
    once = max(0, 2 * len(host_parts(split.parts)) - start.stage_hosts)
    parts = [count(once, "variant" if split.variants else "stage")] if once else []
    frozen = getattr(manifest.model, "lora", None) is not None  # nothing of the ends is trained: anybody makes them
    if split.ends == "private" and start.trainers == 1 and not frozen:
        parts.append("the ends")
    if not parts:
        return []
    why = "run.copies = 0: where that one dies, the run goes back to a checkpoint, or waits"
    return [("on one machine", f"only, at the start: {' and '.join(parts)}; {why}. More hosts and trainers, or copies")]


def _goes_on(founded: Founded) -> list[tuple[str, str]]:
    resumed = founded.resumed
    if resumed is None:
        return []
    passed_over = [("not from", why) for why in resumed.passed_over]
    return [*passed_over, ("goes on", f"after step {resumed.step}, as kept in {resumed.directory.checkpoints}")]


def _kept(founded: Founded, home: Path) -> dict[str, Any]:
    """The settings of where a founder keeps what nobody else may, as the run ends, and begins with a checkpoint."""
    resumed = founded.resumed
    if resumed is None:
        return {"run_directory": (home / RUNS / "{run}").absolute()}
    return {"resume": resumed.step, "run_directory": resumed.directory.root.absolute()}


def _founded(foundation: Foundation, options: PeerOptions, say: Callable[[str, str], None]) -> Founded:
    # Manifests import torch: after the first line, and after what can be refused without them.
    from peers.founding_files import load_foundation, make_run, resume_run, sized_document

    if foundation.resume:
        if foundation.cut_said:
            say("cut anew", "the checkpoint is read three times and written once: some 20 s a GB")
        return resume_run(foundation, options.home, say)
    if foundation.model is not None:
        say("model", f"{foundation.model}: is tried, cut and whole; some seconds")
    document, said = sized_document(foundation, load_foundation(foundation), say)
    if foundation.tokenizer is None and foundation.model is None and "tokenizer" not in document:
        say("tokenizer", "is made from text: some seconds")
    founded = make_run(foundation, document)
    founded = dataclasses.replace(founded, said=(*founded.said, *said))
    if founded.model_files is not None:
        from swarm.models.hf.files import check_weights

        check_weights(founded.model_files)  # before anybody is invited
    return founded
