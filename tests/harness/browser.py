"""A headless Chromium of the machine's own, for the tests marked ``browser``."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

BROWSERS, DRIVERS = ("chromium", "chromium-browser", "google-chrome"), ("chromedriver", "chromium.chromedriver")


def missing() -> str:
    """Return what is missing for tests with a browser; "" where there is all."""
    for names in (BROWSERS, DRIVERS):
        if not any(map(shutil.which, names)):
            return f"no {names[0]} here (on Debian: apt install chromium chromium-driver)"
    return ""


@contextlib.contextmanager
def browser(*, width: int = 1600, height: int = 1000, dark: bool = False) -> Iterator[Any]:
    """A browser that reaches this machine alone; ended, with all its processes and files, at the end."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as scratch:
        options = Options()
        options.binary_location = str(next(filter(None, map(shutil.which, BROWSERS))))
        for argument in (
            "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost", "--lang=en",
            f"--user-data-dir={scratch}/profile", f"--window-size={width},{height}",
        ):  # fmt: skip
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        home = Path(scratch) / "home"
        home.mkdir()
        environment = os.environ | {"HOME": str(home), "TMPDIR": scratch, "XDG_CONFIG_HOME": str(home)}
        service = Service(str(next(filter(None, map(shutil.which, DRIVERS)))), env=environment)
        driver = webdriver.Chrome(options=options, service=service)
        try:
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
            yield driver
        finally:
            processes = psutil.Process(service.process.pid).children(recursive=True)
            driver.quit()
            for late in psutil.wait_procs(processes, timeout=10)[1]:
                late.kill()
