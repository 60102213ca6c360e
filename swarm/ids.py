"""Names of things, each defined once."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple, NewType

PeerId = NewType("PeerId", str)
"""Base58 libp2p peer id of an Ed25519 key; in simulation any short alphanumeric name."""

RunId = NewType("RunId", str)
"""Hex sha256 of the canonical JSON of the resolved manifest."""

PartName = NewType("PartName", str)
"""What a group of replicas holds: ``stage-0`` … ``stage-N``, of a stage with variants ``stage-1.v0of4`` … one of
them; or ``shared-N``, the layers that N stages have in common while a run shares them; or ``ends`` (private embedding,
head and loss)."""

ENDS = PartName("ends")


MAX_NAME = 64
NAME_WORDS = f"1 to {MAX_NAME} letters and digits of any script, . _ and -, the first a letter or digit"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_UNSEEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0\ufe00-\ufe0f\U000e0100-\U000e01ef]")
"""Letters and marks that are not shown."""
_HEAPED = "MMMM"
"""More marks on a letter than any language writes."""


def is_name(text: str) -> bool:
    """Return whether a peer may be called so: :data:`NAME_WORDS`, in Unicode's NFC. So a name has no spaces, markup,
    signs of direction, control characters or letters that are not shown. Letters of two scripts may look alike."""
    if not 1 <= len(text) <= MAX_NAME:
        return False
    if text.isascii():
        return _NAME.fullmatch(text) is not None
    kinds = [unicodedata.category(letter)[0] for letter in text]
    lettered = all(kind in "LMN" or letter in "._-" for kind, letter in zip(kinds, text, strict=True))
    shown = not _UNSEEN.search(text) and _HEAPED not in "".join(kinds)
    return lettered and shown and kinds[0] in "LN" and unicodedata.is_normalized("NFC", text)


def distinct_names(names: Mapping[str, str]) -> dict[str, str]:
    """Return what people are shown of peers' ``names``, by id: of those that several have, with the end of the id
    behind a ``~``, which no name has."""
    often = Counter(names.values())
    return {peer: name if often[name] == 1 else f"{name}~{peer[-6:]}" for peer, name in names.items()}


def stage_part(stage: int, variant: int = 0, of: int = 1) -> PartName:
    """The part name of a stage, or of one variant ``of`` so many of it."""
    return PartName(f"stage-{stage}" if of == 1 else f"stage-{stage}.v{variant}of{of}")


def stage_of(part: PartName) -> int | None:
    """The stage that a part is, or is a variant of, None for one that is none."""
    return int(part.removeprefix("stage-").partition(".")[0]) if part.startswith("stage-") else None


def variant_of(part: PartName) -> tuple[int, int]:
    """Which variant of its stage a part is, and of how many: the inverse of :func:`stage_part`."""
    variant, _, of = part.partition(".v")[2].partition("of")
    return (int(variant), int(of)) if of else (0, 1)


def shared_part(stages: int) -> PartName:
    """The part name of the layers that so many stages share."""
    return PartName(f"shared-{stages}")


def shared_by(part: PartName) -> int:
    """How many stages share a part, 0 for one that is not shared: the inverse of :func:`shared_part`."""
    return int(part.removeprefix("shared-")) if part.startswith("shared-") else 0


class MicrobatchId(NamedTuple):
    """Identity of one microbatch for ever: the same data read again in another epoch is another microbatch.

    ``shard`` is the first 16 hex digits of the shard's digest; ``position`` counts microbatches within the epoch.
    """

    trainer: PeerId
    shard: str
    epoch: int
    position: int

    def __str__(self) -> str:
        return f"{self.trainer[-6:]}/{self.shard[:6]}/{self.epoch}/{self.position}"


class StepWork(NamedTuple):
    """What counts once at each part: a microbatch of a step, computed with the parameters of the record before the
    step or, ``early``, with those of the one before that. At a part that stages share it counts once for each of them:
    ``hop`` is which; 0 elsewhere."""

    step: int
    microbatch: MicrobatchId
    early: bool = False
    hop: int = 0

    @property
    def version(self) -> int:
        """The step whose record's parameters it is computed with."""
        return self.step - 1 - self.early

    @property
    def ready_in(self) -> int:
        """The first step in which it can be computed: the one that follows that record."""
        return self.version + 1

    def __str__(self) -> str:
        return f"{self.microbatch} of step {self.step}{', early' if self.early else ''}"


ATTEMPTS_OF_A_WAY = 1 << 20


class JourneyKey(NamedTuple):
    """One attempt at one microbatch in one step. ``after`` begins the hash of the record that the step follows: the
    steps of a lineage that was given up are numbered alike, and computed with other parameters."""

    step: int
    microbatch: MicrobatchId
    attempt: int
    after: str = ""

    @property
    def way(self) -> int:
        """Return how often the microbatch was begun anew before: each way has attempts of its own."""
        return self.attempt // ATTEMPTS_OF_A_WAY
