"""Links: what a description says is what messages meet."""

from __future__ import annotations

import math
import tomllib

import pytest

from swarm.errors import ConfigError
from swarm.sim.links import OVERTAKING_BYTES, Links, LinkShape, Traffic

TEXT = """
seed = 7
[default]
latency_ms = 20
mbit_per_s = 80
[[link]]
from = "trainer-*"
to = "host-1"
both = true
latency_ms = 80
[[link]]
from = "trainer-0"
to = "host-1"
latency_ms = 1
[[machine]]
peer = "host-2"
up_mbit_per_s = 8
"""
MEGABYTE = 1_000_000


def described() -> Links:
    return Links.parse(tomllib.loads(TEXT))


def test_description_last_rule_that_fits_decides() -> None:
    links = described()
    assert links.shape("host-0", "host-2") == LinkShape(latency_s=0.02, bytes_per_s=10e6)
    assert links.shape("trainer-1", "host-1").latency_s == 0.08
    assert links.shape("host-1", "trainer-0").latency_s == 0.08
    assert links.shape("trainer-0", "host-1").latency_s == 0.001
    assert links.machine("host-2") == (1e6, math.inf)
    assert links.machine("host-0") == (math.inf, math.inf)


@pytest.mark.parametrize(
    ("description", "key"),
    [
        ({"default": {"latency": 3}}, "default.latency"),
        ({"default": {"loss": 1.5}}, "default.loss"),
        ({"link": [{"from": "a", "latency_ms": 1}]}, "link.0.to"),
        ({"machine": [{"peer": "a", "up_mbit_per_s": 0}]}, "machine.0.up_mbit_per_s"),
        ({"default": {"latency_ms": -1}}, "default.latency_ms"),
        ({"links": []}, "links"),
    ],
)
def test_description_that_is_wrong_names_its_key(description: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        Links.parse(description)


def test_large_messages_of_a_link_wait_for_each_other_and_small_ones_do_not() -> None:
    traffic = Traffic(described())
    assert traffic.fate("host-0", "host-3", MEGABYTE, 0.0).seconds == pytest.approx(0.12)
    assert traffic.fate("host-0", "host-3", MEGABYTE, 0.05).seconds == pytest.approx(0.17)
    assert traffic.fate("host-0", "host-3", OVERTAKING_BYTES, 0.06).seconds < 0.03
    assert traffic.fate("host-3", "host-0", MEGABYTE, 0.06).seconds == pytest.approx(0.12)
    assert traffic.fate("host-0", "host-3", MEGABYTE, 9.0).seconds == pytest.approx(0.12)


def test_machine_is_shared_by_its_links() -> None:
    traffic = Traffic(described())
    assert traffic.fate("host-2", "host-0", MEGABYTE, 0.0).seconds == pytest.approx(1.02)
    assert traffic.fate("host-2", "host-3", MEGABYTE, 0.0).seconds == pytest.approx(2.02)


def test_loss_is_delay_and_a_lower_rate() -> None:
    clean, lossy = LinkShape(latency_s=0.05, bytes_per_s=1e8), LinkShape(latency_s=0.05, bytes_per_s=1e8, loss=0.01)
    assert lossy.tcp_bytes_per_s < clean.tcp_bytes_per_s / 100
    traffic = Traffic(Links(default=lossy))
    small = [traffic.fate("a", "b", 100, float(index)).seconds for index in range(1000)]
    late = [seconds for seconds in small if seconds > 0.2]
    assert 2 <= len(late) <= 30
    assert min(late) >= 0.05 + 0.2


def test_same_seed_gives_the_same_fates() -> None:
    shape = LinkShape(latency_s=0.01, jitter_s=0.1, loss=0.05, reset=0.01)
    runs = [[Traffic(Links(shape, seed=seed)).fate("a", "b", 9, 0.0) for _ in range(3)] for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_a_link_is_cut_until_the_last_cause_is_over_and_the_newest_shape_decides() -> None:
    traffic = Traffic()
    for cause in ("timed", "lasting"):
        traffic.cut(("a",), ("b",), cause=cause)
    traffic.slow("a", "b", LinkShape(latency_s=1.0), cause="older")
    traffic.slow("a", "b", LinkShape(latency_s=2.0), cause="newer")
    traffic.heal(only="timed")
    assert traffic.is_cut("a", "b")
    assert traffic.shape("a", "b").latency_s == 2.0
    traffic.heal(only="newer")
    assert traffic.shape("a", "b").latency_s == 1.0
    traffic.heal(but="lasting")
    assert traffic.is_cut("a", "b")
    assert traffic.shape("a", "b") == LinkShape()
    traffic.heal(("a",), ("b",), only="lasting")
    assert not traffic.is_cut("a", "b")


def test_link_slowed_by_command_is_as_described_after_healing() -> None:
    traffic = Traffic(described())
    traffic.slow("host-0", "host-3", LinkShape(latency_s=2.0))
    assert traffic.fate("host-0", "host-3", 10, 0.0).seconds == 2.0
    assert traffic.fate("host-3", "host-0", 10, 0.0).seconds < 0.03
    traffic.heal(("host-0",), ("host-3",))
    assert traffic.fate("host-0", "host-3", 10, 0.0).seconds < 0.03
