"""What a peer that has not begun says when the one through which it came is gone."""

from __future__ import annotations

from typing import Any, cast

import pytest

from peers.console.words import with_commands
from swarm.errors import Advice, Ending, RunEnded, Unadmitted, Unreachable
from swarm.ids import PeerId
from swarm.membership.survey import FirstContact
from swarm.step.observe_messages import RunStanding
from tests.harness.rigs.membership import FakeClock

FOUNDER, OTHER = PeerId("12D3founder"), PeerId("12D3other")


class Answering:
    """An endpoint whose contact says where the run stands, or is gone."""

    def __init__(self, closed: int | None) -> None:
        self.answer: RunStanding | None = RunStanding(founder=FOUNDER, closed=closed, waiting_for="")
        self.breaks = 0

    async def call(self, peer: PeerId, *question: Any, timeout_s: float) -> tuple[RunStanding, bytes]:
        self.breaks -= 1
        if self.answer is None or self.breaks >= 0:
            raise Unreachable("the daemon hung up", peer=peer)
        return self.answer, b""


async def test_peer_whose_stream_to_its_contact_breaks_asks_once_more() -> None:
    endpoint = Answering(7)
    first = FirstContact(cast(Any, endpoint), FakeClock(), OTHER, FOUNDER)
    for _ in range(2):
        endpoint.breaks = 1
        assert (await first.standing()).closed == 7
    endpoint.breaks = 2
    with pytest.raises(RunEnded):
        await first.standing()
    assert endpoint.breaks == 0


@pytest.mark.parametrize(
    ("contact", "closed", "cause", "advice"),
    [
        (FOUNDER, None, "the run's founder (12D3founder) is gone, and the run never began", Advice.FOUND_AGAIN),
        (OTHER, None, "the contact (12D3other) is gone, and the run has not begun", Advice.JOIN_FOUNDER),
        (FOUNDER, 7, "the contact (12D3founder) is gone before this peer took part", Advice.JOIN_ANEW),
    ],
)
async def test_peer_whose_contact_is_gone_says_what_that_means(
    contact: PeerId, closed: int | None, cause: str, advice: Advice
) -> None:
    endpoint = Answering(closed)
    first = FirstContact(cast(Any, endpoint), FakeClock(), contact, FOUNDER)
    assert (await first.standing()).closed == closed
    endpoint.answer = None
    with pytest.raises(RunEnded) as ended:
        await first.standing()
    for error in (ended.value, first.gone("the daemon hung up", Unreachable("the daemon hung up"))):
        assert error.reason == f"{cause}: the daemon hung up"
        assert error.remedy == advice
        assert "is kept" not in with_commands(error.remedy), "nothing was learned here"
        assert (bool(error.check), error.ending) == (True, Ending.UNREACHABLE)


async def test_contact_that_lets_nobody_in_with_this_invite_is_not_gone() -> None:
    first = FirstContact(cast(Any, Answering(None)), FakeClock(), FOUNDER, FOUNDER)
    assert (await first.standing()).closed is None
    refused = Unadmitted("the invite for bob was used by another peer")
    error = first.gone(f"no answer to 7 pings in a row: {refused.code}, {refused.reason}", refused)
    assert error.reason == "the run does not let this peer in: the invite for bob was used by another peer"
    assert (error.remedy, error.ending) == (Advice.NEW_GRANT, Ending.MISUSED)
