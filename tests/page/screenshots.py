# SPDX-License-Identifier: Apache-2.0
"""`make screenshots`: the pictures of the page in docs/ui.md, from a real agent with real traffic.

python -m tests.page.screenshots FOLDER
"""

import io
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from tests.kit.cluster import VIP
from tests.page.browser import Page, chromium, screen, served
from tests.page.busy_node import busy_node, settled

PAGES = {
    "overview": "/",
    "services": "/services?sort=new",
    "service": "/service/default/web",
    "explain": f"/explain?service=default/web&to={VIP}:80/tcp&from=web-1",
    "events": "/events",
    "history": "/history",
}
SCREENS = ((1280, "light"), (1280, "dark"), (390, "light"), (390, "dark"))
HEIGHTS = {1280: 800, 390: 780}
POINTS = 40  # of the lines of the overview: more than a minute
COLOURS = 255  # of a picture: a red word stays red, and it takes a third of the space


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as name, busy_node(Path(name)) as cluster, ExitStack() as stack:
        url = stack.enter_context(served(cluster))
        page = Page(stack.enter_context(chromium(cluster)), url)
        wait_for_lines(page)
        for width, scheme in SCREENS:
            for name, where in PAGES.items():
                with screen(page, width, HEIGHTS[width], scheme):
                    page.open(where)
                    settled(page, where)
                    save(page, folder / f"ui-{name}-{width}-{scheme}.png")


def wait_for_lines(page: Page) -> None:
    """Wait until the lines of the overview have POINTS points."""
    page.open("/")
    points = "return document.querySelector('.spark .line')?.getAttribute('d').split('L').length"
    page.wait("lines of minutes", lambda: (page.script(points) or 0) >= POINTS)


def save(page: Page, path: Path) -> None:
    """Save a PNG with few colours."""
    picture = Image.open(io.BytesIO(page.driver.get_screenshot_as_png())).convert("RGB")
    picture.quantize(COLOURS, kmeans=1, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path, path.stat().st_size)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
