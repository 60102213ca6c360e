"""docker/base-image.sh, with stand-ins for the engine and debootstrap."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.rigs.docker import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, "docker/base-image.sh", "docker/build.sh")


def test_nemesis_is_made_from_an_official_image_that_is_here(place: Place) -> None:
    place.images({"python:3.11-slim": "official"})
    done = place.run("docker/base-image.sh", "--nemesis", DEBIAN_MIRROR="http://mirror")
    assert (done.returncode, done.stdout) == (0, "swarm-nemesis:local\n"), done.stderr
    (build,) = place.calls("build")
    assert {"OFFICIAL=python:3.11-slim", "MIRROR=http://mirror", "PACKAGES=iproute2 iptables libfaketime"} <= set(build)
    assert not place.calls("pull")


def test_prometheus_is_made_the_same_way_with_a_directory_of_its_own(place: Place) -> None:
    place.images({"debian:bookworm-slim": "official"})
    done = place.run("docker/base-image.sh", "--observe")
    assert (done.returncode, done.stdout) == (0, "swarm-observe:local\n"), done.stderr
    (build,) = place.calls("build")
    finish = "FINISH=install -d -o prometheus -g prometheus /data"
    assert {"OFFICIAL=debian:bookworm-slim", "MIRROR=", "PACKAGES=prometheus", finish} <= set(build)


@pytest.mark.parametrize("fails", ["pull", "build"])
def test_nemesis_without_official_image_or_its_packages_is_made_by_debootstrap(place: Place, fails: str) -> None:
    place.program("debootstrap", "#!/bin/sh\necho bootstrapped\nexit 1\n")
    place.answers({fails: (1, "")})
    done = place.run("docker/base-image.sh", "--nemesis", CACHE=str(place.programs / "cache"))
    assert done.returncode == 1
    assert "it is made by debootstrap" in done.stderr
    # Who is not root is told so, and what else there is.
    assert "bootstrapped" in done.stderr or "docker pull debian:bookworm-slim" in done.stderr
