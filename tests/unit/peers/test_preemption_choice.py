"""What a person can say about preemption, how it is refused, what the peer is then told, and what is narrated."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from peers.console.event_words import describe
from peers.exit_codes import EXIT_DRAINED
from peers.options.reading import read_peer_options
from peers.orders import Orders
from peers.preemption.notice_options import MetadataUrl, PreemptionChoice, read_choice, read_url
from swarm.errors import ConfigError, Ending
from swarm.events import Event, PreemptionNotice, PreemptionWatch
from tests.harness.rigs.peers import checked_settings

pytestmark = pytest.mark.usefixtures("clean_environment")


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("none", PreemptionChoice()),
        ("auto", PreemptionChoice(clouds=("aws", "gcp", "azure"))),
        ("aws", PreemptionChoice(clouds=("aws",))),
        ("azure", PreemptionChoice(clouds=("azure",))),
        ("file:/run/a b:c", PreemptionChoice(file=Path("/run/a b:c"))),
        ("file:here", PreemptionChoice(file=Path.cwd() / "here")),
        ("file:~/x", PreemptionChoice(file=Path.home() / "x")),
        ("command:test -e '/run/a b'", PreemptionChoice(command=("test", "-e", "/run/a b"))),
        ("command:sh -c 'x:y'", PreemptionChoice(command=("sh", "-c", "x:y"))),
    ],
)
def test_choice_of_every_kind_is_understood(text: str, choice: PreemptionChoice) -> None:
    assert read_choice(text) == choice


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "auto, aws, gcp, azure, file:PATH, command:CMD or none"),
        ("AWS", "auto, aws"),
        ("aws:x", "auto, aws"),
        ("banana:x", "auto, aws"),
        ("file", "auto, aws"),
        ("file:", "something after file:"),
        ("command: ", "something after command:"),
        ("command:''", "a command"),
        ("command:true\0", "a command"),
        ("command:no-such-program -x", "no program 'no-such-program' is found"),
        ("command:/etc/passwd", "no program '/etc/passwd' is found"),
        ("command:'", "a shell's quotes"),
        ("file:a\0b", "a path"),
        ("file:~nobody-of-this-name/x", "a path"),
    ],
)
def test_choice_that_cannot_be_understood_is_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read_choice(text)


@pytest.mark.parametrize(
    ("text", "url", "authority"),
    [
        ("http://127.0.0.1:8080", MetadataUrl(host="127.0.0.1", port=8080), "127.0.0.1:8080"),
        ("http://169.254.169.254/", MetadataUrl(host="169.254.169.254", port=80), "169.254.169.254"),
        ("http://[fd00:ec2::254]", MetadataUrl(host="fd00:ec2::254", port=80), "[fd00:ec2::254]"),
        ("http://Meta.Local:1/x/", MetadataUrl(host="meta.local", port=1, prefix="/x"), "meta.local:1"),
    ],
)
def test_url_is_understood(text: str, url: MetadataUrl, authority: str) -> None:
    assert (read_url(text), read_url(text).authority) == (url, authority)


@pytest.mark.parametrize(
    "text",
    ["", "x", "127.0.0.1:80", "https://a", "ftp://a", "http://", "http://a:0", "http://a:99999", "http://a:x",
     "http://u:p@a", "http://a?q", "http://a#f", "http://a/b c", "http://a/\r\nX: y", "http://ä", "http://[::1"],
)  # fmt: skip
def test_url_that_is_no_metadata_server_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a URL like"):
        read_url(text)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"preemption": "banana"}, r"--preemption = 'banana': expected auto, aws, gcp, azure, .* Correct --preemption"),
        ({"preemption_url": "https://x"}, r"--preemption-url = 'https://x': expected a URL like"),
        ({"preemption_url": "http://x"}, r"--preemption-url = 'http://x': expected only with preemption aws.* is none"),
    ],
)
def test_settings_that_cannot_be_understood_name_the_flag(flags: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_peer_options("join", flags)
    with pytest.raises(ConfigError, match=next(iter(flags)).replace("_", ".")):
        checked_settings(home=Path("h"), role="stage", bootstrap=("x",), **flags)


# --- what the peer does ----------------------------------------------------------------------------------------------


class Asked(list[tuple[str, Ending]]):
    """What leaving in order was begun with."""

    def leave(self, reason: str, ending: Ending) -> str:
        self.append((reason, ending))
        return ""


def orders_of(grace_s: float) -> tuple[Orders, Asked]:
    orders, asked = Orders(grace_s), Asked()
    orders.adopt(asked.leave)
    return orders, asked


async def test_notice_begins_to_leave_in_order_once() -> None:
    orders, asked = orders_of(60)
    orders.by_notice("AWS: so", 60)
    orders.by_notice("AWS: again", 0)
    assert asked == [("AWS: so", Ending.DRAINED)]
    forced = asyncio.ensure_future(orders.forced())
    await asyncio.wait({forced}, timeout=0.01)
    assert not forced.done(), "the second notice counted"
    forced.cancel()


async def test_notice_whose_time_is_over_ends_the_peer() -> None:
    orders, asked = orders_of(60)
    orders.by_notice("AWS: so", 0.0)
    assert await orders.forced() == ("could not leave in order in time: AWS: so", EXIT_DRAINED)
    assert asked == [("AWS: so", Ending.DRAINED)]


async def test_notice_before_there_is_something_to_leave_ends_at_once() -> None:
    orders = Orders(60)
    orders.by_notice("AWS: so", 60)
    assert await orders.forced() == ("was told to leave before it took part: AWS: so", EXIT_DRAINED)


async def test_notice_bounds_leaving_by_ctrl_c_which_has_no_bound_of_its_own() -> None:
    orders, _ = orders_of(60)
    orders.take(signal.SIGINT)
    orders.by_notice("AWS: so", 0.0)
    assert (await orders.forced())[1] == EXIT_DRAINED


async def test_signal_after_a_notice_is_no_haste_and_keeps_the_exit_code() -> None:
    orders, asked = orders_of(0.01)
    orders.by_notice("GCP: so", 60)
    orders.take(signal.SIGTERM)  # what an operating system sends when it is shut down
    assert await orders.forced() == ("could not leave in order within 0.01 s", EXIT_DRAINED)
    assert asked == [("GCP: so", Ending.DRAINED), ("SIGTERM", Ending.DRAINED)]


async def test_notice_after_a_drain_leaves_its_exit_code_to_the_drain() -> None:
    orders, asked = orders_of(60)
    orders.by_command("swarm drain")
    orders.by_notice("AWS: so", 60)
    assert asked[0] == ("swarm drain", Ending.DONE)  # the first order counts: see Leaving.ask


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (PreemptionWatch(source="AWS", problem=""), "notices of AWS are watched"),
        (PreemptionWatch(source="AWS", problem="status 403"), "AWS cannot be asked for notices: status 403; trying on"),
        (PreemptionWatch(source="", problem="none answers"), "no notices are watched: none answers"),
        (PreemptionNotice(source="AWS", deadline_s=119.6), "AWS: this machine is taken back in 120 s"),
        (
            PreemptionNotice(source="the file\n/x\x1b[2J", deadline_s=None),
            "the file /x [2J: this machine is taken back",
        ),
    ],
)
def test_narration_of_notices(event: Event, text: str) -> None:
    assert describe(event) == ("preemption", text)
