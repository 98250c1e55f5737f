# SPDX-License-Identifier: Apache-2.0
"""`ebpflb ui` on a node of the lab, and a headless Chromium beside it.

Both are in the node's network namespace, so the browser reaches nothing else.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import mkdtemp
from typing import Any

from pyroute2 import netns

from tests.kit.cluster import Cluster

SECONDS = 120.0  # a machine may be very busy
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-default-apps", "--disable-dev-shm-usage", "--no-proxy-server"),
)


@contextmanager
def served(cluster: Cluster, *options: str) -> Iterator[str]:
    """Yield the address of the page that shows the cluster's node."""
    command = [sys.executable, "-P", "-m", "ebpflb", "ui", "--listen", "127.0.0.1:0"]
    process = cluster.node.start(
        [*command, *cluster.agent.where, *options], stdout=subprocess.PIPE, stderr=sys.stderr
    )
    try:
        assert process.stdout
        yield process.stdout.readline().split()[0].rstrip("/")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            process.kill()
            process.communicate()


@contextmanager
def chromium(cluster: Cluster) -> Iterator[Any]:
    """Yield a selenium driver; driver, browser and profile are removed afterwards."""
    from selenium import webdriver

    profile = mkdtemp(prefix="ebpflb-test-chromium-")
    wanted = webdriver.ChromeOptions()
    wanted.binary_location = "/usr/bin/chromium"
    for each in (*OPTIONS, f"--user-data-dir={profile}"):
        wanted.add_argument(each)
    wanted.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    netns.pushns(cluster.node.netns)
    started = None
    try:
        service = webdriver.ChromeService("/usr/bin/chromedriver", popen_kw={"process_group": 0})
        started = webdriver.Chrome(wanted, service)
        started.set_page_load_timeout(SECONDS)
        yield started
    finally:
        try:
            if started:
                started.quit()
        finally:
            _end(service.process)
            netns.popns()
            shutil.rmtree(profile, ignore_errors=True)


def _end(driver: "subprocess.Popen[bytes] | None") -> None:
    """End the driver and its browser, which have their own process group."""
    if driver:
        try:
            os.killpg(driver.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        driver.wait()


@contextmanager
def screen(page: "Page", width: int, height: int, scheme: str) -> Iterator[None]:
    """Set a window of this size, or a telephone's screen, in a colour scheme."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    yield
    page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


class Page:
    """The page as a user operates and sees it."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver, self.url = driver, url

    def open(self, where: str) -> None:
        """Open the page afresh, with an empty storage of the tab."""
        self.driver.get("about:blank")
        self.driver.get(f"{self.url}/#{where}")

    def text(self, selector: str = "main") -> str:
        found = self.script(
            "return document.querySelector(arguments[0])?.innerText ?? ''", selector
        )
        return str(found)

    def script(self, text: str, *words: Any) -> Any:
        return self.driver.execute_script(text, *words)

    def cells(self, caption: str) -> list[dict[str, str]]:
        """Return the rows of a table, by the labels of its columns."""
        found: list[dict[str, str]] = self.script(
            """const table = [...document.querySelectorAll("table")].find(
                 (it) => it.caption?.textContent === arguments[0]);
               return [...(table?.tBodies[0].rows ?? [])].map((row) => Object.fromEntries(
                 [...row.cells].map((it) => [it.dataset.label, it.textContent])));""",
            caption,
        )
        return found

    def requests(self) -> list[str]:
        """Return all addresses that the page has requested since the last call."""
        entries = [
            json.loads(it["message"])["message"] for it in self.driver.get_log("performance")
        ]
        return [
            it["params"]["request"]["url"]
            for it in entries
            if it["method"] == "Network.requestWillBeSent"
        ]

    def wait(self, what: str, true: Callable[[], Any]) -> Any:
        """Wait until the condition is true; a failure shows the content of the page."""
        until = time.monotonic() + SECONDS
        while not (found := true()):
            if time.monotonic() > until:
                raise AssertionError(
                    f"not after {SECONDS:g} s: {what}; shown:\n{self.text('body')}"
                )
            time.sleep(0.1)
        return found
