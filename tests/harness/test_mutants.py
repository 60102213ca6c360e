"""Mutants are drawn by the product alone, change one thing each, and live in functions that are there already."""

from __future__ import annotations

import ast
from pathlib import Path
from types import FunctionType

from tests.harness.mutants import DECIDERS, chosen_files, draw, mutants_of, swap
from tests.harness.sources import ROOT

TOY = b"""
LIMIT = 3 if 1 < 2 else 4


def quorum(votes: int, more: int = 7) -> bool:
    if votes > 2 and not (
        more
    ):
        raise ValueError(f"{votes + 1} of 2")
    return votes + more


def other() -> bool:
    while True:
        continue
    return True
"""


def test_mutants_change_bodies_and_neither_limits_nor_wording() -> None:
    mutants = mutants_of("toy.py", TOY)
    assert [(mutant.line, mutant.old, mutant.new) for mutant in mutants] == [
        (6, "votes > 2", "(votes >= 2)"),
        (6, "votes > 2 and not ( more )", "(not (votes > 2 and (not more)))"),
        (6, "votes > 2 and not ( more )", "(votes > 2 or not more)"),
        (6, "2", "(1)"),
        (6, "2", "(3)"),
        (6, "not ( more )", "(more)"),
        (10, "return votes + more", "return None"),
        (10, "votes + more", "(votes - more)"),
        (15, "continue", "pass"),
        (16, "return True", "return False"),
    ]
    for mutant in mutants:
        assert ast.unparse(ast.parse(mutant.applied(TOY))) != ast.unparse(ast.parse(TOY))
        assert mutant.applied(TOY).count(b"\n") == TOY.count(b"\n")


def test_mutants_of_our_deciders_can_be_read() -> None:
    sources = {module: (ROOT / module).read_bytes() for module in DECIDERS}
    for mutant in draw(sources, 2 * len(DECIDERS), 0):
        ast.parse(mutant.applied(sources[mutant.module]))


def test_draw_is_the_same_each_time_and_leaves_no_module_out() -> None:
    sources = {"a.py": TOY, "b.py": TOY}
    assert draw(sources, 9, 1) == draw(dict(reversed(sources.items())), 9, 1)
    assert {mutant.module for mutant in draw(sources, 2, 1)} == {"a.py", "b.py"}
    assert len(draw(sources, 99, 1)) == 2 * len(mutants_of("a.py", TOY))


def test_chosen_files_are_those_that_import_the_module_then_the_cheapest() -> None:
    cost = {"dear": 5.0, "cheap": 1.0, "own": 4.0, "own dear": 30.0}
    assert chosen_files(lambda file: file.startswith("own"), cost, 8) == ["own", "cheap"]


def test_swap_changes_living_functions_of_that_file_alone() -> None:
    source = b"class A:\n    @property\n    def one(self):\n        return 1\n\ndef two():\n    return 2\n"
    ours, others = {}, {}
    exec(compile(source, "toy.py", "exec"), ours)
    exec(compile(source, "other.py", "exec"), others)
    functions: list[FunctionType] = [found for names in (ours, others) for found in (names["A"].one.fget, names["two"])]
    one, two = (mutant for mutant in mutants_of("toy.py", source) if mutant.new in ("(0)", "(3)"))
    assert swap(Path("toy.py"), one.applied(source), functions) == 1
    assert (ours["A"]().one, ours["two"](), others["A"]().one) == (0, 2, 1)
    assert swap(Path("toy.py"), two.applied(source), functions) == 2  # the first as it was
    assert (ours["A"]().one, ours["two"](), others["two"]()) == (1, 3, 2)
