"""``swarm join``: from an invite to a peer that takes part. Everything that can be checked without calling anybody is
checked first, and nothing slow is imported before that."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from peers.commands.preflight import (
    check_announce,
    check_checkpoints,
    check_devices,
    check_listen,
    check_reporting,
    check_through,
)
from peers.console.lasting import Lasting
from peers.console.words import command_name, print_error
from peers.doctor.machine import check_before_start
from peers.exit_codes import EXIT_OK
from peers.home.last_events import done_again, newest_closing
from peers.home.places import FROZEN, RUNS
from peers.local.peer_order import NO_COMPANY, Company
from peers.options.model import PeerOptions
from peers.session import Who, echo, live, load_identity, note_end, open_session, silent
from peers.settings import exact_settings
from swarm import __version__
from swarm.clock import SystemClock
from swarm.disk import size_text
from swarm.errors import ConfigError
from swarm.ids import MAX_NAME
from swarm.membership.status_types import ENDED

if TYPE_CHECKING:
    from peers.home.places import HeldPlace
    from peers.invites.invite import Contacts
    from peers.settings import PeerSettings, Role
    from peers.sharing.limit_options import Return
    from swarm.security.credentials import Credential


CHECKPOINTS_KEPT = 3
MAX_KNOWN = 8
"""Addresses of a place's own memory that are tried alongside those of the invite."""


def join(options: PeerOptions, *, words: bool, json_lines: bool, company: Company = NO_COMPANY,
         back: Return | None = None, founder: bool = False) -> int:  # fmt: skip
    """Run one peer until its run is over or it has left; returns its exit code, 0 at once where the run has ended on
    this machine before. Blocking.

    Without an invite it waits for one in the invite file, where ``options`` name one. Of several devices each gets a
    peer in a process of its own, whose ``company`` are the others. ``back`` is who starts this one again, ``founder``
    whether it founded this run: then it holds no part of it. Raises ConfigError, Incompatible or CommandError, having
    dialled nobody, for what cannot be used.
    """
    from peers.home.places import Tenant, home_directory, take_place
    from peers.invites.invite import contacts_from, invite_on_standard_input

    say = echo if words else silent
    given = options.invite
    if given == ("-",):
        given = (invite_on_standard_input("join -"),)
    if not given and options.invite_file is not None:
        given = (_awaited(options.invite_file, say),)
    contacts = contacts_from(given)
    role: Role = "bootstrap" if founder else _checked_role(contacts, options)
    say(f"swarm {__version__}", f"joins {contacts.run_name or 'the run of a peer'} as {_title(role)}")
    check_offered(options)
    check_before_start(home_directory(options.home), say)
    if "," in options.device:
        from peers.local.siblings import join_each

        each = dataclasses.replace(options, invite=given)
        return join_each(each, home_directory(options.home), words=words, json_lines=json_lines, back=back)
    words_of_data, data = _checked_data(options, say) if role == "trainer" else ("", "")
    if words_of_data:
        say("data", words_of_data)
    home, run = home_directory(options.home), contacts.run or ""
    # Before the place is taken: what is known of its last peer goes with that. Who is started again and again by a
    # supervisor is to stop here: there is nobody left to call.
    seen = newest_closing(home, run) if run else None
    if seen is not None and seen.is_last and not done_again(home, run, seen):
        over, swarm = f"this run ended here at step {seen.step}, its last", command_name()
        again = f"if it goes on elsewhere from an earlier step: {swarm} join ADDRESS, of a peer there"
        print_error(over, next_=f"{swarm} sample, or {swarm} new for another run; {again}", label="note")
        return EXIT_OK
    if seen is not None and seen.ended:
        going_on = f"{command_name()} new --resume"
        say("known", f"{ENDED} {seen.step}, as a peer here saw: somebody must have gone on with it ({going_on})")
    tenant = Tenant(run=run, role=role, data=data, holder=contacts.invited or "")
    with take_place(home, options.place, clock=SystemClock(), tenant=tenant) as place:
        who = load_identity(place, options.name or contacts.invited)
        say("identity", who.described())
        if contacts.granted is not None:
            say("invite", _keep(place, contacts.granted.credential(who.peer)))
        say("contact", f"dialling {', '.join(contacts.addresses)}")
        peer = _peer_settings(place, who, contacts, options, role)
        place.trains_on(data)
        said = {"verbose": words, "json_lines": json_lines, "back": back, **dataclasses.asdict(company)}
        peer = peer.model_copy(update=said)
        return live(place, peer, partial(_host_here, place, peer, contacts) if options.role == "all" else None)


