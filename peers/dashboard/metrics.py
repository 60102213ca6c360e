"""The state of a run as Prometheus reads it. Names follow its rules: base units, ``_total`` for what only grows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST

RUN_GAUGES = {
    "swarm_step": ("The newest closed step", "step"),
    "swarm_loss": ("Loss of that step, nats a target token", "loss"),
    "swarm_tokens_per_second": ("Target tokens a second over the newest steps", "tokens_per_s"),
    "swarm_members": ("Peers in the run", "members"),
}
PEER_GAUGES = {
    "swarm_peer_busy_ratio": ("Share of time in which its device had work", "busy"),
    "swarm_peer_waiting_ratio": ("Share of time in which it waited for others", "waiting"),
    "swarm_peer_idle_ratio": ("Share of time in which it had nothing to do", "idle"),
    "swarm_peer_queued_microbatches": ("Pieces of work that wait for its device", "queued"),
    "swarm_peer_under_way_microbatches": ("Microbatches that it has begun and not done", "under_way"),
    "swarm_peer_sent_bytes_per_second": ("What it sends", "sent_per_s"),
    "swarm_peer_received_bytes_per_second": ("What it receives", "received_per_s"),
}
PEER_TOTALS = {
    "swarm_peer_committed_microbatches": ("Microbatches of it that close records count", "microbatches"),
    "swarm_peer_committed_tokens": ("Target tokens of these", "tokens"),
    "swarm_peer_brought_microbatches": ("Microbatches of its data that close records count", "trained_microbatches"),
    "swarm_peer_audited_hops": ("Hops of its microbatches that others computed again", "audited"),
    "swarm_peer_audited_wrong_hops": ("Those that most found wrong", "audited_wrong"),
    "swarm_peer_audited_doubtful_hops": (
        "Those in doubt, as others differ or lack what it takes",
        "audited_doubtful",
    ),
    "swarm_peer_audited_unjudged_hops": ("Those that nobody could judge", "audited_unjudged"),
}
PART_GAUGES = {
    "swarm_part_live_replicas": ("Replicas of a part of the model that are there", "live"),
    "swarm_part_participating_replicas": ("Those in its newest averaging", "participating"),
    "swarm_part_averaged_replicas": ("Those with work in its result", "averaged"),
}


class _Collector(Collector):
    def __init__(self, state: Mapping[str, Any], viewers: int) -> None:
        self._state, self._viewers = state, viewers

    def collect(self) -> Iterator[Metric]:
        state = self._state
        run = state["run"]
        yield InfoMetricFamily("swarm_run", "The run", {"run": run["id"], "name": run["name"]})
        for name, (words, key) in RUN_GAUGES.items():
            if state[key] is not None:
                yield GaugeMetricFamily(name, words, float(state[key]))
        live = "1 while the figures are of a run that lives, 0 when it is over or its source has fallen silent"
        yield GaugeMetricFamily("swarm_fresh", live, float(state["fresh"]))
        counted = "Target tokens of all steps that closed since this was begun to be counted"
        yield CounterMetricFamily("swarm_tokens", counted, float(state["tokens"]))
        yield GaugeMetricFamily("swarm_dashboard_viewers", "Who looks at this dashboard", float(self._viewers))
        yield self._by_state()
        here = {peer: one for peer, one in state["peers"].items() if one["here"]}
        for name, (words, key) in PEER_GAUGES.items():
            yield _of_peers(GaugeMetricFamily(name, words, labels=_PEER_LABELS), here, key)
        for name, (words, key) in PEER_TOTALS.items():
            yield _of_peers(CounterMetricFamily(name, words, labels=_PEER_LABELS), here, key)
        for name, (words, key) in PART_GAUGES.items():
            family = GaugeMetricFamily(name, words, labels=("part",))
            for part in state["parts"]:
                if part[key] is not None:
                    family.add_metric((part["part"],), float(part[key]))
            yield family

    def _by_state(self) -> Metric:
        family = GaugeMetricFamily("swarm_peers", "Peers by what they do", labels=("state",))
        states = [one["state"] for one in self._state["peers"].values()]
        for state in sorted(set(states)):
            family.add_metric((state,), float(states.count(state)))
        return family


_PEER_LABELS = ("peer", "name", "part")


def _of_peers(
    family: GaugeMetricFamily | CounterMetricFamily, peers: Mapping[str, Mapping[str, Any]], key: str
) -> Metric:
    for peer, one in peers.items():
        if one[key] is not None:
            family.add_metric((peer, one["name"], one["part"] or one["role"]), float(one[key]))
    return family


def exposition(state: Mapping[str, Any], viewers: int) -> bytes:
    """Return a state (:meth:`peers.dashboard.overview.Overview.document`) in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(state, viewers))
    return generate_latest(registry)
