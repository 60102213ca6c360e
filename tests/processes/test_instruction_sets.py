"""Machines of two kinds in one run: what they compute differs in the last bits, and nobody is called a liar for it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.harness.by_hand import LOCAL, RUN, by_hand, digests_differ, some_text
from tests.harness.comparing_peer import PROGRAM

pytestmark = [pytest.mark.process, pytest.mark.long]

OLD = ("env", "ATEN_CPU_CAPABILITY=default", "ONEDNN_MAX_CPU_ISA=SSE41", "MKL_CBWR=COMPATIBLE")
"""Has torch and its libraries use what any processor of 64 bits can."""
STEPS = 12
MANIFEST = RUN.format(steps=STEPS).replace("stage_hosts = 2", "stage_hosts = 6") + "[verify]\naudit = 1.0\n"
ACCUSING = ("DigestMismatch", "HopDiffers", "JourneySetAside", "ProvenWrong")


def test_half_of_the_hosts_on_another_instruction_set_accuse_nobody_and_hold_the_same_weights(tmp_path: Path) -> None:
    """Every hop is computed again. Two of a stage's three replicas are of one kind, and could have the third barred."""
    text, manifest = some_text(tmp_path), tmp_path / "run.toml"
    manifest.write_text(MANIFEST)
    with by_hand(tmp_path) as hand:
        bootstrap = hand.start("new", str(manifest), *LOCAL)
        invite = str(bootstrap.wait_event("Invited")["invite"])
        join = ("join", invite, "--role", "stage", "--stage")
        old = [hand.start(*join, stage, *LOCAL, prefix=OLD, program=PROGRAM) for stage in "001"]
        new = [hand.start(*join, stage, *LOCAL) for stage in "011"]
        trainer = hand.start("join", invite, "--role", "trainer", "--data", str(text), *LOCAL)
        everybody = [bootstrap, trainer, *old, *new]
        assert [one.end()[0] for one in everybody] == [0] * len(everybody)
    assert [event["step"] for event in trainer.events("StepClosed")][-STEPS:] == [*range(1, STEPS + 1)]
    compared = [event["verdict"] for one in old for event in one.events("Compared")]
    assert compared, "no bits differed"
    assert set(compared) == {"right"}
    outcomes = Counter(event["outcome"] for event in trainer.events("HopAudited"))
    assert outcomes.keys() <= {"passed", "unjudged"}, "a judge may be a record behind"
    assert outcomes["passed"] > outcomes["unjudged"]
    judged = {event["peer_"] for event in trainer.events("HopAudited")}
    assert all(judged & {event["peer"] for one in kind for event in one.events("PeerReady")} for kind in (old, new))
    assert not [event for one in everybody for kind in ACCUSING for event in one.events(kind)]
    assert not digests_differ(everybody)
