"""What a driver calls a device, and what is known of it."""

from __future__ import annotations

import pytest

from swarm.planning.devices import DEVICES, device_named


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
    ],
)
def test_device_is_known_by_what_its_driver_calls_it(name: str, key: str) -> None:
    assert device_named(name) == DEVICES[key]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA GeForce RTX 2080",
        "L400",
        "AMD Instinct MI300X",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    ],
)
def test_device_that_nobody_told_of_is_not_guessed(name: str) -> None:
    assert device_named(name) is None
