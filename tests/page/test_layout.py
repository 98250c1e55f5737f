# SPDX-License-Identifier: Apache-2.0
"""The page of a node with 40 Services of long names, by the pixels that matter.

In a wide window and on a telephone's screen, in both colour schemes: nothing is wider than the
page, no row is higher than three lines, the navigation is one row, and every text can be read.
"""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.kit.cluster import VIP
from tests.page.browser import CONTRAST, Page, chromium, screen, served
from tests.page.busy_node import busy_node, settled

LONG = "kube-prometheus-stack/kube-prometheus-stack-prometheus-node-exporter-canary"
PAGES = [
    "/",
    "/services",
    "/service/default/web",
    f"/service/{LONG}",
    f"/explain?service=default/web&to={VIP}:80/tcp&from=web-1",
    "/events",
    "/history",
    "/nothing",
]
SCREENS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]
# What is cut with an ellipsis, or scrolls in its own box, is as wide as that.
WIDER = """
const width = document.documentElement.clientWidth;
const clips = (it) =>
  it && (getComputedStyle(it).overflowX !== "visible" || clips(it.parentElement));
return [...document.querySelectorAll("body *")].filter((it) => it.checkVisibility()
    && it.getBoundingClientRect().right > width + 0.5 && !clips(it.parentElement)
    && !it.closest(".skip, .unseen, thead")).map((it) => it.outerHTML.slice(0, 100));
"""
HIGHER = """
const lines = (it) => (it.getBoundingClientRect().height - 14)
  / parseFloat(getComputedStyle(it.cells[0]).lineHeight);
return [...document.querySelectorAll("tbody tr")].filter(
  (it) => it.checkVisibility() && lines(it) > 3).map((it) => it.innerText);
"""
NAVIGATION = """
const tops = [...document.querySelectorAll("nav a")].map((it) => it.getBoundingClientRect().top);
return new Set(tops).size;
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with busy_node(tmp_path_factory.mktemp("layout")) as cluster, ExitStack() as stack:
        url = stack.enter_context(served(cluster))
        yield Page(stack.enter_context(chromium(cluster)), url)


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
@pytest.mark.parametrize("where", PAGES)
def test_everything_fits_and_can_be_read(page: Page, where: str, width: int, scheme: str) -> None:
    """Contrast by WCAG 2.2, 1.4.3 (AA): 4.5."""
    with screen(page, width, 800, scheme):
        page.open(where)
        settled(page, where)
        assert page.script("return innerWidth") == width
        assert page.script("return document.documentElement.scrollWidth") <= width
        assert page.script(WIDER) == []
        assert page.script(HIGHER) == []
        assert page.script(NAVIGATION) == 1
        assert page.script(CONTRAST) >= 4.5
        ground = page.script("return getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(246, 247, 249)") == (scheme == "light")


def test_captions_are_whole_words_on_a_narrow_screen(page: Page) -> None:
    """A field's name and value are in one line, and a value has no narrow column of its own."""
    with screen(page, 390, 800, "light"):
        page.open("/service/default/web")
        settled(page, "/service/default/web")
        lines = """return [...document.querySelectorAll("td")].filter((it) => it.checkVisibility()
            && it.cellIndex > 0).map((it) => it.getBoundingClientRect().height
            / parseFloat(getComputedStyle(it).lineHeight)).filter((it) => it > 1.5)"""
        assert page.script(lines) == []
