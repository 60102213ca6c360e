"""What a peer that has not begun says when the one through which it came is gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm.errors import Advice, Ending, RunEnded, Unadmitted, Unreachable
from swarm.ids import PeerId
from swarm.membership.contact import AWAY_S
from swarm.membership.survey import FirstContact
from swarm.step.observe_messages import RunStanding
from tests.harness.rigs.membership import FakeClock

FOUNDER, OTHER = PeerId("12D3founder"), PeerId("12D3other")
LAST = "when it was asked last, the run had not begun"


class Answering:
    """An endpoint whose contact says where the run stands, or is gone."""

    peer = PeerId("12D3me")

    def __init__(self, closed: int | None) -> None:
        self.answer: RunStanding | None = RunStanding(founder=FOUNDER, closed=closed, waiting_for="")
        self.breaks = 0

    async def call(self, peer: PeerId, *question: Any, timeout_s: float) -> tuple[RunStanding, bytes]:
        self.breaks -= 1
        if self.answer is None or self.breaks >= 0:
            raise Unreachable("the daemon hung up", peer=peer)
        return self.answer, b""


async def test_peer_whose_contact_is_away_asks_on_for_hours_and_says_so() -> None:
    endpoint, said, clock = Answering(7), list[str](), FakeClock()
    first = FirstContact(cast(Any, endpoint), clock, [OTHER])
    endpoint.breaks = 1
    assert (await first.standing(said.append)).closed == 7
    assert said == [], "a stream that breaks is opened once more"
    endpoint.breaks = 80
    assert (await first.standing(said.append)).closed == 7
    assert clock.now > 600.0
    assert "the daemon hung up" in said[0]
    assert "next: " in said[0]
    endpoint.answer = None
    with pytest.raises(RunEnded, match="no answer for 6 hours"):
        await first.standing(said.append)
    assert clock.now > AWAY_S


async def test_who_comes_back_believes_nobody_that_comes_back_and_asks_another() -> None:
    """The founder and the trainer of one machine are started again at once: each would wait for the other."""
    told = {
        FOUNDER: RunStanding(founder=FOUNDER, closed=None, waiting_for="others", returning=True),
        OTHER: RunStanding(founder=FOUNDER, closed=7, waiting_for=""),
    }

    async def call(peer: PeerId, *question: Any, timeout_s: float) -> tuple[RunStanding, bytes]:
        return told[peer], b""

    endpoint: Any = SimpleNamespace(peer="12D3me", call=call)
    for returns, believed in ((True, OTHER), (False, FOUNDER)):
        first = FirstContact(endpoint, FakeClock(), [FOUNDER, OTHER], returns=returns)
        assert await first.standing(lambda what: None) == told[believed]
        assert first.peer == believed


@pytest.mark.parametrize(
    ("contact", "closed", "cause", "advice"),
    [
        (FOUNDER, None, f"the run's founder (12D3founder) is gone; {LAST}", Advice.FOUND_AGAIN),
        (OTHER, None, f"the contact (12D3other) is gone; {LAST}", Advice.JOIN_FOUNDER),
        (FOUNDER, 7, "the contact (12D3founder) is gone before this peer took part", Advice.JOIN_ANEW),
    ],
)
async def test_peer_whose_contact_is_gone_says_what_that_means(
    contact: PeerId, closed: int | None, cause: str, advice: Advice
) -> None:
    first = FirstContact(cast(Any, Answering(closed)), FakeClock(), [contact])
    assert (await first.standing(lambda what: None)).closed == closed
    assert first.lost(contact, "no answer", Unreachable("no answer"), left=False) is None, "it may come back"
    error = first.lost(contact, "its founder left", None, left=True)
    assert error is not None
    assert error.reason == f"{cause}: its founder left"
    assert error.remedy == advice
    assert (bool(error.check), error.ending) == (True, Ending.UNREACHABLE)
    for word in ("never", "nothing", "nobody", "lost"):  # what happened meanwhile it cannot know
        assert word not in error.reason + error.check


async def test_contact_that_lets_nobody_in_with_this_invite_is_not_gone() -> None:
    first = FirstContact(cast(Any, Answering(None)), FakeClock(), [FOUNDER])
    assert (await first.standing(lambda what: None)).closed is None
    refused = Unadmitted("the invite for bob was used by another peer")
    error = first.lost(FOUNDER, f"no answer to 7 pings in a row: {refused.code}", refused, left=False)
    assert error is not None
    assert error.reason == "the run does not let this peer in: the invite for bob was used by another peer"
    assert (error.remedy, error.ending) == (Advice.NEW_GRANT, Ending.MISUSED)
