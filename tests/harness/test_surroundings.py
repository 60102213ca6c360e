"""What conftest promises every test."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import uvloop
from hypothesis import given
from hypothesis import strategies as st

pytest_plugins = ("pytester",)
