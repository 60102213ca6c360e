"""Every story of the table: its faults strike, everybody else sees the run to its end, and the run keeps its
invariants: one history, every microbatch once, none lost, and cursors that say so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest

from peers.chaos.faults import Kill
from peers.chaos.invariants.check import check_run
from swarm.averaging.schedules import SCHEDULES
from swarm.events import (
    AttemptFailed,
    DigestMismatch,
    LineageBegan,
    LineageConfirmed,
    LineageGivenUp,
    Participation,
    PeerLost,
    PeerReady,
    QuorumLost,
    RosterChanged,
    RoundDone,
    StepClosed,
    StepGivenUp,
    Waiting,
)
from tests.swarms.conftest import QUICK, TABLE
from tests.swarms.playing import Play
from tests.swarms.stories import STORIES
from tests.swarms.story import DONE

Digests = list[Mapping[str, str]]


@pytest.fixture(scope="module")
def weights_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Digests]:
    """After each step of a story that others are compared with."""
    return cache(lambda name: digests(Play(tmp_path_factory.mktemp(name) / "life", STORIES[name]).live()))


def records(play: Play) -> list[Mapping[str, object]]:
    """The longest history of any that saw the run to its end."""
    return max((play.swarm.history(name) for name, peer in play.swarm.peers.items() if peer.outcome == DONE), key=len)


def digests(play: Play) -> Digests:
    return [record["digests"] for record in records(play)]  # type: ignore[misc]


@pytest.mark.parametrize("name", STORIES)
def test_run_goes_on_exactly_whatever_happens(name: str, tmp_path: Path, weights_of: Callable[[str], Digests]) -> None:
    play = Play(tmp_path / "life", STORIES[name]).live()
    assert (play.error, play.missing(), play.unended) == ("", [], [])
    ends = {one: peer.outcome for one, peer in play.swarm.peers.items() if not play.swarm.is_dead(one)}
    for one, words in ENDS.get(name, {}).items():
        assert words in repr(ends.pop(one))
    assert ends == dict.fromkeys(ends, DONE)
    check_whole(play)
    if STORIES[name].weights_of:
        assert digests(play) == weights_of(STORIES[name].weights_of)
    if name in MORE:
        MORE[name](play)


def check_whole(play: Play) -> None:
    """One history of all steps, and nobody is missed but who was hit, once."""
    report = check_run([play.root])
    report.assert_sound()
    history = records(play)
    assert report.steps == play.swarm.manifest.run.steps == len(history) - 1
    assert not play.swarm.events(DigestMismatch)
    assert play.plan is not None
    assert {event.name for event in play.swarm.events(PeerLost)} <= play.hit() | {"late"}
    for fired in play.plan.fired.values():
        for peer in fired.ids if isinstance(fired.strike.fault, Kill) else ():
            assert [peer in record["absent"] for record in history].count(True) == 1  # type: ignore[operator]


ENDS: Mapping[str, Mapping[str, str]] = {
    "kill-server": {"host-2": "no peer can join with it"},
    "twin": {"host-1-again-1": "is in the run already"},
    "leave-host": {"host-1": "it left in order after step 2"},
    "leave-trainer": {"trainer-1": "it left in order after step 2"},
    "leave-founder": {"bootstrap": "it left in order after step 2"},
}
"""Who does not see the run to its end, and why, in its own words."""


def rounds(play: Play, step: int = 0) -> list[RoundDone]:
    """In which the replicas of the one stage averaged; of one step, or of all."""
    found = play.swarm.events(RoundDone)
    return [event for event in found if event.part == "stage-0" and step in (0, event.step)]


def check_pairs(play: Play) -> None:
    """Groups of two that swap, at each of the two steps."""
    assert Counter((event.round, event.members) for event in rounds(play)) == {(0, 2): 8, (1, 2): 8}


def check_hierarchy(play: Play) -> None:
    """Regions first, then one of each, then regions again."""
    assert Counter((event.round, event.members) for event in rounds(play)) == {(0, 2): 8, (1, 2): 4, (2, 2): 8}


def check_server(play: Play) -> None:
    """Who only dials out averages with all others, and the roster says what it is."""
    own = play.swarm.peers["host-1"].events.of(RoundDone)
    assert [event.members for event in own] == [4, 4]
    assert {one["name"] for one in play.swarm.history()[0]["roster"] if one.get("outgoing")} == {"host-1"}


def check_schedule(play: Play) -> None:
    """Every round has that one."""
    check_reasons(play)
    assert {event.schedule for event in rounds(play)} == {play.swarm.manifest.averaging.schedule}


def check_reasons(play: Play) -> None:
    """All members name the same schedule, and why."""
    chosen: dict[tuple[int, str], set[tuple[str, str]]] = {}
    for event in play.swarm.events(RoundDone):
        chosen.setdefault((event.step, event.part), set()).add((event.schedule, event.reason))
    assert all(len(each) == 1 for each in chosen.values()), chosen
    assert all(reason for each in chosen.values() for _, reason in each)


def check_auto(play: Play) -> None:
    check_reasons(play)
    for event in rounds(play):
        assert event.schedule in SCHEDULES
        assert ("measured yet" if event.step == 1 else "expected") in event.reason


def check_three_are_left(play: Play) -> None:
    """Three average, at once, in the last step."""
    last = play.swarm.manifest.run.steps
    wanted = play.swarm.manifest.averaging.schedule
    assert {(event.round, event.members) for event in rounds(play, last)} == {(0, 3)}
    assert {event.schedule for event in rounds(play, last)} == {wanted}


def check_lost_server(play: Play) -> None:
    """Those who can dial out alone go on as one, and the other is told why."""
    swarm = play.swarm
    [told] = [event for event in swarm.events(Participation) if event.part == "stage-0" and event.why]
    assert (told.participating, told.averaged) == (1, 1)
    lost = swarm.peers["host-0"].endpoint.peer
    [left_out] = set(told.why) - {lost}
    assert "no answer to " in told.why[lost]  # the leader left it out before its loss was told to all
    assert told.why[left_out].startswith("left out: no replica of stage-0 that others can call is left")
    outside = next(peer for peer in swarm.peers.values() if peer.endpoint.peer == left_out)
    assert any("one that can must join" in event.what for event in outside.events.of(Waiting))
    assert [one["part"] for one in swarm.history()[-1]["roster"]].count("stage-0") == 1


def check_nobody_missed(play: Play) -> None:
    assert not play.swarm.events(PeerLost)
    assert not play.swarm.events(AttemptFailed)


def check_given_up(play: Play) -> None:
    """The step in which a stage was lost is void, and nothing else is."""
    [lost] = {event.step for event in play.swarm.events(StepGivenUp)}
    history = play.swarm.history()
    assert [record["step"] for record in history if record["void"]] == [lost]
    assert history[lost]["digests"] == history[lost - 1]["digests"]


def check_joined(play: Play) -> None:
    """It takes part in the work of what is left of the run, and holds what the others hold."""
    swarm, late = play.swarm, play.swarm.peers["late"]
    (joined,) = late.events.of(PeerReady)
    assert {member["name"] for event in swarm.events(RosterChanged) for member in event.joined} == {"late"}
    after = [one for record in swarm.history() if record["step"] > joined.step for one in record["committed"]]
    assert any(late.endpoint.peer in (one["microbatch"][0], *one["route"]) for one in after)
    assert late.events.of(StepClosed)[-1].step == swarm.manifest.run.steps


def check_nobody_joined(play: Play) -> None:
    assert not any(event.joined for event in play.swarm.events(RosterChanged))


def check_left(play: Play) -> None:
    """With the record of the step in which it was asked to go; nobody misses it."""
    (name,) = [label.removesuffix(" leaves") for label in play.acted]
    steady = next(peer for other, peer in play.swarm.peers.items() if other != name)
    changes = steady.events.of(RosterChanged)
    assert [(event.step, [member["name"] for member in event.left]) for event in changes] == [(2, [name])]
    assert not play.swarm.events(PeerLost)


def check_back(play: Play) -> None:
    """It is a member twice, and sees the run to its end."""
    (back,) = [peer for name, peer in play.swarm.peers.items() if "-again" in name]
    assert back.events.of(PeerReady)
    assert back.events.of(StepClosed)[-1].step == play.swarm.manifest.run.steps


def check_lineages(play: Play) -> None:
    """One half went on alone, which the other, that waited for longer, confirms: nothing is done twice."""
    half, other = {"host-0", "host-1", "trainer-0"}, {"host-2", "host-3", "trainer-1"}
    who = {
        kind: {name for name, peer in play.swarm.peers.items() if peer.events.of(kind)}
        for kind in (QuorumLost, LineageBegan, LineageGivenUp)
    }
    assert who == {QuorumLost: half | other, LineageBegan: half, LineageGivenUp: set()}
    assert {event.step for event in play.swarm.events(LineageConfirmed)} == {3}


MORE: Mapping[str, Callable[[Play], None]] = {
    **dict.fromkeys(("grid", "butterfly-groups"), check_pairs),
    "hierarchy": check_hierarchy,
    "server": check_server,
    **dict.fromkeys(("tree", "ring", "halving", "butterfly"), check_schedule),
    "auto": check_auto,
    **dict.fromkeys(("kill-ring", "kill-halving", "kill-butterfly", "kill-between-rounds"), check_three_are_left),
    "kill-server": check_lost_server,
    "kill-stage": check_given_up,
    "pause-short": check_nobody_missed,
    **dict.fromkeys(("restart-host", "restart-host-bare", "restart-trainer"), check_back),
    "no-majority": check_lineages,
    **dict.fromkeys(
        ("join-host", "join-trainer", "join-trainer-hosted", "join-local", "join-donor-dies"), check_joined
    ),
    "joiner-dies": check_nobody_joined,
    **dict.fromkeys(("leave-host", "leave-trainer", "leave-founder"), check_left),
}
"""What a story promises beside that."""


@pytest.mark.parametrize("module", QUICK)
def test_names_of_what_is_quick_are_those_of_tests(module: str) -> None:
    text = Path(__file__).with_name(f"test_{module}.py").read_text(encoding="utf-8")
    names = {name.partition("[")[0] for name in QUICK[module]}
    assert [name for name in names if f"def test_{name}" not in text] == []
    assert set(TABLE.split()) <= STORIES.keys()
