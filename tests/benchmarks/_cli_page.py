"""What a dashboard costs: the time to its first paint, and the peer that serves it to a hundred viewers."""

from __future__ import annotations

import asyncio
import json
import tempfile
import urllib.request
from pathlib import Path
from statistics import median

import psutil

from tests.harness.browser import browser, missing
from tests.harness.by_hand import RUN, Started, by_hand
from tests.harness.expect import wait_until

VIEWERS = 100
LOCAL = ("--listen", "/ip4/127.0.0.1/tcp/0")
PAINTED = """
const done = arguments[0];
const look = () => {
  const shown = document.querySelectorAll('.card').length, paint = performance.getEntriesByName('first-contentful-paint')[0];
  if (shown && paint) done([paint.startTime, performance.now()]); else setTimeout(look, 10);
};
look();
"""  # noqa: E501 - as it is read by a browser


def page_figures(*, seconds: float, loads: int, viewers: int = VIEWERS) -> dict[str, float | None]:
    """Found a small swarm whose founder serves a dashboard, and measure it.

    Returns:
        ``viewers_core_share``: core-seconds a second of the serving peer with that many viewers, less those without;
        ``viewers_step_ratio``: steps a second with them over those without; ``page_bytes_s`` is what one viewer gets.
        ``first_paint_ms`` and ``first_run_ms`` (the page, and the run on it), None on a machine without a browser.
    """
    with tempfile.TemporaryDirectory(prefix="page-") as scratch, by_hand(Path(scratch)) as hand:
        manifest = Path(scratch) / "run.toml"
        manifest.write_text(RUN.format(steps=1_000_000))
        founder = hand.start("new", str(manifest), *LOCAL, "--dashboard", "0")
        invite = str(founder.wait_event("Invited")["invite"])
        url = str(founder.wait_event("DashboardServed")["address"])
        for role in ("stage", "stage", "trainer"):
            hand.start("join", invite, "--role", role, *LOCAL)
        founder.wait_step(5)
        pid = int(founder.wait_event("PeerStarted")["pid"])
        found: dict[str, float | None] = {**asyncio.run(_viewed(url, founder, pid, seconds, viewers))}
        return found | ({"first_paint_ms": None, "first_run_ms": None} if missing() else _painted(url, loads))


async def _viewed(url: str, founder: Started, pid: int, seconds: float, viewers: int) -> dict[str, float]:
    """Measure without viewers, with them, and without again: a machine gets slower and faster by itself."""
    alone_before = await _spent(url, founder, pid, seconds)
    streams = [await _stream(url) for _ in range(viewers)]
    reading = [asyncio.create_task(_read(reader)) for reader, _ in streams]
    watched = await _spent(url, founder, pid, seconds)
    received = [0] * viewers
    for number, (task, (_, writer)) in enumerate(zip(reading, streams, strict=True)):
        writer.close()
        received[number] = await task
    if not all(received):
        raise AssertionError("a viewer got nothing")
    alone_after = await _spent(url, founder, pid, seconds)
    alone = [(one + other) / 2 for one, other in zip(alone_before, alone_after, strict=True)]
    return {
        "viewers_core_share": round(watched[0] - alone[0], 4),
        "serving_core_share": round(watched[0], 4),
        "viewers_step_ratio": round(watched[1] / alone[1], 3),
        "page_bytes_s": round(median(received) / seconds),
    }


async def _spent(url: str, founder: Started, pid: int, seconds: float) -> tuple[float, float]:
    """Core-seconds a second of the peer, and steps a second."""
    process = psutil.Process(pid)
    cpu, step = sum(process.cpu_times()[:2]), _step(founder)
    await asyncio.sleep(seconds)
    return (sum(process.cpu_times()[:2]) - cpu) / seconds, max(1, _step(founder) - step) / seconds


def _step(founder: Started) -> int:
    return int(founder.events("StepClosed")[-1]["step"])


async def _stream(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    place = url.removeprefix("http://").rstrip("/")
    reader, writer = await asyncio.open_connection("127.0.0.1", int(place.rpartition(":")[2]))
    writer.write(f"GET /api/v1/events HTTP/1.1\r\nHost: {place}\r\n\r\n".encode())
    return reader, writer


async def _read(reader: asyncio.StreamReader) -> int:
    size = 0
    try:
        while piece := await reader.read(1 << 16):
            size += len(piece)
    except OSError:
        return size
    return size


def _painted(url: str, loads: int) -> dict[str, float]:
    """Milliseconds from the request of a fresh page to its first paint, and until the run is on it."""

    def known() -> bool:
        with urllib.request.urlopen(f"{url}api/v1/state") as answer:
            return bool(json.load(answer)["step"])

    wait_until(known, deadline_s=20, what="a step on the dashboard")
    paints, runs = [], []
    with browser() as driver:
        for number in range(loads + 1):
            driver.get("about:blank")
            driver.execute_cdp_cmd("Network.clearBrowserCache", {})
            driver.get(url)
            paint, run = driver.execute_async_script(PAINTED)
            if number:  # the first only starts what the browser starts once
                paints.append(paint)
                runs.append(run)
    return {"first_paint_ms": round(median(paints), 1), "first_run_ms": round(median(runs), 1)}
