# SPDX-License-Identifier: Apache-2.0
"""`make screenshots`: what docs/ui.md shows of the page, beside a real agent with real traffic.

python -m tests.page.screenshots FOLDER
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ebpflb.lab import manifests
from tests.kit.cluster import NODEPORT, VIP, Cluster, endpoint, running, web
from tests.page.browser import Page, chromium, served

WIDTH, POINTS = 1200, 25  # of the screen, and of the line of a minute
CDP = "Emulation.setDeviceMetricsOverride", "Emulation.setEmulatedMedia"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as name, running(Path(name)) as cluster, ExitStack() as stack:
        first, second, third = cluster.web
        publish(cluster, endpoint(first), endpoint(second))
        publish(cluster, endpoint(first), endpoint(second), endpoint(third))
        url = stack.enter_context(served(cluster))
        page = Page(stack.enter_context(chromium(cluster)), url)
        client = cluster.start_client(cluster.client, "tcp", VIP, pause=0.02)
        shoot(page, folder)
        cluster.stop_client(client)


def publish(cluster: Cluster, *endpoints: manifests.Manifest) -> None:
    away = manifests.endpoint("10.244.9.9", node="away", target="far", ready=False)
    ports = [{"port": 80}]
    cluster.publish(
        web(*endpoints, away, nodeport=NODEPORT),
        manifests.service("shop", ["10.96.1.2"], ports, namespace="shop"),
        manifests.endpoint_slice("shop", "IPv4", [away], ports, namespace="shop"),
    )


def shoot(page: Page, folder: Path) -> None:
    with screen(page, 560, "light"):
        page.open("/services")
        points = "return document.querySelector('svg .line')?.getAttribute('d').split('L').length"
        page.wait("a minute's line", lambda: (page.script(points) or 0) >= POINTS)
        save(page, folder / "ui-services.png")
    with screen(page, 900, "light"):
        page.open("/service/default/web")
        page.wait("rates", lambda: "new connections a second" in page.text())
        page.wait("endpoints", lambda: page.cells("Endpoints"))
        save(page, folder / "ui-service.png")
    with screen(page, 1100, "dark"):
        page.open(f"/explain?to={VIP}:80&from=10.244.1.2")
        page.wait("the answer", lambda: page.text("#explained"))
        save(page, folder / "ui-explain.png")
    with screen(page, 700, "dark"):
        page.open("/events")
        page.script("document.querySelector('#watch').click()")
        page.wait("events", lambda: len(page.cells("Events, the newest first, in UTC")) > 9)
        save(page, folder / "ui-events.png")
    with screen(page, 700, "light"):
        page.open("/history?service=default/web")
        page.wait("changes", lambda: page.cells("Changes, the newest first"))
        save(page, folder / "ui-history.png")


@contextmanager
def screen(page: Page, height: int, scheme: str) -> Iterator[None]:
    size = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
    page.driver.execute_cdp_cmd(CDP[0], size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.driver.execute_cdp_cmd(CDP[1], media)
    yield


def save(page: Page, path: Path) -> None:
    assert page.driver.save_screenshot(str(path))
    print(path, path.stat().st_size)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
