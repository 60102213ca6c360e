"""Parse and check ``--preemption`` and ``--preemption-url``. Standard library only."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

METADATA_URL = "http://169.254.169.254"
"""AWS, GCP and Azure all answer here; as an address, so that no name server is asked and none can lie."""

ALLOWED = "auto, aws, gcp, azure, file:PATH, command:CMD or none"

Cloud = Literal["aws", "gcp", "azure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataUrl:
    """The address of a metadata server: ``host`` without brackets, ``prefix`` of all paths without a ``/`` at its
    end."""

    host: str
    port: int
    prefix: str = ""

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == 80 else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionChoice:
    """The watched source: the one of ``clouds`` that answers, a file, a command, or nothing."""

    clouds: tuple[Cloud, ...] = ()
    file: Path | None = None
    command: tuple[str, ...] = ()


def read_choice(text: str) -> PreemptionChoice:
    """Raises ValueError, which says what is allowed or what is wrong."""
    kind, separator, rest = text.partition(":")
    if separator and not rest.strip():
        raise ValueError(f"something after {kind}:")
    match kind, bool(separator):
        case "none", False:
            return PreemptionChoice()
        case "auto", False:
            return PreemptionChoice(clouds=("aws", "gcp", "azure"))
        case ("aws" | "gcp" | "azure") as cloud, False:
            return PreemptionChoice(clouds=(cloud,))
        case "file", True:
            return PreemptionChoice(file=_path(rest))
        case "command", True:
            return PreemptionChoice(command=read_command(rest))
        case _:
            raise ValueError(ALLOWED)


def read_url(text: str) -> MetadataUrl:
    """Raises ValueError, which says what is allowed: http, a host, perhaps a port and a path."""
    allowed = "a URL like http://127.0.0.1:8080"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError(allowed) from None
    plain = parts.username is None and not parts.query and not parts.fragment
    printable = text.isascii() and text.isprintable() and " " not in text
    if parts.scheme != "http" or not parts.hostname or port == 0 or not plain or not printable:
        raise ValueError(f"{allowed}: plain http, a host, perhaps a port and a path, nothing else")
    return MetadataUrl(host=parts.hostname, port=port or 80, prefix=parts.path.rstrip("/"))


def _path(text: str) -> Path:
    if "\0" in text:
        raise ValueError("a path")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:  # ~somebody who does not exist
        raise ValueError(f"a path: {error}") from None


def read_command(text: str) -> tuple[str, ...]:
    """The words of a command without a shell, whose program is there. Raises ValueError, which says what is wrong."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"a command in a shell's quotes: {error}") from None
    if not words or not words[0] or "\0" in text:
        raise ValueError("a command")
    if shutil.which(words[0]) is None:
        raise ValueError(f"a command that is there: no program {words[0]!r} is found")
    return words
