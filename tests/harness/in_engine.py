"""What tests made in a Docker engine: ``python -m tests.harness.in_engine`` names what they left there, and removes it.

Images, and what a play of theirs makes, carry the label ``swarm.test``; what compose makes carries its project, which
is called after them as well; a container has the labels of its image. What carries neither is somebody else's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

from peers.chaos.engine import TEST, Engine
from peers.chaos.leftovers import detach
from tests.harness.processes import MARKER

CALL_S = 300.0
_THINGS = (
    ("container", ("ps", "--all", "--quiet"), ("rm", "--force", "--volumes")),
    ("network", ("network", "ls", "--quiet"), ("network", "rm")),
    ("volume", ("volume", "ls", "--quiet"), ("volume", "rm", "--force")),
)
_IMAGES = ("image", ("image", "ls", "--quiet"), ("image", "rm", "--force"))


def test_id() -> str:
    """Of this run of the tests: the part that all its processes share. "" outside of one."""
    return os.environ.get(MARKER, "").partition("/")[0]


def label() -> str:
    """What is made for these tests is labelled with it."""
    return f"{TEST}={test_id()}"


def project() -> str:
    """What compose is to call what it makes for these tests."""
    return f"swarmtest-{test_id()}"


def clear(client: str = "docker") -> list[str]:
    """Remove what this run of the tests has made. Returns the containers, networks and volumes that were still there,
    "container 0a1b…" each; images are expected to be. Raises RuntimeError with the engine's words, also for a run
    without an id. Blocks, for as long as the engine takes."""
    if not test_id():
        raise RuntimeError(f"{MARKER} is not set: nothing here is known to be made by tests")
    left = [f"{kind} {name}" for kind, *how in _THINGS for name in _remove(client, *how)]
    _remove(client, *_IMAGES[1:])
    return left


def _remove(client: str, listing: tuple[str, ...], removal: tuple[str, ...]) -> list[str]:
    """What was there. With one of them others may go, so that what counts is that none stays."""
    if found := _carrying(client, listing):
        if removal[0] == "network":
            detach(Engine("", client), found)
        said = _run(client, *removal, *found).stderr.strip()
        if stays := _carrying(client, listing):
            raise RuntimeError(f"{client} {' '.join(removal)}: {', '.join(stays)}: {said}")
    return found


def _carrying(client: str, listing: tuple[str, ...]) -> list[str]:
    said = (_call(client, *listing, "--filter", f"label={by}") for by in _labels())
    return list(dict.fromkeys(name for lines in said for name in lines.split()))


def _labels() -> Iterator[str]:
    yield label()
    yield f"com.docker.compose.project={project()}"


def _call(client: str, *arguments: str) -> str:
    done = _run(client, *arguments)
    if done.returncode:
        raise RuntimeError(f"{client} {' '.join(arguments[:2])}: {done.stderr.strip()}")
    return done.stdout


def _run(client: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([client, *arguments], capture_output=True, text=True, timeout=CALL_S, check=False)


def main() -> int:
    """Exit code 1 when something was left."""
    left = clear()
    for thing in left:
        print(f"left behind in the engine: {thing}", file=sys.stderr)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