@contextmanager
def _host_here(place: HeldPlace, trainer: PeerSettings, contacts: Contacts, stage: int) -> Iterator[PeerSettings]:
    """Give the settings of the host of a stage in the process of a trainer that holds a ``place``, and note how it
    ended. Its own is named for that one's, so that it comes back as who it was."""
    from peers.home.places import Tenant, take_place
    from peers.local.siblings import counted_up

    options, number = trainer.options, stage + 1
    own = dataclasses.replace(
        options,
        role="stage",
        stage=stage,
        state="memory",  # of all the trainer says it
        data=None,
        eval=None,
        eval_every=None,
        listen=tuple(counted_up(address, number) for address in options.listen),
        announce=tuple(counted_up(address, number) for address in options.announce),
        preemption="none",
        preemption_url=None,
        pause_when=(),
        dashboard=None,
        report_to=None,
        report_dir=None,
    )
    tenant = Tenant(run=trainer.run or "", role="stage", data="", holder="")
    with take_place(place.path.parent, f"{place.name}-s{stage}", clock=SystemClock(), tenant=tenant) as held:
        who = load_identity(held, f"{trainer.name[: MAX_NAME - 4]}-s{stage}")
        settings = _peer_settings(held, who, contacts, own, "stage")
        settings = settings.model_copy(update={"json_lines": trainer.json_lines, "credential": trainer.credential})
        try:
            yield settings
        finally:
            note_end(held, settings)


def keep_joined(options: PeerOptions, *, words: bool, json_lines: bool) -> int:
    """Join, leave while a condition of ``--pause-when`` holds, come back, and with ``--retry`` also after a crash.

    Returns the exit code of the last life; blocking. An invite on standard input is read once. Raises ConfigError for
    one that cannot be used.
    """
    from peers.invites.invite import contacts_from, invite_on_standard_input
    from peers.local.peer_order import PeerOrder
    from peers.sharing.keeper import keep

    if options.invite == ("-",):
        options = dataclasses.replace(options, invite=(invite_on_standard_input("join -"),))
    if options.invite or options.invite_file is None:
        contacts_from(options.invite)  # one that is no good will not be any better the next time
    check_offered(options)

    def order(back: Return, last: int) -> PeerOrder:
        return PeerOrder(options=options, back=back, words=words, json_lines=json_lines)

    return keep(options, order, echo if words else silent)


def check_offered(options: PeerOptions) -> None:
    """Check what the options name of this machine, dialling nobody. Raises ConfigError for what it does not have."""
    check_listen(options.listen)
    check_announce(options.announce)
    check_through(options.through)
    if options.dashboard is not None:
        from peers.dashboard.start import check_dashboard

        check_dashboard(options.dashboard, None if options.home is None else str(options.home))
    check_devices(options.device)
    if options.part_taken != "stage" and {",", "+"} & set(options.device):
        remedy = "Start a trainer with one device; stage hosts may have several."
        raise ConfigError("--device", options.device, "one device for a trainer", remedy)
    if options.model_files is not None and not (options.model_files / "config.json").is_file():
        remedy = "Name the model's directory, or leave it out: the part is downloaded from other peers."
        raise ConfigError("--model-files", str(options.model_files), "a directory with a config.json", remedy)
    if options.checkpoints is not None:
        check_checkpoints(options.checkpoints)
    check_reporting(options.report_to, options.report_dir)


def _awaited(file: Path, say: Callable[[str, str], None]) -> str:
    from peers.invites.invite_file import await_invite, check_secret, read_invite

    if read_invite(file) is None:
        there = "which is empty" if file.exists() else "which is not there yet"
        named = shlex.quote(str(file))
        words = f"swarm new --invite-file {named} writes it, or, at a peer of the run, swarm invite --out {named}"
        say("invite", f"waits for one in {file}, {there}; {words}")
    invite = await_invite(file)
    if warning := check_secret(file, invite):
        say("invite", warning)
    return invite.text()


