"""The rig of the scripts of ``docker/``: a place of their own, with stand-ins for the programs that they call."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.harness.sources import ROOT

# Images lie in images.json (name: id; nameless ones under their id), all calls in calls.jsonl; what is said to a call,
# and its exit code, in answers.json by how the call begins.
CLIENT = f"""#!{sys.executable} -IS
import json, os, sys
here = os.path.dirname(os.path.abspath(__file__))
arguments = sys.argv[1:]
def read(name):
    with open(os.path.join(here, name)) as file:
        return json.load(file)
images = read("images.json")
with open(os.path.join(here, "calls.jsonl"), "a") as file:
    file.write(json.dumps([arguments, os.environ.get("BUILDX_BUILDER", "")]) + "\\n")
if arguments[:2] == ["image", "inspect"]:
    name = arguments[-1]
    found = images.get(name, name if name in images.values() else None)
    if found is None:
        sys.exit("no such image")
    names = [one for one, what in images.items() if what == found and one != found]
    print({{"{{{{.Id}}}}": found, "{{{{len .RepoTags}}}}": len(names), "{{{{.Size}}}}": 9}}.get(arguments[-2], ""))
elif arguments[:2] == ["image", "rm"]:
    images = {{one: what for one, what in images.items() if arguments[-1] not in (one, what)}}
elif arguments[0] == "build":
    tags = [word.removeprefix("--tag=") for word in arguments if word.startswith("--tag=")]
    tags += [arguments[i + 1] for i, word in enumerate(arguments) if word == "--tag"]
    for name in tags:
        if name in images:
            images.setdefault(images[name], images[name])
        images[name] = "new"
for begins, (code, said) in read("answers.json").items():
    if " ".join(arguments).startswith(begins):
        sys.stdout.write(said)
        sys.exit(code)
with open(os.path.join(here, "images.json"), "w") as file:
    json.dump(images, file)
"""


class Place:
    """A checkout with scripts of ours in it, and the programs that these call in ``programs``."""

    def __init__(self, root: Path, *scripts: str) -> None:
        self.root, self.programs = root / "a place", root / "programs"
        self.programs.mkdir()
        for name in scripts:
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
        self.program("docker", CLIENT)
        self.images({})
        self.answers({})

    def program(self, name: str, text: str) -> Path:
        """Write a stand-in for a program, and return where."""
        path = self.programs / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def images(self, images: dict[str, str]) -> None:
        """Say what images the engine has."""
        (self.programs / "images.json").write_text(json.dumps(images))

    def answers(self, answers: dict[str, tuple[int, str]]) -> None:
        """Say what the engine answers to calls that begin like this, and with which exit code."""
        (self.programs / "answers.json").write_text(json.dumps(answers))

    def has(self) -> dict[str, str]:
        """Return the engine's images by name."""
        found: dict[str, str] = json.loads((self.programs / "images.json").read_text())
        return found

    def calls(self, *begins: str) -> list[list[str]]:
        """Return the engine's calls that begin like this."""
        return [call for call, _ in self._calls() if call[: len(begins)] == list(begins)]

    def builders(self) -> list[str]:
        """Return where BuildKit was to build, build by build."""
        return [builder for call, builder in self._calls() if call[0] == "build"]

    def run(self, *command: str, umask: int = 0o022, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a script, with nothing in the environment but these and the programs."""
        with self.begin(*command, umask=umask, **more) as process:
            said, complained = process.communicate(timeout=300)
        return subprocess.CompletedProcess(command, process.returncode, said, complained)

    def begin(self, *command: str, umask: int = 0o022, **more: str) -> subprocess.Popen[str]:
        """Start a script as :meth:`run` does, without waiting for its end."""
        environment = {"PATH": f"{self.programs}:{os.environ['PATH']}", "HOME": str(self.root), **more}
        return subprocess.Popen(
            [self.root / command[0], *command[1:]], text=True, env=environment, umask=umask,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def _calls(self) -> list[Any]:
        path = self.programs / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
