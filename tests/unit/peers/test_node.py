"""What the composition root does when the network under it is gone."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from peers import reaching
from peers.exit_codes import EXIT_UNREACHABLE, exit_code_of
from peers.guards import watch_daemon
from peers.household import Household
from peers.node import MAX_DESCRIPTORS, Node, allow_descriptors
from peers.orders import Orders
from peers.settings import PeerSettings
from swarm.clock import SystemClock
from swarm.device import Device
from swarm.errors import RunEnded, Unreachable
from swarm.events import NullSink
from swarm.ids import PeerId
from swarm.membership.contact import CONTACT_TRIES, NO_CONTACT
from swarm.membership.membership import Membership
from swarm.network.endpoint import LibP2PEndpoint
from swarm.network.libp2p.identity import load_or_create


class _Endpoint:
    """One whose daemon is gone for good, or that was closed."""

    def __init__(self, last_words: str) -> None:
        self._last_words = last_words

    async def wait_daemon(self) -> str:
        """See LibP2PEndpoint."""
        return self._last_words


def _node(tmp_path: Path) -> Node:
    settings = PeerSettings(home=tmp_path, role="stage", name="brave-otter")
    identity = load_or_create(tmp_path / "identity.key")
    return Node(settings, identity, NullSink(), SystemClock(), Household(Orders(settings.options.grace)))


async def test_node_whose_daemon_is_not_replaced_ends_saying_what_to_check_and_do() -> None:
    gone = cast(LibP2PEndpoint, _Endpoint("our libp2p daemon died 5 times within 60 s"))
    with pytest.raises(RunEnded, match="brave-otter: our libp2p daemon died 5 times") as ended:
        await watch_daemon(gone, "brave-otter")
    assert exit_code_of(ended.value) == EXIT_UNREACHABLE
    assert "p2pd" in ended.value.check
    assert ended.value.remedy


@pytest.mark.parametrize("late", [0, CONTACT_TRIES - 1, CONTACT_TRIES])
async def test_node_whose_contacts_do_not_answer_tries_some_more_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    tried: list[object] = []

    async def come_up(*args: object) -> str:
        tried.append(args)
        if len(tried) <= late:
            raise Unreachable(f"p2pd ended with exit code 1; it said: {NO_CONTACT}")
        return "up"

    monkeypatch.setattr(LibP2PEndpoint, "open", come_up)
    monkeypatch.setattr(reaching, "CONTACT_PAUSE_S", 0.0)
    settings = PeerSettings(
        home=tmp_path,
        role="stage",
        bootstrap=(f"/ip4/192.0.2.1/tcp/4001/p2p/{load_or_create(tmp_path / 'other.key').peer}",),
    )
    opening = reaching.open_endpoint(settings, load_or_create(tmp_path / "identity.key"), SystemClock(), NullSink())
    if late < CONTACT_TRIES:
        assert await opening == "up"  # type: ignore[comparison-overlap]
    else:
        with pytest.raises(RunEnded, match="cannot reach"):
            await opening
    assert len(tried) == min(late + 1, CONTACT_TRIES)


async def test_node_whose_endpoint_was_closed_has_nothing_to_say() -> None:
    await watch_daemon(cast(LibP2PEndpoint, _Endpoint("")), "brave-otter")


@pytest.mark.parametrize(
    ("soft", "hard", "after"),
    [
        (1024, 4096, 4096),
        (1024, resource.RLIM_INFINITY, MAX_DESCRIPTORS),
        (1024, 1 << 20, MAX_DESCRIPTORS),
        (1 << 17, 1 << 20, 1 << 17),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    ],
)
def test_peer_may_open_as_many_files_as_its_user_within_reason(
    soft: int, hard: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda what, limit: limits.append(limit))
    allow_descriptors()
    assert limits[-1] == (after, hard)


class _Opened(_Endpoint):
    """One that was just opened; keeps what it was told of who is known."""

    peer = PeerId("me")
    may: Callable[[PeerId], bool] | None = None

    def allow_relay(self, may: Callable[[PeerId], bool]) -> None:
        """See LibP2PEndpoint."""
        self.may = may

    def allow_questions(self, may: Callable[[PeerId], bool]) -> None:
        """See LibP2PEndpoint."""


class _Membership:
    """What a node asks a membership: its roster."""

    def __init__(self, *members: str) -> None:
        self.roster = members


async def test_strangers_are_bounded_before_the_run_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, endpoint = _node(tmp_path), _Opened("")
    known: list[tuple[bool, bool]] = []

    async def take_part(self: Node, *around: object) -> tuple[str, int]:
        assert endpoint.may is not None, "it is told before anything else"
        for membership in (None, _Membership(), _Membership("member")):
            self._membership = cast(Membership, membership)
            known.append((endpoint.may(self._identity.peer), endpoint.may(PeerId("anybody"))))
        assert endpoint.may(PeerId("member"))
        return "done", 0

    monkeypatch.setattr(Node, "_take_part", take_part)
    assert await node._until_over(cast(LibP2PEndpoint, endpoint), cast(Device, None)) == ("done", 0)
    # Itself until there is a roster, which says it then; nobody else at any time.
    assert known == [(True, False), (True, False), (False, False)]
