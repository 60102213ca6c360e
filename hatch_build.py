"""Put into a wheel which commit it is made from: ``peers/commit.txt``, which ``swarm --version`` says.

The commit is that of the checkout, with ``-changed`` where tracked files differ from it, or ``SOURCE_COMMIT`` for a
build that sees no history, as that of an image. An editable install has no such file: its command asks the checkout.
"""

from __future__ import annotations

import os
import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface):  # type: ignore[type-arg]
    """Of the targets wheel and sdist."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the file, unless the sources already have it, as those of an sdist do."""
        product = runpy.run_path(str(Path(self.root) / "peers" / "version.py"))
        commit = os.environ.get("SOURCE_COMMIT") or product["commit_of_checkout"](Path(self.root))
        if version == "editable" or not commit or (Path(self.root) / "peers" / product["COMMIT_FILE"]).exists():
            return
        made = Path(tempfile.mkdtemp(prefix="swarm-build-")) / product["COMMIT_FILE"]
        made.write_text(f"{commit}\n", encoding="utf-8")
        self._made = made
        build_data["force_include"][str(made)] = f"peers/{product['COMMIT_FILE']}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was made for it."""
        if (made := getattr(self, "_made", None)) is not None:
            made.unlink()
            made.parent.rmdir()
