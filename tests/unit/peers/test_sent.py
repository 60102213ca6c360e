"""What a peer has sent, by kind and receiver."""

from __future__ import annotations

from peers.control.sent import KINDS, OTHER, kind_of, receivers, sent_lines
from swarm.consensus.admissions import Admissions, Holder
from swarm.consensus.roster import Member, Roster
from swarm.ids import PeerId
from swarm.membership.access import METHODS

ME, NEAR, FAR, NOBODY = (PeerId(name) for name in ("me", "near", "far", ""))
ROSTER = Roster(
    [Member(peer=peer, role="stage", name=f"{peer}-name", part="stage-0", addresses=()) for peer in (ME, NEAR)],
    Admissions(
        issuers=(),
        holders=(
            Holder(serial="0" * 16, peer=NEAR, name="n", organisation="st-mary", role="any", vote=True, until_step=9),
        ),
    ),
)


def test_every_method_that_carries_a_payload_has_a_kind() -> None:
    beside = {"pipeline/1/resend", "pipeline/1/adopt", "pipeline/1/drop", "pipeline/1/attend", "trainer/1/hop",
              "trainer/1/blocked"}  # fmt: skip
    carrying = ("pipeline/", "trainer/", "averaging/", "mass/", "versions/", "residual/", "state/", "checkpoint/",
                "frozen/")  # fmt: skip
    assert {name for name in METHODS if name.startswith(carrying) and kind_of(name) == OTHER} == beside
    assert {kind_of(name) for name in METHODS} == {*KINDS, OTHER}
    assert kind_of("") == OTHER
    assert [kind_of(f"observe/1/{verb}") for verb in ("next", "ahead", "start")] == [
        "averaging",
        "averaging",
        "records",
    ]


def test_bytes_are_told_by_receiver_without_ourselves_and_add_up() -> None:
    sent_by = {
        "pipeline/1/forward": {NEAR: 100, ME: 7},
        "trainer/1/gradient": {NEAR: 10},
        "step/1/apply": {FAR: 3, NEAR: 1},
        "": {NOBODY: 2},
    }
    told = receivers(ME, sent_by, ROSTER)
    assert [(one.peer, one.name, one.organisation) for one in told] == [
        (NEAR, "near-name", "st-mary"),
        (FAR, "", ""),
        (NOBODY, "", ""),
    ]
    assert told[0].sent == {"activations": 100, "gradients": 10, "records": 1}
    rows = sent_lines(
        [{"name": one.name, "peer": one.peer, "organisation": one.organisation, "sent": one.sent} for one in told]
    )
    assert rows[0] == ["to", "organisation", *KINDS, OTHER]
    assert rows[-1] == ["all", "", "100", "10", "0", "0", "4", "2"]
    assert [row[0] for row in rows[1:-1]] == ["near-name", "far", "others"]
