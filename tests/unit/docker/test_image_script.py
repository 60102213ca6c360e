"""docker/image.sh, with stand-ins for the engine and for gathering wheels."""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

import pytest

from tests.harness.rigs.docker import Place

VERSION = "swarm-trainer:1.2.3-cpu"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(tmp_path, "docker/image.sh", "docker/build.sh")
    (place.root / "pyproject.toml").write_text('version = "1.2.3"\n')
    wheels = place.root / "docker" / "wheels.sh"
    wheels.write_text("#!/bin/sh\n")
    wheels.chmod(0o755)
    place.answers({"run": (0, "1 total\n"), "context inspect": (0, "rootless\n")})
    return place


def built(place: Place, **more: str) -> subprocess.CompletedProcess[str]:
    done = place.run("docker/image.sh", BASE_IMAGE="some-base", **more)
    assert done.returncode == 0, done.stderr
    return done


def test_image_that_has_another_name_stays_when_its_tags_move(place: Place) -> None:
    place.images({VERSION: "old", "swarm-trainer:local": "old", "swarm-trainer:mine": "old"})
    assert built(place).stdout == f"{VERSION}\n"
    assert place.has()["swarm-trainer:mine"] == "old"
    assert place.has()["swarm-trainer:local"] == place.has()[VERSION] == "new"


def test_image_that_has_no_name_left_is_removed(place: Place) -> None:
    place.images({VERSION: "old", "swarm-trainer:local": "older"})
    built(place)
    assert set(place.has().values()) == {"new"}


def test_image_of_a_tag_leaves_the_other_tags_alone(place: Place) -> None:
    place.images({VERSION: "old", "swarm-trainer:local": "old"})
    assert built(place, TAG="mend").stdout == "swarm-trainer:mend\n"
    assert place.has() == {VERSION: "old", "swarm-trainer:local": "old", "swarm-trainer:mend": "new"}


def test_image_of_tests_says_of_which(place: Place) -> None:
    built(place, TAG="test-17", SWARM_TEST_ID="17/ab")
    (build,) = place.calls("build")
    assert {"swarm.test=17", "TEST=17"} <= set(build)
    built(place)
    assert not [word for word in place.calls("build")[-1] if "17" in word]


def test_image_is_built_by_the_engine_itself_and_without_network(place: Place) -> None:
    built(place, BUILDX_BUILDER="in-a-container")
    assert place.builders() == ["rootless"]
    (build,) = place.calls("build")
    assert build[build.index("--network") + 1] == "none"


def test_second_build_from_a_checkout_waits_for_the_first(place: Place) -> None:
    with (place.root / "docker" / "image.sh").open() as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        with place.begin("docker/image.sh", BASE_IMAGE="some-base") as second:
            assert second.stderr is not None
            assert "waiting" in second.stderr.readline()
            assert not place.calls("build")
            fcntl.flock(first, fcntl.LOCK_UN)
            assert second.communicate(timeout=300)[0] == f"{VERSION}\n"
