from __future__ import annotations

import hashlib
import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_shards.router import Points, Router, described, learn
from swarm.errors import ConfigError
from swarm.schema import BINS, MOST_IN_BIN

WORDS = ["the", "of", "and", "owl", "sees", "a", "mouse", "near", "old", "houses", "by", "night", "rivers", "slowly"]


def _prose(chance: random.Random) -> str:
    return " ".join(chance.choices(WORDS, k=60)).capitalize() + "."


def _code(chance: random.Random) -> str:
    names = chance.choices(["self", "item", "total", "index"], k=8)
    return "".join(f"    if {name}.{name} is not None:\n        {name} = [{name}(x) for x in y]\n" for name in names)


def _table(chance: random.Random) -> str:
    return "".join(f"{chance.randint(0, 999)};{chance.gauss(0, 9):.2f};{chance.choice('ABC')}\n" for _ in range(40))


def _rows(make: object, count: int, seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [list(make(chance).encode()[:200]) for _ in range(count)]  # type: ignore[operator]


def test_kinds_of_text_are_told_apart_without_labels() -> None:
    kinds = (_prose, _code, _table)
    given_ = np.array([row for make in kinds for row in _rows(make, 60, 1)])
    router = Router(learn(Points(described(given_), np.ones(180, np.int64)), 3, seed=0))
    found = [Counter(router.choice_of(row) for row in _rows(make, 40, 2)) for make in kinds]
    assert [max(one.values()) for one in found] == [40, 40, 40]
    assert len({one.most_common(1)[0][0] for one in found}) == 3


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=80))
def test_description_is_the_whole_root_of_each_share(tokens: list[int]) -> None:
    found = described(np.array([tokens, tokens], np.uint32))[1]
    counts = Counter((token * 0x9E3779B1 >> 24) % BINS for token in tokens)
    assert found.tolist() == [math.isqrt(counts[one] * MOST_IN_BIN**2 // max(1, len(tokens))) for one in range(BINS)]


def test_description_of_what_counts_is_that_of_it_alone() -> None:
    row = np.arange(40)[None]
    assert np.array_equal(described(row, row < 7), described(row[:, :7]))
    assert not described(row, row < 0).any()


def test_router_takes_the_first_of_centres_that_are_equally_near() -> None:
    near = described(np.array([[1, 2, 3]]))[0].tolist()
    assert Router([[0] * BINS, near, near]).choice_of([3, 2, 1]) == 1


def test_centres_never_change() -> None:
    tokens = np.array(_rows(_prose, 30, 1) + _rows(_table, 50, 1))
    centres = learn(Points(described(tokens), np.arange(80) + 1), 4, seed=7)
    assert hashlib.sha256(repr(centres).encode()).hexdigest()[:16] == "89ad05d35840804e"


def test_centres_of_points_far_too_heavy_are_those_of_light_ones() -> None:
    at = described(np.array(_rows(_prose, 30, 1) + _rows(_table, 30, 1)))
    light, heavy = (learn(Points(at, np.full(60, weight)), 2, seed=0) for weight in (1, 2**52))
    assert light == heavy


def test_more_kinds_than_the_text_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 2"):
        learn(Points(described(np.array([[1, 2], [3, 4]] * 9)), np.ones(18, np.int64)), 3, seed=0)
