"""The kinds of text that the experts of a run are for: learnt when it is founded, from the founder's text and from
histograms that others hand in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_shards.histogram import MOST_BYTES, TokenHistogram, pieces_of, read_histogram
from data_shards.router import Points, Router, evened, learn
from data_shards.tokenize import Tokenizer, tokenizer_digest
from peers.console.words import command_name, count
from peers.data.text import SAMPLE_CHARACTERS, read_corpus, sample_texts
from peers.data.tokenizer_files import read_bounded
from peers.options.foundation import Foundation
from swarm.errors import ConfigError, Incompatible

_AT_ONCE = 1 << 16
"""Characters that are encoded together."""


@dataclass(frozen=True, slots=True)
class LearntKinds:
    """The sections of a manifest with the kinds that were learnt, none where there were none to learn, and what is said
    of them, as (label, text)."""

    sections: dict[str, Any]
    said: tuple[tuple[str, str], ...] = ()


def variants_said(foundation: Foundation, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``--variants`` says in the manifest, by dotted key: one number is for all stages but the first, and a
    preset starts with a host of each. Raises ConfigError."""
    if foundation.variants is None:
        return {}
    split = document.get("split", {})
    stages = split.get("stages", 2)
    widths = widths_of(foundation.variants, stages if isinstance(stages, int) else 0)
    said: dict[str, Any] = {"split.variants": widths}
    if "route_by" not in split:
        said["split.route_by"] = "domain" if "domains" in split else "text"
    if foundation.file is None and foundation.hosts is None:
        said["run.start_when.stage_hosts"] = sum(widths)
    return said


def widths_of(said: str, stages: int) -> list[int]:
    """Return how many variants each of so many stages has: one number is for all but the first."""
    widths = [int(width) for width in said.split(",")]
    return [*[1] * min(1, stages - 1), *widths * max(1, stages - 1)] if stages and len(widths) == 1 else widths


def kinds_to_learn(document: Mapping[str, Any]) -> int:
    """Return how many kinds of text a manifest leaves open; what is wrong with it is refused later."""
    split = document.get("split")
    if not isinstance(split, dict) or split.get("route_by") != "text" or split.get("centres"):
        return 0
    widths = split.get("variants")
    return (
        max(widths) if isinstance(widths, (list, tuple)) and widths and all(type(one) is int for one in widths) else 0
    )


def check_kinds(foundation: Foundation, document: Mapping[str, Any]) -> None:
    """Raise ConfigError for kinds of text that are to be learnt of nothing, and for what nothing is learnt of."""
    if kinds_to_learn(document):
        if not foundation.text and not foundation.histogram:
            raise ConfigError("--route-by", "text", "--text or --histogram with it",
                              "Add --text FILE of what will be trained on, or --histogram FILE, which "
                              f"{command_name()} data histogram writes.",
                              why="the kinds of text are learnt from it")  # fmt: skip
    elif foundation.histogram:
        raise ConfigError("--histogram", str(foundation.histogram[0]), "only where kinds of text are to be learnt",
                          "Leave it out, or add --variants 4 --route-by text to a run without centres.")  # fmt: skip


def learn_kinds(foundation: Foundation, document: Mapping[str, Any], kinds: int, tokenizer: bytes) -> LearntKinds:
    """Learn so many kinds of text, for a manifest that is otherwise complete.

    Raises Incompatible for a histogram of another tokenizer's shard, ConfigError for what is none, and for text that
    has not so many kinds. Cost: some seconds.
    """
    if not kinds:
        return LearntKinds({})
    found, said = list[Points](), list[str]()
    if foundation.text:
        encoder = Tokenizer(tokenizer, document["tokenizer"].get("end") or None)
        pieces, _ = pieces_of(_token_ids(foundation, encoder), document["model"].get("context", 1024))
        found.append(Points(pieces, np.ones(len(pieces), np.int64)))
        said.append(f"{count(len(pieces), 'piece')} of --text")
    for path in foundation.histogram:
        histogram = _histogram(path, tokenizer)
        found.append(histogram.points())
        said.append(f"{sum(one.pieces for one in histogram.groups)} of {path.name}")
    points = evened(found)
    centres = learn(points, kinds, document.get("run", {}).get("seed", 0))
    weights = np.bincount(Router(centres).choices(points.at), points.weights, kinds)
    shares = ", ".join(f"{100 * weight / weights.sum():.0f}" for weight in weights)
    told = ("kinds", f"{kinds} of text, learnt from {', '.join(said)}, of which they have {shares} %")
    return LearntKinds({"split": {**document["split"], "centres": centres}}, (told,))


def _token_ids(foundation: Foundation, encoder: Tokenizer) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the tokens of the founder's text, of more than eight million characters some from all over."""
    documents: Sequence[str] = read_corpus(foundation.text, allow_bad=foundation.allow_bad).documents
    texts = sample_texts(documents[:: 1 + sum(map(len, documents)) // SAMPLE_CHARACTERS])
    for text in texts:
        ids = [token for at in range(0, len(text), _AT_ONCE) for token in encoder.encode(text[at : at + _AT_ONCE])]
        if ids:
            yield np.array(ids, np.int64)


def _histogram(path: Path, tokenizer: bytes) -> TokenHistogram:
    allowed = f"a file of {command_name()} data histogram"
    histogram = read_histogram(read_bounded(path, "--histogram", allowed, MOST_BYTES), str(path))
    if histogram.tokenizer != (wanted := tokenizer_digest(tokenizer)):
        raise Incompatible("--histogram", str(path), f"that of a shard made with the run's tokenizer, {wanted[:16]}; "
                           f"this was made with {histogram.tokenizer[:16]}",
                           "Found the run with that one: --tokenizer FILE.")  # fmt: skip
    return histogram
