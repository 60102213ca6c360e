"""docker/wheels.sh and .ci/setup in a place whose name has a space, with stand-ins for Python, pip and the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.rigs.docker import Place

PYTHON = """#!/bin/sh
case "$*" in
  *libc_ver*) echo "{about}" ;;
  *sys.version.split*) echo 3.11.9 ;;
  *"-m venv "*) for to; do :; done; mkdir -p "$to/bin"; cp "$0" "$to/bin/python" ;;
  *"-m pip "*)
    for word; do echo "$word"; done >>"$CALLS"
    while [ $# -gt 0 ] && [ "$1" != --wheel-dir ]; do shift; done
    if [ $# -gt 0 ]; then mkdir -p "$2"; : >"$2/one.whl"; fi
    ;;
esac
"""
HERE = "3.11 x86_64 glibc 2.36"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(tmp_path, "docker/wheels.sh", ".ci/setup")
    (place.root / "locks").mkdir()
    for name in ("build", "run", "dev", "torch-cpu", "torch-cuda"):
        (place.root / "locks" / f"{name}.txt").write_text("torch===2.0\n")
    (place.root / "pyproject.toml").touch()
    (offered := place.root.parent / "shared" / "wheels").mkdir(parents=True)
    (offered / "torch-2.0+cpu-any.whl").touch()
    place.program("python3", PYTHON.format(about=HERE))
    place.program("python3.11", PYTHON.format(about=HERE))
    return place


def gathered(place: Place, image: str) -> list[str]:
    """What pip was told on this machine, for an image whose Python says this of itself."""
    place.answers({"run --rm --network none": (0, f"{image}\n")})
    calls = place.programs / "pip"
    calls.write_text("")
    settings = {"PIP_FIND_LINKS": str(place.programs), "PIP_CERT": str(calls)}
    place.run("docker/wheels.sh", "cpu", "some-base", CALLS=str(calls), **settings)
    return calls.read_text().splitlines()


def test_wheels_are_gathered_at_a_place_with_spaces(place: Place) -> None:
    offered = place.root.parent / "shared" / "wheels"
    offered.rename(spaced := offered.parent / "my wheels")
    offered.symlink_to(spaced)
    said = gathered(place, HERE)
    assert said.count(str(spaced)) == said.count("--require-hashes") == 4
    wheels = place.root / "docker" / "wheels"
    assert {str(path.relative_to(wheels)) for path in wheels.rglob("*.whl")} == {"cpu/one.whl", "build/one.whl"}
    assert not gathered(place, HERE), "they are there already"


@pytest.mark.parametrize(
    "image", ["3.12 x86_64 glibc 2.36", "3.11 aarch64 glibc 2.36", "3.11 x86_64 glibc 2.4", "3.11 x86_64"]
)
def test_wheels_are_gathered_in_the_image_where_ours_would_not_load_there(place: Place, image: str) -> None:
    assert not gathered(place, image)
    (call,) = place.calls("run", "--rm", "-i")
    for path in (place.programs, place.programs / "pip"):
        assert f"--volume={path}:{path}:ro" in call
    assert f"{place.root.parent / 'shared' / 'wheels'}:/offered:ro" in call
    assert "--env=PIP_INDEX_URL" in call


def test_wheels_for_a_newer_c_library_are_gathered_here(place: Place) -> None:
    assert gathered(place, "3.11 x86_64 glibc 2.41")


def test_setup_offers_wheels_from_a_place_with_spaces(place: Place, tmp_path: Path) -> None:
    calls = tmp_path / "pip"
    links = tmp_path / "shared" / "wheels"
    links.rename(spaced := tmp_path / "my wheels")
    links.symlink_to(spaced)
    done = place.run(".ci/setup", CALLS=str(calls))
    assert done.returncode == 0, done.stderr
    said = calls.read_text().splitlines()
    assert said.count(str(spaced)) == said.count("--require-hashes") == 3
