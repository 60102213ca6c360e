"""Containers of the project write to what they were given, take a bounded share of the machine, and start from a base
that is named by what it holds."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import yaml

from peers.chaos.container_start import CONFINED, MEMORY_MIB
from peers.chaos.nemesis import BOUNDED
from tests.harness.sources import ROOT

COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
GPUS = yaml.safe_load((ROOT / "docker" / "gpus.yaml").read_text())
SERVICES = {**COMPOSE["services"], **{f"gpus {name}": one for name, one in GPUS["services"].items()}}
MAY = {"router": ["NET_ADMIN"], "lan-host": ["NET_ADMIN"]}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_service_is_read_only_bounded_and_without_privileges(name: str) -> None:
    service: dict[str, Any] = SERVICES[name]
    assert service["read_only"] is True
    assert service["mem_limit"] == service["memswap_limit"], "no more by way of the swap"
    assert 0 < service["pids_limit"] <= 1024
    assert service["cap_drop"] == ["ALL"]
    assert service.get("cap_add", []) == MAY.get(name, [])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(re.search(r"size=\d+m", each) for each in service["tmpfs"])
    assert not {"privileged", "pid", "ipc", "devices"} & service.keys()
    assert all(volume.split(":")[-1] in ("ro", "/data", "/invite") for volume in service.get("volumes", ()))


def test_container_of_a_play_is_confined_like_a_service_of_compose() -> None:
    peer = COMPOSE["x-peer"]
    assert CONFINED[:4] == ("--cap-drop", "ALL", "--security-opt", "no-new-privileges")
    assert "--read-only" in CONFINED
    assert CONFINED[CONFINED.index("--tmpfs") + 1] == peer["tmpfs"][0]
    assert CONFINED[CONFINED.index("--pids-limit") + 1] == str(peer["pids_limit"])
    assert peer["mem_limit"] == f"${{SWARM_MEMORY:-{MEMORY_MIB // 1024}g}}"
    assert {"--read-only", "--memory", "--memory-swap", "--pids-limit"} <= set(BOUNDED)


def test_every_container_that_a_play_makes_is_bounded() -> None:
    found = []
    for path in sorted((ROOT / "peers" / "chaos").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.func, ast.Attribute):
                continue
            words = [each.value for each in node.args if isinstance(each, ast.Constant)]
            if words and words[0] in ("run", "create") and "--name" in words:
                found.append(
                    (path.name, {ast.unparse(each.value) for each in node.args if isinstance(each, ast.Starred)})
                )
    assert [name for name, _ in found] == [
        "container_networks.py",
        "container_start.py",
        "container_start.py",
        "nemesis.py",
    ]
    assert all(options & {"CONFINED", "BOUNDED"} for _, options in found)


def test_image_starts_from_a_base_that_is_named_by_what_it_holds() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text()
    assert re.search(r"^ARG BASE_IMAGE=[a-z0-9:.-]+@sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE_IMAGE}"}
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
    assert re.search(r"^snapshot=\S+/\d{8}T\d{6}Z$", (ROOT / "docker" / "base-image.sh").read_text(), re.MULTILINE)
