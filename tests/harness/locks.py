"""Write the lock files of ``locks/`` anew: ``python -m tests.harness.locks [ARGUMENT OF UV …]``, or ``make lock``.

uv resolves what ``pyproject.toml`` asks for, for every Python that it allows, and lists the hash of every file of each
release. Pins that are there stay; ``--upgrade`` and ``--upgrade-package NAME`` raise them. One resolution is cut into
the files that are installed from: the build of torch is chosen at set-up, so torch and what only its CUDA build brings
along are in files of their own. The hashes of the CPU builds come from their index where it answers, and stay as they
are while torch does.

Pins are written with ``===``: a wheel of the same version with a local suffix, in a folder that pip is to look in, does
not meet them, where it would meet ``==`` and be preferred.
"""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote

from tests.harness.sources import ROOT

LOCKS = ROOT / "locks"
CUDA = re.compile(r"(torch|triton|cuda-.*|nvidia-.*)")
"""Packages that the CUDA build of torch consists of, itself among them."""
BUILD = ["hatchling", "editables", "setuptools"]
"""What builds the project, and the packages that have no wheel."""
IMAGE = ["--extra", "hf", "--extra", "observe"]
"""What the image has beside the project: peers in it join runs of models of transformers, and serve dashboards."""
DEV = ["--extra", "dev", "--extra", "data", "--extra", "top", *IMAGE]
APART = ("tensorboard", "wandb", "mlflow", "docs")
"""Extras that are no part of a set-up: ``NAME.txt`` has what one needs beside the rest."""
INDEX = "https://download.pytorch.org/whl/cpu"
"""Where the CPU builds of torch are, as in the Makefile."""
_PINNED = ("dev.txt", *(f"{name}.txt" for name in APART), "torch-cuda.txt")
_ENTRY = re.compile(r"^([a-z0-9][a-z0-9-]*)===?([^ ]+)((?:.*\n)(?: .*\n)*)", re.MULTILINE)
_ASKED = ["--quiet", "--universal", "--python-version", "3.11", "--generate-hashes", "--no-annotate", "--no-header"]


def entries(text: str) -> dict[str, str]:
    """Return each package's lines in a lock, the pin as we write it, by its name.

    uv writes the environments of ``pyproject.toml`` to each pin; where a pin says no more than torch's, that goes.
    """
    everywhere = re.search(r"^torch==\S+( ;.*) \\$", text, re.MULTILINE)
    text = text.replace(everywhere[1], "") if everywhere else text
    return {name: f"{name}==={version}{rest}" for name, version, rest in _ENTRY.findall(text)}


def split(everything: str, dev: str, run: str, build: str, apart: Mapping[str, str]) -> dict[str, str]:
    """Cut a resolution into files.

    Args:
        everything: The resolution of all extras and of what builds.
        dev: That of what developing needs and of what builds, with the same pins.
        run: That of what the image holds, with the same pins.
        build: That of what builds, with the same pins.
        apart: Those of the project with one extra of :data:`APART` each, by its name, with the same pins.

    Returns:
        The files' texts by their names; ``torch-cpu.txt`` is not among them.
    """
    pins = {name: lines for name, lines in entries(everything).items() if not CUDA.fullmatch(name)}
    cuda = {name: lines for name, lines in entries(everything).items() if CUDA.fullmatch(name)}
    had = entries(dev).keys()
    return {
        "build.txt": "".join(lines for name, lines in pins.items() if name in entries(build)),
        "run.txt": "".join(lines for name, lines in pins.items() if name in entries(run)),
        "dev.txt": "".join(lines for name, lines in pins.items() if name in entries(dev)),
        **{
            f"{extra}.txt": "".join(lines for name, lines in pins.items() if name in entries(asked).keys() - had)
            for extra, asked in apart.items()
        },
        "torch-cuda.txt": "".join(cuda.values()),
    }


def cpu_build(version: str, page: str, old: str) -> str:
    """Return the lock of torch's CPU builds for Linux.

    Args:
        version: The version of torch, without a local suffix.
        page: The index's page of torch, empty where it does not answer.
        old: The lock so far.

    Raises:
        ValueError: Neither the page nor the lock has this version.
    """
    name = rf"torch-{re.escape(version)}\+cpu-cp3\d+-cp3\d+t?-manylinux_\w+\.whl"
    found = sorted(set(re.findall(rf"/({name})#sha256=([0-9a-f]{{64}})", unquote(html.unescape(page)))))
    if found:
        hashes = "".join(f" \\\n    --hash=sha256:{digest}" for _, digest in found)
        return f"torch==={version}+cpu{hashes}\n"
    if not old.startswith(f"torch==={version}+cpu "):
        raise ValueError(f"the hashes of torch {version}+cpu are unknown: the index of CPU builds has to answer")
    return old


def _compile(asked: list[str], pins: Path, *more: str) -> str:
    """Return what uv resolves, with the pins of a lock."""
    with tempfile.TemporaryDirectory() as scratch:
        source, target = Path(scratch) / "asked.in", Path(scratch) / "lock.txt"
        source.write_text("\n".join(asked) + "\n")
        if pins.exists():
            target.write_text(pins.read_text().replace("===", "=="))
        uv = Path(sys.executable).with_name("uv")
        command = [uv, "pip", "compile", *_ASKED, "--output-file", target, *more, source]
        subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"TMPDIR": scratch})  # uv leaves locks there
        return target.read_text()


def _page(index: str) -> str:
    """Return the index's page of torch; nothing where it does not answer."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=8) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def main(arguments: list[str]) -> int:
    """Write the files."""
    project = ["pyproject.toml"]
    with tempfile.TemporaryDirectory() as scratch:
        pins = Path(scratch) / "pins.txt"
        known = [entries((LOCKS / name).read_text()) for name in _PINNED if (LOCKS / name).exists()]
        pins.write_text("".join({name: lines for lock in known for name, lines in lock.items()}.values()))
        extras = [word for name in APART for word in ("--extra", name)]
        everything = _compile(BUILD, pins, *DEV, *extras, *arguments, *project)
        pins.write_text(everything)
        dev = _compile(BUILD, pins, *DEV, *project)
        apart = {name: _compile([], pins, "--extra", name, *project) for name in APART}
        texts = split(everything, dev, _compile([], pins, *IMAGE, *project), _compile(BUILD, pins), apart)
    (version,) = re.findall(r"^torch===(\S+)", texts["torch-cuda.txt"], re.MULTILINE)
    cpu = LOCKS / "torch-cpu.txt"
    try:
        page = _page(os.environ.get("TORCH_CPU_INDEX") or INDEX)
        texts["torch-cpu.txt"] = cpu_build(version, page, cpu.read_text() if cpu.exists() else "")
    except ValueError as error:
        print(f"lock: error: {error}. Check TORCH_CPU_INDEX, then: make lock. Nothing was changed.", file=sys.stderr)
        return 1
    for name, text in texts.items():
        (LOCKS / name).write_text(text)
        print(f"locks/{name}: {len(entries(text))} packages, {text.count('--hash=')} files")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except subprocess.CalledProcessError as failed:
        print("lock: error: uv could not resolve it; its own message is above. Nothing was changed.", file=sys.stderr)
        sys.exit(failed.returncode)
