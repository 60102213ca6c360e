"""What members wait for that only peers or people can bring back, in words: every screen and status says the same.

Pure, but for this machine's time zone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from swarm.clock import moment
from swarm.columns import takes
from swarm.consensus.copies import copy_holders, to_spare
from swarm.consensus.roster import (
    NO_PARTS,
    ROUTES,
    TRAINERS,
    HowToJoin,
    Roster,
    join_words,
    lacking,
    lost_parts,
    lost_replicas,
)
from swarm.errors import Advice
from swarm.ids import ENDS, PartName, PeerId


def awaited_majority(there: int, voters: int, needed: int, alone_at: float | None) -> str:
    """Return what a minority waits for. ``alone_at`` (seconds since the epoch) is when it goes on by itself, None:
    never."""
    few = f"a majority: {there} of {voters} voters answer, {needed} are needed"
    if alone_at is None:
        return f"{few}, however long that takes"
    return f"{few}; without it, from {moment(alone_at)} on those that are there go on provisionally"


def few_voters(voters: int) -> str:
    """Return what the death of one voter costs a run that has fewer than three; "" for one with more, or with none
    yet."""
    if voters == 1:
        return (
            "one voter only: while it is away nothing is decided, until it is started again where it was; three can "
            "lose one of them"
        )
    if voters == 2:
        return (
            "two voters only: while one is away nothing is decided for good; who died counts again once it is started "
            "where it was; three can lose one of them"
        )
    return ""


def awaited_round(part: PartName, reason: str) -> str:
    """Return what a leader waits for whose rounds break again and again, and nobody knows on whom."""
    return f"a round of {part} that does not break, as {reason or 'nobody says why'}: nobody agrees on whom it broke"


def awaited_numbers(count: int, reason: str) -> str:
    """Return what a leader waits for where all that trainers try is put aside."""
    return f"a microbatch that can be computed: {count} of this step were put aside, one of them as {reason}"


def awaited_agreement(roster: Roster, part: PartName, peers: Collection[str]) -> str:
    """Return what a leader waits for where of all these replicas as many hold one result as another, and what can be
    done."""
    named = " and ".join(sorted(roster[peer].name or peer for peer in peers))
    return (
        f"{named} to agree on {part}: each is asked to compute it again, for nobody knows which is right; if it goes "
        "on, end the one whose machine you trust less"
    )


def awaited_answer(roster: Roster, late: Mapping[PeerId, str]) -> str:
    """Return what a leader waits for who has nobody else than these, who are there and gave no good answer; "" for
    none."""
    named = ", ".join(f"{roster[peer].name or peer} ({why})" for peer, why in late.items())
    return f"an answer, for which is asked again, of {named}" if named else ""


def awaited_others(roster: Roster, differing: Collection[PeerId]) -> str:
    """Return what a leader waits for where of a part only these are there, who differ from what most held; "" for
    none."""
    named = ", ".join(f"{roster[peer].name or peer} of {roster[peer].part}" for peer in differing)
    return f"another replica besides {named}, which holds other numbers than most did" if named else ""


def awaited_holders(
    roster: Roster,
    gone: Mapping[PeerId, str],
    copies: int,
    kept: Collection[str] | None = None,
    how: HowToJoin = join_words,
) -> str:
    """Return who must come so that every part is held again; "" when all are. ``kept`` are the lost parts of which a
    copy is known to be there, and nobody who keeps one can be spared; None: that is judged by who should keep them."""
    return "; ".join(_holder(roster, part, gone, copies, kept, how) for part in lost_parts(roster, gone))


def _holder(
    roster: Roster,
    part: str,
    gone: Mapping[PeerId, str],
    copies: int,
    kept: Collection[str] | None,
    how: HowToJoin,
) -> str:
    if part == TRAINERS:
        lost = _named(roster, roster.trainers)
        return f"a trainer to join ({how(None)}): {lost} lost, and nobody else feeds the run"
    if part == ROUTES and roster.owners:
        waits = f"; or a host of {', '.join(roster.paused)}, whose trainers wait" if roster.paused else ""
        return f"a trainer to join ({how(None)}): {_named(roster, roster.trainers)} lost or waiting{waits}"
    if part == ROUTES:
        lost = _named(roster, [peer for peer in roster.peers if peer in gone and roster.borders.home(peer)])
        return (
            f"an organisation with a trainer and every stage: {lost} lost; next: start one where it was, or have a "
            "peer join with an invite that names an organisation which lacks it"
        )
    if owner := roster.owners.get(part):
        lost = lost_replicas(roster, PartName(part), gone)
        return f"a host of {part}: {lost}; {owner} keeps it to itself; next: {owner} starts one where it was"
    replicas = roster.replicas(PartName(part))
    there = [peer for peer in copy_holders(roster, PartName(part), copies) if peer not in gone]
    if not (there if kept is None else part in kept):
        lost = lost_replicas(roster, PartName(part), gone)
        unless = ", unless it is there again" if kept is None else ""  # who asks to join tells the leader alone
        start = f"start {_names(roster, replicas)} where it was{unless}"
        return f"a replica of {part}: {lost}; nobody keeps a copy; next: {start}"
    if kept is None and to_spare(roster, gone, part):
        return f"{part} to be taken over from a copy: {_named(roster, replicas)} lost"
    who = "a trainer" if part == ENDS else "a stage host"
    return f"{who} to join for {part} ({how(PartName(part))}): {_named(roster, replicas)} lost; a copy is kept"


def awaited_near(roster: Roster, me: PeerId, gone: Collection[str], how: HowToJoin = join_words) -> str:
    """Return what trainers of our organisation wait for, where microbatches stay in it and it lacks a stage, or where
    it keeps to itself what they pass, with what can be done; "" for nothing."""
    if roster.owners:
        return _awaited_own(roster, me, how)
    borders = roster.borders
    if not borders.drawn or me not in roster:
        return ""
    if not (home := borders.home(me)):
        none = "this peer's organisation, which no invite names: microbatches pass nobody without one"
        return f"{none}; next: ask an issuer for an invite that names it, and join anew"
    if not any(borders.near(me, trainer) for trainer in roster.trainers):
        return ""
    wanted = [part for at, part in lacking(roster, gone) if at == home]
    if not wanted:
        return ""
    return (
        f"a host of {' and of '.join(wanted)} in {home}, whose trainers wait while others go on; next: {home} starts "
        f"one ({how(wanted[0])}), with an invite that names {home}"
    )


def _awaited_own(roster: Roster, me: PeerId, how: HowToJoin) -> str:
    if me not in roster or roster[me].role != "trainer":
        return ""
    part = next((part for part in roster.paused if takes(part, roster[me].choice)), None)
    if part is None:
        return ""
    owner = roster.owners[part]
    return (
        f"a host of {part}, which {owner} keeps to itself: its trainers wait while others train on; next: {owner} "
        f"starts one where it was, or another ({how(part)}), with an invite that names {owner}"
    )


ONCE_WANTED = f"the run goes back to a checkpoint once that is wanted: {Advice.SAY_SO}"
"""What is said beside such parts by who does not lead, in a run that asks."""


def awaited_word(roster: Roster, gone: Collection[PeerId], copies: int) -> str:
    """Return what a run that asks waits for, too, where nobody who is there should keep a copy of a lost part; else
    ""."""
    lost = [PartName(part) for part in lost_parts(roster, gone) if part not in (*NO_PARTS, *roster.owners)]
    return ONCE_WANTED if any(set(copy_holders(roster, part, copies)) <= set(gone) for part in lost) else ""


def awaited_return(then: str, until: float) -> str:
    """Return what is said beside lost parts of which nobody keeps a copy: what comes ``then``, or is in the way, and
    when those that are left end (seconds since the epoch), if nothing does."""
    return f"{then}; if nobody comes, those that are left end at {moment(until)}"


def _names(roster: Roster, peers: Collection[PeerId]) -> str:
    return " or ".join(roster[peer].name or peer for peer in peers)


def _named(roster: Roster, peers: Collection[PeerId]) -> str:
    names = [roster[peer].name or peer for peer in peers]
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
