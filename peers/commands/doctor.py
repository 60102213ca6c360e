"""Runs ``swarm doctor``: the quick checks, then those that take seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from peers.commands.preflight import check_through
from peers.console.words import command_name
from peers.doctor.machine import LIMIT_S, DoctorWishes, check_wishes, judge_machine, look
from peers.doctor.results import CheckResult, DoctorReport, refused
from peers.home.places import home_directory
from peers.options.model import ANY_PORT
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from peers.invites.invite import Contacts


def read_wishes(
    typed: Mapping[str, str | None], *, invite: Sequence[str], listen: Sequence[str], through: Sequence[str] = ()
) -> DoctorWishes:
    """Return what was typed, by option, as what to look at. Raises ConfigError for what is no number."""
    wanted = tuple(listen)
    if (port := typed["port"]) is not None:
        wanted = (*wanted, f"{ANY_PORT.removesuffix('0')}{int(_number('--port', port, 1, 65535))}")
    return DoctorWishes(
        invite=tuple(invite),
        listen=wanted or (ANY_PORT,),
        through=tuple(through),
        device=typed["device"] or "auto",
        threads=int(_number("--threads", typed["threads"] or "1", 1, 1024)),
        limit_s=_number("--timeout", typed["timeout"] or str(LIMIT_S), 5, 3600),
        home=home_directory(typed["home"]),
    )


def _number(option: str, typed: str, low: int, high: int) -> float:
    try:
        value = float(typed)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise ConfigError(option, typed, f"a number from {low} to {high}", "Correct it, or leave it out.")
    return value


def examine(wishes: DoctorWishes, *, quick: bool, show: Callable[[CheckResult], None]) -> DoctorReport:
    """Look at this machine and, unless it is to be ``quick``, at the run of the invite; ``show`` gets each result as it
    comes. Blocking, for ``limit_s`` at most. Leaves nothing."""
    report = DoctorReport(show)
    facts = look(wishes.home)
    report.add(*judge_machine(facts), *check_wishes(facts, wishes.device, wishes.listen))
    contacts = _invited(wishes, report)
    if wishes.through:
        check_through(wishes.through)
    if not quick:
        import asyncio

        from peers.doctor.slow import SlowChecks, still_working
        from swarm.clock import SystemClock

        if wishes.through and report.passed("port"):
            from peers.doctor.through import check_relays

            report.add(asyncio.run(check_relays(wishes.through, wishes.listen, SystemClock())))
        asyncio.run(SlowChecks(wishes, report, facts, contacts, SystemClock()).run())
        report.unfinished = still_working()
    return report


def _invited(wishes: DoctorWishes, report: DoctorReport) -> Contacts | None:
    if not wishes.invite:
        swarm = command_name()
        words = f"what depends on the run: {swarm} doctor INVITE"
        if not wishes.through:
            words += f"; whether others can call this machine: {swarm} doctor --through ADDRESS, of a relay elsewhere"
        report.add(CheckResult(name="invite", found=words, level="skipped"))
        return None
    from peers.invites.invite import contacts_from, invite_on_standard_input

    try:
        given = wishes.invite if wishes.invite != ("-",) else (invite_on_standard_input("doctor -"),)
        contacts = contacts_from(given)
    except ConfigError as error:
        report.add(refused("invite", "cannot be used", error))
        return None
    title = f"to {contacts.run_name} ({contacts.run[:12]})" if contacts.run else "to whatever run is there"
    at = "1 address" if len(contacts.addresses) == 1 else f"{len(contacts.addresses)} addresses"
    report.add(CheckResult(name="invite", found=f"{title}, {at}", facts={"addresses": list(contacts.addresses)}))
    return contacts
