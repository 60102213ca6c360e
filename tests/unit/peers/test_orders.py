from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
import uvloop

from peers.console import interrupt
from peers.exit_codes import EXIT_OK, EXIT_PAUSED, exit_code_of
from peers.guards import watch_last_moments
from peers.orders import Orders
from swarm.errors import Ending, RunEnded
from swarm.sim.loop import run_world


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in interrupt.SIGNALS}
    interrupt.install()
    yield
    interrupt.install()
    for number, handler in before.items():
        signal.signal(number, handler)


def _told(
    grace_s: float, *numbers: signal.Signals, adopt: bool
) -> tuple[list[tuple[str, int]], tuple[str, int] | None]:
    """What leaving in order was begun with, and what the peer is ended with, if it is."""
    asked: list[tuple[str, int]] = []

    def leave(reason: str, code: int) -> str:
        asked.append((reason, code))
        return ""

    async def main() -> tuple[str, int] | None:
        orders = Orders(grace_s)
        orders.listen()
        if adopt:
            orders.adopt(leave)
        for number in numbers:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0)
        forced = asyncio.ensure_future(orders.forced())
        await asyncio.wait({forced}, timeout=0.01)
        if forced.done():
            return forced.result()
        forced.cancel()
        return None

    return asked, uvloop.run(main())


@pytest.mark.parametrize("number", interrupt.SIGNALS)
def test_orders_signal_before_there_is_something_to_leave_ends_at_once(number: signal.Signals) -> None:
    asked, forced = _told(60, number, adopt=False)
    assert asked == []
    assert forced is not None
    assert forced[1] == 128 + number


@pytest.mark.parametrize("number", interrupt.SIGNALS)
def test_orders_without_grace_a_signal_ends_at_once(number: signal.Signals) -> None:
    asked, forced = _told(0, number, adopt=True)
    assert asked == []
    assert forced is not None
    assert forced[1] == 128 + number


def test_orders_signal_begins_to_leave_in_order() -> None:
    assert _told(60, signal.SIGINT, adopt=True) == ([("Ctrl-C", Ending.DONE)], None)
    assert _told(60, signal.SIGTERM, adopt=True) == ([("SIGTERM", Ending.DRAINED)], None)
    assert _told(60, signal.SIGHUP, signal.SIGHUP, adopt=True) == ([("SIGHUP", Ending.DRAINED)], None)


def test_orders_second_signal_ends_at_once() -> None:
    _, forced = _told(60, signal.SIGINT, signal.SIGINT, adopt=True)
    assert forced == ("was stopped by Ctrl-C, twice", 130)
    assert _told(60, signal.SIGINT, signal.SIGTERM, adopt=True)[1] == ("was stopped by SIGTERM", 143)


@pytest.mark.parametrize(
    ("within_s", "words"),
    [
        (None, "ends in 60 s at the latest (--grace), whatever it waits for"),
        (30.0, "ends in 30 s at the latest, whatever it waits for"),
    ],
)
def test_orders_say_how_long_is_left_as_soon_as_leaving_begins(within_s: float | None, words: str) -> None:
    left: list[tuple[str, float | None]] = []

    async def main() -> None:
        orders = Orders(60)
        orders.adopt(lambda reason, ending: str(left.append((orders.bound, orders.left_s))))
        orders.by_command("swarm drain")
        orders.take(signal.SIGINT)
        orders.by_notice("pause: battery", within_s, Ending.PAUSED)

    run_world(main())
    unbounded = ("", None)
    assert left == [unbounded, unbounded, (words, 60.0 if within_s is None else within_s)]


def test_orders_take_what_came_before_they_listened() -> None:
    interrupt.defer()
    os.kill(os.getpid(), signal.SIGTERM)
    assert _told(60, adopt=False)[1] == ("was stopped by SIGTERM", 143)


def test_orders_leave_an_ignored_signal_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert _told(60, signal.SIGINT, adopt=False) == ([], None)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.parametrize("number", interrupt.SIGNALS)
def test_orders_signal_after_the_loop_has_ended_changes_nothing(number: signal.Signals) -> None:
    _told(60, adopt=False)
    os.kill(os.getpid(), number)
    assert interrupt.received() is None


async def test_unless_forced_ends_the_work_when_told_and_waits_for_it() -> None:
    orders, cleared = Orders(60), []

    async def work() -> None:
        orders.by_command("swarm drain")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleared.append(True)

    with pytest.raises(RunEnded, match="^s0 was told to leave before it took part") as caught:
        await orders.unless_forced("s0", work())
    assert (exit_code_of(caught.value), cleared) == (EXIT_OK, [True])


async def test_unless_forced_passes_an_error_on() -> None:
    async def work() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await Orders(60).unless_forced("s0", work())


