"""Grafana's board of a run: it asks for metrics that there are, and for all of them."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.harness.rigs.dashboard import board, board_expressions, eventful_exposition

METRIC = re.compile(r"\bswarm_\w+")
NOT_SHOWN = {"swarm_dashboard_viewers": "about the dashboard, not about the run"}


def served() -> dict[str, set[str]]:
    """Return the labels of each metric that a dashboard serves, by the name that Prometheus knows it by."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(eventful_exposition()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("expression", board_expressions())
def test_expression_asks_for_metrics_of_one_dashboard(expression: str) -> None:
    assert set(METRIC.findall(expression)) <= served().keys()
    assert METRIC.search(expression)
    assert 'instance="$instance"' in expression, "two dashboards of a run tell the same twice"


def test_every_metric_is_shown_unless_there_is_a_reason() -> None:
    shown = {name for expression in board_expressions() for name in METRIC.findall(expression)}
    assert served().keys() - shown == NOT_SHOWN.keys()


def test_curves_are_named_by_labels_that_their_metrics_have() -> None:
    labels = served()
    for panel in board()["panels"]:
        names = [target["legendFormat"] for target in panel["targets"]]
        assert len(set(names)) == len(names), panel["title"]
        for target in panel["targets"]:
            (metric,) = METRIC.findall(target["expr"])
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels[metric], panel["title"]


def test_panels_have_ids_and_places_of_their_own() -> None:
    panels = board()["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    assert len({panel["title"] for panel in panels}) == len(panels)
    taken = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(taken)) == len(taken)
    assert max(x for x, _ in taken) < 24


def test_board_asks_the_data_source_that_its_reader_chose_and_takes_no_plugin() -> None:
    source, instance = board()["templating"]["list"]
    assert (source["type"], source["query"], source["name"]) == ("datasource", "prometheus", "datasource")
    assert METRIC.findall(instance["definition"])[0] in served()
    assert instance["query"]["query"] == instance["definition"]
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    for panel in board()["panels"]:
        assert panel["type"] in ("stat", "timeseries"), "part of Grafana itself"
        assert all(each["datasource"] == chosen for each in (panel, instance, *panel["targets"]))
