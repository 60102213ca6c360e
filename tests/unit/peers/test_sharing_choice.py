"""What is said of limits and pauses, as it is understood or refused."""

from __future__ import annotations

import pytest

from peers.sharing.limit_options import read_pause, read_rate


@pytest.mark.parametrize(
    ("text", "rate"),
    [("20mbit", 2.5e6), ("20 Mbit/s", 2.5e6), ("1gbit", 1.25e8), ("2MB", 2e6), ("2MB/s", 2e6), ("512KiB", 524_288),
     ("1.5MiB", 1_572_864), ("1000kbit", 125_000), ("8mbits", 1e6), ("10mbps", None), ("200kB", 2e5)],
)  # fmt: skip
def test_rate_is_bytes_a_second(text: str, rate: float | None) -> None:
    if rate is None:
        with pytest.raises(ValueError, match="none of kbit"):
            read_rate(text)
    else:
        assert read_rate(text) == rate


@pytest.mark.parametrize("text", ["", "20", "mbit", "-5mbit", "20Mb", "20 m", "1e9MB", "64kbit", "0mbit", "nanMB"])
def test_rate_that_says_nothing_certain_or_too_little_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a rate like 20mbit or 2MB"):
        read_rate(text)


@pytest.mark.parametrize(
    ("text", "hours"),
    [("hours:22-07", (1320, 420)), ("hours:9-17:30", (540, 1050)), ("hours:0-6", (0, 360)), ("hours:18-24", (1080, 0))],
)
def test_hours_are_minutes_of_the_day(text: str, hours: tuple[int, int]) -> None:
    assert read_pause(text).hours == hours


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("hours:22", "hours like"), ("hours:25-3", "hours like"), ("hours:7-7", "two times"),
        ("hours:0-24", "two times"),
        ("hours:24:30-3", "two times"), ("battery:low", "battery, hours"), ("command:", "a command"),
        ("command:no-such-program", "no program"), ("command:'a", "quotes"), ("", "battery, hours"),
    ],
)  # fmt: skip
def test_pause_that_says_nothing_certain_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_pause(text)
