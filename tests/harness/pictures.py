"""Makes the manual's pictures from a real run with churn: ``python -m tests.harness.pictures``, or ``make pictures``.

A small swarm is founded on this machine, a peer of it is killed, another joins and a third leaves in order; then its
dashboard is photographed, and ``swarm top`` beside it.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

from swarm.clock import SystemClock
from tests.harness.browser import browser, missing
from tests.harness.by_hand import ByHand, Started, by_hand
from tests.harness.sources import ROOT

PICTURES = ROOT / "docs" / "img"
LOCAL = ("--listen", "/ip4/127.0.0.1/tcp/0")
STEPS = 200
MANIFEST = f"""
[run]
name = "stories"
steps = {STEPS}
start_when = {{ stage_hosts = 5, trainers = 2 }}
copies = 1
[model]
vocab_size = 1024
dim = 96
layers = 3
heads = 4
context = 64
[split]
stages = 3
[batch]
microbatch_size = 4
microbatches_per_step = 18
"""


def churned(hand: ByHand) -> tuple[str, Started]:
    """A run in which one was lost, one has joined and one has left; returns its dashboard, and a trainer."""
    manifest = hand.home.parent / "run.toml"
    manifest.write_text(MANIFEST)
    founder = hand.start("new", str(manifest), *LOCAL, "--dashboard", "0")
    invite = str(founder.wait_event("Invited")["invite"])
    hosts = [hand.start("join", invite, "--role", "stage", *LOCAL) for _ in range(6)]
    trainers = [hand.start("join", invite, "--role", "trainer", *LOCAL) for _ in range(2)]
    trainer = trainers[0]
    trainer.wait_step(12)
    hosts[1].process.send_signal(signal.SIGKILL)
    trainer.wait_step(30)
    late = hand.start("join", invite, "--role", "stage", *LOCAL)
    late.wait_event("PeerReady")
    trainer.wait_step(48)
    hosts[2].process.send_signal(signal.SIGTERM)
    trainer.wait_step(70)
    return str(founder.wait_event("DashboardServed")["address"]), trainer


def photograph(url: str, path: Path, *, width: int, height: int | None = None) -> None:
    """The page, all of it unless ``height`` says how much, once it has watched the run for some seconds."""
    with browser(width=width, height=900) as driver:
        driver.get(url)
        time.sleep(6)  # noqa: TID251 - shares of time are known after a few looks
        whole = driver.execute_script("return document.documentElement.scrollHeight")
        size = {"width": width, "height": height or whole, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        time.sleep(1)  # noqa: TID251 - the charts are drawn anew
        driver.save_screenshot(str(path))


async def photograph_terminal(home: Path) -> str:
    """``swarm top`` of a peer of this home, in a large terminal."""
    from peers.cli.top import feed_of
    from peers.top.app import TopApp

    clock = SystemClock()
    async with (
        feed_of(None, None, str(home), clock) as feed,
        (app := TopApp(feed, clock)).run_test(size=(150, 42)) as pilot,
    ):
        await clock.sleep(8.0)  # shares of time are known after a few looks
        await pilot.pause()
        # Without the font that it would fetch from elsewhere.
        return re.sub(r"@font-face \{.*?\}\s*", "", app.export_screenshot(title="swarm top"), flags=re.DOTALL)


def main() -> int:
    """Make them."""
    if why := missing():
        print(f"pictures: error: {why}", file=sys.stderr)
        return 1
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pictures-") as scratch, by_hand(Path(scratch)) as hand:
        url, _ = churned(hand)
        photograph(url, PICTURES / "dashboard.png", width=1200, height=1500)
        (PICTURES / "top.svg").write_text(asyncio.run(photograph_terminal(hand.home)))
    for path in (PICTURES / "dashboard.png", PICTURES / "top.svg"):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