@pytest.mark.parametrize(
    ("within_s", "safe_after_s", "ends_at_s"),
    [(60.0, 2.0, 57.0), (60.0, None, 60.0), (4.0, 0.5, 2.5), (4.0, None, 4.0)],
)
def test_peer_that_nobody_lets_go_sees_to_what_only_it_has_before_its_time_is_up(
    within_s: float, safe_after_s: float | None, ends_at_s: float
) -> None:
    async def main() -> None:
        loop, orders = asyncio.get_running_loop(), Orders(60)
        began, asked = loop.time(), list[float]()

        async def secure(left_s: float) -> str:
            asked.append(left_s)
            await asyncio.sleep(left_s if safe_after_s is None else safe_after_s)
            return "" if safe_after_s is None else "a copy has it"

        orders.adopt(lambda reason, ending: "")
        watching = asyncio.ensure_future(watch_last_moments(orders, secure))
        await asyncio.sleep(0)
        assert not asked, "nobody has told it to go"
        orders.by_notice("the machine goes", within_s, Ending.PAUSED)
        reason, code = await orders.forced()
        assert code == EXIT_PAUSED
        why = "the machine goes" if safe_after_s is None else "a copy has it"
        assert reason == f"could not leave in order in time: {why}"
        assert loop.time() - began == pytest.approx(ends_at_s)
        assert asked == [pytest.approx(0.9 * min(5.0, within_s / 2))]
        await watching

    run_world(main())


@pytest.mark.parametrize(("notice_s", "last_s"), [(120.0, 5.0), (4.0, 2.0)])
def test_peer_that_is_told_twice_has_last_moments_before_the_earlier_of_both_times(
    notice_s: float, last_s: float
) -> None:
    async def main() -> None:
        loop, orders, asked = asyncio.get_running_loop(), Orders(60), list[float]()
        began = loop.time()

        async def secure(left_s: float) -> str:
            asked.append(loop.time() - began)
            return ""

        orders.adopt(lambda reason, ending: "")
        watching = asyncio.ensure_future(watch_last_moments(orders, secure))
        forced = asyncio.ensure_future(orders.forced())
        orders.by_notice("the machine goes", notice_s)
        await asyncio.sleep(1.0)
        orders.take(signal.SIGTERM)
        await forced
        ended = min(notice_s, 1.0 + 60.0)
        assert loop.time() - began == pytest.approx(ended), "the fault: the earlier time ends it"
        assert asked == [pytest.approx(ended - last_s)]
        await watching

    run_world(main())


def test_peer_that_is_told_to_be_gone_sooner_in_its_last_moments_has_them_before_that() -> None:
    async def main() -> None:
        loop, orders = asyncio.get_running_loop(), Orders(2.0)
        asked, said, began = list[float](), list[float](), loop.time()

        async def secure(left_s: float) -> str:
            asked.append(loop.time() - began)
            await asyncio.sleep(left_s)
            said.append(loop.time() - began)
            return "its newest state is on this disk alone"

        orders.adopt(lambda reason, ending: "")
        watching = asyncio.ensure_future(watch_last_moments(orders, secure))
        orders.by_notice("the machine goes", 120.0)
        await asyncio.sleep(116.0)
        assert asked == [115.0], "the fault: it is at it already"
        orders.take(signal.SIGTERM)
        reason, _ = await orders.forced()
        assert reason.endswith("its newest state is on this disk alone")
        assert (asked, said) == ([115.0, 116.0], [pytest.approx(117.8)])
        await watching

    run_world(main())


def test_person_who_waits_at_the_keyboard_bounds_nothing() -> None:
    async def main() -> None:
        orders = Orders(10)
        orders.adopt(lambda reason, ending: "")
        orders.take(signal.SIGINT)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600):
                await orders.last_moments()

    run_world(main())


def test_members_of_one_process_end_once_all_that_have_not_ended_may_go() -> None:
    async def main() -> None:
        orders = Orders(10)
        leaves = [lambda reason, ending, name=name: name for name in ("trainer", "host", "other host")]
        for leave in leaves:
            orders.adopt(leave)
        orders.take(signal.SIGTERM)
        await orders.last_moments()
        forced = asyncio.ensure_future(orders.forced())
        orders.let_go("a copy has its part")
        orders.release(leaves[2])
        await asyncio.sleep(1)
        assert not forced.done(), "another still sees to what only it has"
        orders.let_go("it feeds nothing")
        assert await forced == ("could not leave in order in time: a copy has its part; it feeds nothing", 143)

    run_world(main())


def test_service_that_is_told_to_stop_has_last_moments_within_its_grace() -> None:
    async def main() -> None:
        orders = Orders(10)
        orders.adopt(lambda reason, ending: "")
        orders.take(signal.SIGTERM)
        assert await orders.last_moments() == pytest.approx(5.0)
        orders.let_go("a copy has it")
        assert await orders.forced() == ("could not leave in order in time: a copy has it", 143)

    run_world(main())
