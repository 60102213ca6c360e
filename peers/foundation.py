"""What a user gives to found a run with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Foundation:
    """What the user gave: a preset's name or a file, what replaces values in it, and where the tokenizer comes from.

    ``changes`` are dotted keys such as ``run.steps``; those whose value is None are left as they are. ``texts`` are
    files that a tokenizer is trained on when there is none; without them it is the built-in text. With ``resume`` the
    run is an old one, and ``file`` its directory or a checkpoint's in it, the beginning of its id, or None: the newest.
    """

    preset: str | None
    file: Path | None
    changes: Mapping[str, Any]
    tokenizer: Path | None
    texts: tuple[Path, ...] = ()
    resume: bool = False