def _peer_settings(place: HeldPlace, who: Who, contacts: Contacts, options: PeerOptions, role: Role) -> PeerSettings:
    from peers.commands.history_source import acquaintances
    from peers.home.places import home_directory

    # Who was here before can come back through others than those of its invite. Any peer of the run will do: what it
    # serves is checked against the run's id.
    known = acquaintances(place.path, contacts.run, who.peer)[:MAX_KNOWN] if contacts.run is not None else ()
    kept = options.checkpoints or home_directory(options.home) / RUNS / "{run}"
    session = open_session(place, who, role=role, run=contacts.run or "", run_name=contacts.run_name or "")
    return exact_settings(
        home=session,
        identity=place.identity.absolute(),
        role=role,
        name=who.name,
        turn=max(1, int(place.path.name)) - 1 if place.path.name.isdigit() else 0,
        bootstrap=tuple(dict.fromkeys((*contacts.addresses, *known))),
        run=contacts.run,
        run_directory=kept.absolute(),
        frozen=(home_directory(options.home) / FROZEN).absolute(),
        checkpoints_kept=CHECKPOINTS_KEPT,
        patience_s=None,
        credential=None if contacts.run is None else place.credential(contacts.run),
        control=place.control.absolute(),
        returns=role == "bootstrap" or bool(known),
        options=options,
    )


def _checked_data(options: PeerOptions, say: Callable[[str, str], None]) -> tuple[str, str]:
    """Return a trainer's data in words, and its digest: "" for the text that every trainer has. Says how far it is."""
    # numpy and tokenizers: not for a stage host.
    from peers.data.trainer_data import EVAL, check_data, data_given, held_out_given

    lasting, held_out = Lasting(partial(say, "reading"), size_text), held_out_given(options)
    if held_out is not None:
        check_data(held_out, EVAL, lasting.told)
    data = data_given(options)
    if data is None:
        return "the text that comes with Python; your own with --data", ""
    found = check_data(data, told=lasting.told)
    return f"{data.path}: {found.words}", found.digest


def _keep(place: HeldPlace, credential: Credential) -> str:
    """Keep what admits the place's peer; returns what it does, in words."""
    try:
        place.admitted(credential.grant.run, credential.text())
    except OSError as error:
        raise ConfigError("--home", str(place.path), "a directory with room for what admits this peer",
                          "Make room, or choose another with --home.", why=str(error.strerror)) from None  # fmt: skip
    grant = credential.grant
    return f"for {grant.name}, as {grant.role}, until step {grant.until_step}"


def _checked_role(contacts: Contacts, options: PeerOptions) -> Literal["stage", "trainer"]:
    """Return the role. Raises ConfigError for one that the invite is not for, naming what says so: nobody would let
    this peer in."""
    role = options.part_taken
    if options.role == "all" and contacts.granted is not None:
        remedy = f"{command_name()} join INVITE --role trainer; others hold the stages, with invites of their own"
        raise ConfigError("--role", "all", "a role of one peer: the invite is for one", remedy)
    if contacts.granted is None or (grant := contacts.granted.grant.grant).allows(role):
        return role
    if grant.role == "observer":
        next_ = f"{command_name()} dashboard INVITE looks on; to join ask for an invite as {role}"
    else:
        data = " --data TEXT" if grant.role == "trainer" else ""
        next_ = f"{command_name()} join INVITE --role {grant.role}{data}; or ask for an invite as {role}"
    if options.role != "auto":
        raise ConfigError("--role", role, f"{grant.role}, for which the invite is", next_)
    if options.data is not None:
        raise ConfigError("--data", str(options.data), f"nothing: the invite is for {grant.role}", next_)
    why = f"it is for {grant.role}, and without --role and --data this peer is a stage host"
    raise ConfigError("INVITE", f"for {grant.name}", "an invite for a stage host", next_, why=why)


def _title(role: str) -> str:
    return {"bootstrap": "its founder", "stage": "a stage host"}.get(role, f"a {role}")
