"""A peer for each device: what each is told, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peers.local.siblings import _OPTIONS, siblings_of
from peers.options.model import PeerOptions
from swarm.errors import ConfigError

OPTIONS = PeerOptions(invite=("swarm1:abc",), device="cuda:0,cuda:1")


def test_each_has_its_device_place_and_name() -> None:
    found = siblings_of(replace(OPTIONS, name="rig", place="lab", stage=1))
    assert [one.label for one in found] == ["cuda:0", "cuda:1"]
    assert [(one.options.device, one.options.place, one.options.name) for one in found] == [
        ("cuda:0", "lab-0", "rig-0"),
        ("cuda:1", "lab-1", "rig-1"),
    ]
    assert all(one.options.stage == 1 and one.options.invite == OPTIONS.invite for one in found)
    assert [one.label for one in siblings_of(replace(OPTIONS, device="cpu,cpu"))] == ["cpu#0", "cpu#1"]


def test_named_ports_are_counted_up_and_free_ones_stay() -> None:
    listen = ("/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/0", "/ip4/10.0.0.1/udp/4001/quic-v1")
    _, second = siblings_of(replace(OPTIONS, listen=listen, announce=("/dns4/rig.example/tcp/4001",)))
    assert second.options.listen == ("/ip4/0.0.0.0/tcp/4002", "/ip6/::/tcp/0", "/ip4/10.0.0.1/udp/4002/quic-v1")
    assert second.options.announce == ("/dns4/rig.example/tcp/4002",)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"device": "cuda:1,cuda:0,cuda:1"}, "each GPU once"), ({"role": "trainer"}, "one device for a trainer")],
)
def test_devices_that_cannot_each_have_a_peer_are_refused(changes: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        siblings_of(replace(OPTIONS, **changes))  # type: ignore[arg-type]


def test_options_reach_the_other_process_as_they_are() -> None:
    options = replace(OPTIONS, listen=("/ip4/0.0.0.0/tcp/1",), max_memory=3.5, stage=0)
    plain = _OPTIONS.dump_python(replace(options, origins={}), mode="json")
    assert _OPTIONS.validate_python(plain, strict=False) == options
