"""A real browser for tests: headless Chromium, with no network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--window-size=1280,900", "--force-prefers-reduced-motion",
)  # fmt: skip


def skip_if_missing() -> None:
    """Skip the module or fixture that calls this, if there is no browser; in CI that fails."""
    if not os.environ.get("CI"):
        pytest.importorskip("selenium")
        if not (CHROMIUM and DRIVER):
            pytest.skip("chromium and chromedriver are not installed", allow_module_level=True)


@contextmanager
def opened(profile: Path) -> Iterator[Any]:
    """A browser that keeps its files in ``profile``."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    assert CHROMIUM, "CI must have chromium"
    assert DRIVER, "CI must have chromedriver"
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    try:
        yield driver
    finally:
        driver.quit()
