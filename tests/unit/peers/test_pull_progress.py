"""What swarm ckpt pull says while a part comes, quickly, slowly, or not at all."""

from __future__ import annotations

import asyncio

from peers.checkpoints.pull_progress import EVERY_S, FetchProgress
from peers.console.lasting import Lasting
from swarm.ids import ENDS, PartName
from tests.harness.expect import eventually
from tests.harness.rigs.clocks import FakeClock

MB = 1_000_000
STAGE = PartName("stage-0")


class Ticking(FakeClock):
    """A clock that sleeps so many times, then for ever."""

    def __init__(self, times: int) -> None:
        self.left = times

    async def sleep(self, seconds: float) -> None:
        if not self.left:
            await asyncio.Event().wait()
        self.left -= 1
        await super().sleep(seconds)


def test_slow_fetch_says_its_rate_and_what_is_left_and_once_what_that_may_be() -> None:
    said, clock = list[str](), FakeClock()
    progress = FetchProgress(lambda label, text: said.append(f"{label} {text}"), clock)
    progress.told(ENDS, 40 * MB, 100 * MB)  # what an earlier pull has left
    for done in range(41, 48):
        clock.now += EVERY_S / 3
        progress.told(ENDS, done * MB, 100 * MB)
    assert said[1].startswith("fetching ends: 43 MB of 100 MB, 200 kB/s, about 5 min left")
    assert "--max-upload" in said[2]
    assert "ckpt pull goes on from there" in said[2]
    assert said[3].startswith("fetching ends: 46 MB of 100 MB, 200 kB/s, about ")
    assert len(said) == 4, "the advice is given once"


async def test_fetch_to_which_nothing_comes_says_so() -> None:
    said, clock = list[str](), Ticking(2)
    progress = FetchProgress(lambda label, text: said.append(text), clock)
    progress.told(STAGE, 0, 100 * MB)
    progress.told(ENDS, 5 * MB, 5 * MB)
    telling = asyncio.ensure_future(progress.run())
    await eventually(lambda: len(said) == 4)
    telling.cancel()
    assert said[2:] == ["stage-0: 0 B of 100 MB, nothing more in 15 s; it is asked for again"] * 2


def test_what_lasts_is_said_after_a_moment_and_then_every_few_seconds() -> None:
    clock, said = FakeClock(), list[str]()
    lasting = Lasting(said.append, "{:g} B".format, clock.monotonic)
    for later_s, what, done in ((1.0, "a", 1), (1.0, "a", 10), (4.0, "a", 20), (2.0, "b", 0), (5.5, "b", 50)):
        clock.now += later_s
        lasting.told(what, done, 100)
    assert said == ["a: 10 B of 100 B, about 10 s left", "b: 0 B of 100 B", "b: 50 B of 100 B, about 6 s left"]
