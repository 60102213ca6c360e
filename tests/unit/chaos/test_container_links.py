from __future__ import annotations

from peers.chaos.container_networks import ContainerLinks
from swarm.sim.links import LinkShape

ADDRESSES = {"a": ("10.0.0.1", "10.0.1.1"), "b": ("10.0.0.2",), "c": ("10.0.0.3",)}


def rules(links: ContainerLinks, name: str) -> str:
    return "\n".join(links.commands(name, ADDRESSES, ["eth0"]))


def test_partition_drops_what_comes_from_the_others_in_each_direction_asked_for() -> None:
    links = ContainerLinks()
    links.part(["a"], ["b", "c"], both=False)
    assert [f"-s {address} -j DROP" in rules(links, "b") for address in ADDRESSES["a"]] == [True, True]
    assert "DROP" not in rules(links, "a")
    links.part(["a"], ["b"], both=True)
    assert "-s 10.0.0.2 -j DROP" in rules(links, "a")


def test_what_is_cut_stays_so_while_something_else_is_changed() -> None:
    """The chain is never emptied first: it is put in place whole."""
    links = ContainerLinks()
    links.part(["a"], ["b"], both=True)
    links.shape(["c"], ["b"], LinkShape(loss=0.1))
    told = [line for line in links.commands("b", ADDRESSES, ["eth0"]) if "DROP" in line]
    assert len(told) == 1
    assert "iptables-restore -w 5 --noflush" in told[0]
    assert ":SWARM - [0:0]" in told[0]


def test_shape_makes_a_queue_for_what_is_sent_there_alone() -> None:
    links = ContainerLinks()
    links.shape(["a"], ["b"], LinkShape(bytes_per_s=125_000))
    assert "rate 1000kbit" in rules(links, "a")
    assert "match ip dst 10.0.0.2/32 flowid 1:1" in rules(links, "a")
    assert rules(links, "b").count("match ip dst") == 2
    assert "htb" not in rules(links, "c")


def test_loss_is_drawn_at_whom_it_reaches_and_delay_is_a_queue() -> None:
    links = ContainerLinks()
    links.shape(["a"], ["b"], LinkShape(loss=0.25, latency_s=0.02, jitter_s=0.01))
    assert "-s 10.0.0.2 -m statistic --mode random --probability 0.2500 -j DROP" in rules(links, "a")
    assert "netem delay 20.0ms 5.0ms" in rules(links, "a")
