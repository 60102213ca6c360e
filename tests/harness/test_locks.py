"""The lock files: whole, of one mind, and with what the project asks for."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.harness.locks import APART, BUILD, CUDA, DEV, LOCKS, cpu_build, entries, split
from tests.harness.sources import ROOT

FILES = ("build.txt", "run.txt", "dev.txt", *(f"{name}.txt" for name in APART), "torch-cpu.txt", "torch-cuda.txt")
PAGE = """<a href="/whl/cpu/torch-2.0.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl#sha256={a}">one</a>
<a href="/whl/cpu/torch-2.0.0%2Bcpu-cp313-cp313t-manylinux_2_28_x86_64.whl#sha256={b}">two</a>
<a href="/whl/cpu/torch-2.0.0%2Bcpu-cp311-cp311-win_amd64.whl#sha256={c}">not ours</a>
<a href="/whl/cpu/torch-2.0.1%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl#sha256={c}">another version</a>"""
A, B, C = "a" * 64, "b" * 64, "c" * 64
MARKER = " ; sys_platform == 'linux'"


def lock(name: str) -> dict[str, str]:
    return entries((LOCKS / name).read_text())


@pytest.mark.parametrize("name", FILES)
def test_every_pin_in_a_lock_is_one_version_with_its_hashes(name: str) -> None:
    text = (LOCKS / name).read_text()
    lines = text.splitlines()
    assert len(lock(name)) == sum(not line.startswith(" ") for line in lines), "nothing but pins"
    for lines_of_one in lock(name).values():
        assert re.fullmatch(r"[a-z0-9-]+===[^ ]+( ; [^\\]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+\n", lines_of_one)


def test_locks_cover_what_the_project_and_its_extras_ask_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    asked = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["dev"], *BUILD]
    names = {re.split(r"[^a-z0-9-]", each)[0] for each in asked}
    assert names <= lock("dev.txt").keys() | {"torch"}
    run = {re.split(r"[^a-z0-9-]", each)[0] for each in project["project"]["dependencies"]}
    assert run <= lock("run.txt").keys() | {"torch"}
    assert set(BUILD) <= lock("build.txt").keys()
    for extra in APART:
        assert {re.split(r"[^a-z0-9-]", each)[0] for each in extras[extra]} <= lock(f"{extra}.txt").keys()
        assert not lock(f"{extra}.txt").keys() & lock("dev.txt").keys(), "make setup leaves them out"
    named = {*DEV[1::2], *APART}
    assert named == extras.keys(), "each extra is in one of them"


def test_locks_agree_with_each_other() -> None:
    everything = lock("dev.txt")
    for part in ("run.txt", "build.txt"):
        assert lock(part).items() <= everything.items()
    assert not [name for name in everything if CUDA.fullmatch(name)], "the build of torch is chosen at set-up"
    (cpu,), cuda = lock("torch-cpu.txt").values(), lock("torch-cuda.txt")["torch"]
    assert cpu.split()[0] == cuda.split()[0] + "+cpu"


def test_resolution_is_cut_into_what_runs_what_builds_and_each_build_of_torch() -> None:
    def pin(name: str) -> str:
        return f"{name}==1.0{MARKER} \\\n    --hash=sha256:{A}\n"

    everything = "".join(map(pin, ["numpy", "nvidia-nccl-cu13", "pytest", "setuptools", "torch", "triton", "wandb"]))
    dev = "".join(map(pin, ["numpy", "pytest", "setuptools", "torch"]))
    apart = {"wandb": pin("wandb") + pin("numpy")}
    texts = split(everything, dev, pin("numpy") + pin("torch"), pin("setuptools"), apart)
    assert {name: list(entries(text)) for name, text in texts.items()} == {
        "build.txt": ["setuptools"],
        "run.txt": ["numpy"],
        "dev.txt": ["numpy", "pytest", "setuptools"],
        "wandb.txt": ["wandb"],
        "torch-cuda.txt": ["nvidia-nccl-cu13", "torch", "triton"],
    }
    assert texts["run.txt"] == f"numpy===1.0 \\\n    --hash=sha256:{A}\n", "what all have in common is not repeated"


def test_hashes_of_the_cpu_build_come_from_its_index_or_stay() -> None:
    made = cpu_build("2.0.0", PAGE.format(a=A, b=B, c=C), "")
    assert made == f"torch===2.0.0+cpu \\\n    --hash=sha256:{A} \\\n    --hash=sha256:{B}\n"
    assert cpu_build("2.0.0", "", made) == made
    with pytest.raises(ValueError, match=r"2\.0\.1\+cpu are unknown"):
        cpu_build("2.0.1", "", made)
