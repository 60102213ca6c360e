"""Where microbatches stay in one organisation: who feeds, who computes again, who joins where, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from swarm.config import Manifest, check_routes
from swarm.consensus.admissions import AdmissionConfig, AdmissionPolicy, Admissions, Holder
from swarm.consensus.changes import Admission, ChangeRules, OpenStepFacts, RosterRules
from swarm.consensus.ledger import reassigned
from swarm.consensus.placement import Candidate, Places, Wish, assign_stages, choose_place
from swarm.consensus.records import Contribution
from swarm.consensus.roster import ROUTES, Member, Roster, lacking, lost_parts, needed
from swarm.consensus.slowness import Slow
from swarm.errors import ConfigError, Refused
from swarm.ids import MicrobatchId, PeerId, RunId
from swarm.models.spec import SplitConfig
from swarm.optim.schedules import OptimizerConfig
from swarm.security.borders import Borders
from swarm.step.blocked import awaited_holders, awaited_near
from swarm.step.rules import StepRules

RUN = RunId("a" * 64)
HOMES = {"a0": "a", "a1": "a", "at": "a", "b0": "b", "b1": "b", "bt": "b", "x": "", "a2": "a", "aa1": "a"}
"""By peer its organisation; the digit is its stage, ``t`` a trainer."""


def member(name: str) -> Member:
    stage = name[-1] in "012"
    part = f"stage-{name[-1]}" if stage else "ends"
    return Member(peer=name, role="stage" if stage else "trainer", name=name, part=part, addresses=())


def roster(*names: str, own: bool = True) -> Roster:
    holders = tuple(
        Holder(serial=f"{at:016x}", peer=name, name=name, organisation=HOMES[name], role="any", vote=True, until_step=9)
        for at, name in enumerate(names)
    )
    return Roster(map(member, names), Admissions(issuers=(), holders=holders, own_routes=own))


BOTH = roster("a0", "a1", "at", "b0", "b1", "bt")


def done(trainer: str, *route: str, position: int = 0) -> Contribution:
    microbatch = MicrobatchId(PeerId(trainer), "0" * 16, 0, position)
    return Contribution(microbatch=microbatch, tokens=1, loss_sum=1.0, route=route)


def rules() -> StepRules:
    return StepRules(run=RUN, steps=9, target=1, max_share=1.0, max_tokens=9, max_members=9,
                     reproducible=False, optimizer=OptimizerConfig())  # fmt: skip


def computed_again(out: Sequence[str], *committed: Contribution) -> list[tuple[str, ...]]:
    return [one.route for one in reassigned(committed, BOTH.columns(out), able=at_home(BOTH.borders))]


def at_home(borders: Borders) -> Callable[[Contribution, PeerId], bool]:
    return lambda one, peer: borders.near(one.microbatch.trainer, peer)


REFUSED: dict[str, tuple[str, Callable[[], object]]] = {
    "a record with a host abroad": (
        "not of the organisation",
        lambda: rules().check_contribution(BOTH, done("at", "a0", "b1")),
    ),
    "a record of a trainer abroad": (
        "not of the organisation",
        lambda: rules().check_contribution(BOTH, done("bt", "a0", "a1")),
    ),
    "to compute it again abroad": ("nobody is left at stage 0", lambda: computed_again(["a0"], done("at", "a0", "a1"))),
    "a first roster in which none is whole": (
        "no organisation has a trainer",
        lambda: assigned({"a": "a", "b": "b", "t": "a"}),
    ),
}


def assigned(homes: dict[str, str], stages: int = 2) -> Roster:
    candidates = [
        Candidate(peer=peer, role="trainer" if peer[0] == "t" else "stage", name=peer, stage=None, addresses=())
        for peer in homes
    ]
    return assign_stages(candidates, SplitConfig(stages=stages).parts, homes=homes)[0]


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_cross_a_border_is_refused(what: str) -> None:
    reason, act = REFUSED[what]
    with pytest.raises(Refused, match=reason):
        act()


def test_the_same_at_home_is_not() -> None:
    rules().check_contribution(BOTH, done("at", "a0", "a1"))
    open_ = roster("a0", "a1", "at", "b0", "b1", "bt", own=False)
    rules().check_contribution(open_, done("at", "a0", "b1"))
    assert not open_.borders.drawn


def test_work_goes_to_hosts_of_the_same_organisation_however_busy_they_are() -> None:
    stages = [[PeerId("a0"), PeerId("a2"), PeerId("b0")], [PeerId("a1"), PeerId("b1")]]
    committed = [done("at", "gone", "a1", position=at) for at in range(4)]
    near = at_home(Borders(HOMES))
    assert {one.route for one in reassigned(committed, stages, able=near)} == {("a0", "a1"), ("a2", "a1")}
    assert {one.route[0] for one in reassigned(committed, stages)} == {"a0", "a2", "b0"}


def test_trainers_of_an_organisation_that_lacks_a_stage_do_not_feed() -> None:
    assert BOTH.feeding() == ("at", "bt")
    assert BOTH.feeding({"a1"}) == ("bt",)
    assert BOTH.feeding({"at"}) == ("bt",)
    assert lacking(BOTH, {"a1"}) == (("a", "stage-1"),)
    assert lost_parts(BOTH, {"a1"}) == ()
    assert lost_parts(BOTH, {"a1", "b1"}) == ("stage-1",)
    assert lost_parts(BOTH, {"a1", "b0"}) == (ROUTES,)
    assert needed(BOTH, [ROUTES], {"a1", "b0", "stranger"}) == {"a1", "b0"}
    assert roster("a0", "a1", "at", "x").feeding({"at"}) == ()
    assert "x" not in roster("x", "a0", "a1").columns(near="a0")[0]


def test_slow_host_comes_back_at_once_where_its_organisation_lacks_its_part() -> None:
    limits = RosterRules(RUN, 9)
    rules = ChangeRules(limits, lambda peer, data, signature: True)
    everybody = roster("a0", "a1", "aa1", "at", "b0", "b1", "bt")
    wanted = Admission(step=9, member=member("a1"), signature=bytes(64))

    def ask(*out: str) -> None:
        there = [one for one in everybody.members if one.peer not in ("a1", *out)]
        slow = {"a1": Slow(times=1, until=99)}
        rules.check_admission(OpenStepFacts(9, Roster(there, everybody.admissions, slow), "0" * 64), wanted)

    with pytest.raises(Refused, match="from step 99 on; next: "):
        ask()
    ask("aa1")


def test_people_are_told_what_their_organisation_lacks_and_what_to_do() -> None:
    said = awaited_near(BOTH, PeerId("at"), {PeerId("a1")})
    assert said.startswith("a host of stage-1 in a, whose trainers wait while others go on; next: a starts one")
    assert awaited_near(BOTH, PeerId("bt"), {PeerId("a1")}) == ""
    assert awaited_near(BOTH, PeerId("a0"), ()) == ""
    assert "next:" in awaited_near(roster("x", "a0"), PeerId("x"), ())
    assert "next: start one" in awaited_holders(BOTH, {PeerId("a1"): "silent", PeerId("b0"): "silent"}, 0)


def test_joiner_is_told_where_its_organisation_lacks_a_replica() -> None:
    there = roster("a0", "a1", "at", "b0", "bt", "b1")

    def chosen(home: str | None, lost: tuple[str, ...] = ()) -> str | None:
        places = Places(parts=SplitConfig(stages=2).parts, home=home, lost=lost)
        return choose_place(there, PeerId("new"), "stage", Wish(), places)[0]

    thin = roster("a0", "a2", "at", "b0", "b1", "bt")
    places = Places(parts=SplitConfig(stages=3).parts, home="b")
    assert choose_place(thin, PeerId("new"), "stage", Wish(), places)[0] == "stage-2"
    assert (
        choose_place(thin, PeerId("new"), "stage", Wish(), Places(parts=SplitConfig(stages=3).parts, home="a"))[0]
        == "stage-1"
    )
    assert chosen("a", ("stage-1",)) == "stage-1"
    assert chosen(None) in ("stage-0", "stage-1")


def test_first_roster_gives_each_organisation_every_stage_that_it_can_hold() -> None:
    found = assigned({"h1": "a", "h2": "b", "h3": "a", "h4": "b", "h5": "b", "t1": "a", "t2": "b"})
    stages = {
        home: {found[peer].part for peer in peers}
        for home, peers in {"a": ("h1", "h3"), "b": ("h2", "h4", "h5")}.items()
    }
    assert stages == {"a": {"stage-0", "stage-1"}, "b": {"stage-0", "stage-1"}}


def test_issuers_are_of_the_organisation_that_the_manifest_names_and_records_carry_it() -> None:
    config = AdmissionConfig(mode="token", issuers=("F1",), organisation="a")
    policy = AdmissionPolicy(RUN, config, own_routes=True)
    state = policy.following(policy.first(), 3, (), (), ())
    assert (state.own_routes, dict(state.organisations)) == (True, {"F1": "a"})
    assert state == Admissions.model_validate(state.model_dump())
    plain = AdmissionPolicy(RUN, AdmissionConfig(mode="token", issuers=("F1",))).first()
    assert "own_routes" not in plain.model_dump()
    assert plain.holders == ()


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"split": {"routes": "organisation"}}, "split.routes"),
        ({"split": {"routes": "organisation"}, "admission": {"mode": "token"}}, "admission.organisation"),
        ({"admission": {"mode": "token", "organisation": "a"}}, "admission.organisation"),
        (
            {
                "split": {"routes": "organisation"},
                "admission": {"mode": "token", "organisation": "a"},
                "rebalance": {"mode": "auto"},
            },
            "rebalance.mode",
        ),
    ],
)
def test_manifest_that_cannot_keep_to_its_routes_is_refused(sections: dict[str, dict[str, str]], key: str) -> None:
    manifest = Manifest.model_validate({"tokenizer": {"digest": "0" * 64}, **sections})
    with pytest.raises(ConfigError) as refused:
        check_routes(manifest)
    assert refused.value.key == key
