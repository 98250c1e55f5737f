# SPDX-License-Identifier: Apache-2.0
"""The page of a node with 40 Services of long names fits into a window and a telephone's screen."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.kit.cluster import VIP
from tests.page.browser import Page, chromium, screen, served
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
SCREENS = [(1280, "light"), (390, "dark")]
# What is cut with an ellipsis, or scrolls in its own box, is as wide as that.
WIDER = """
const width = document.documentElement.clientWidth;
const clips = (it) =>
  it && (getComputedStyle(it).overflowX !== "visible" || clips(it.parentElement));
return [...document.querySelectorAll("body *")].filter((it) => it.checkVisibility()
    && it.getBoundingClientRect().right > width + 0.5 && !clips(it.parentElement)
    && !it.closest(".skip, .unseen, thead")).map((it) => it.outerHTML.slice(0, 100));
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with busy_node(tmp_path_factory.mktemp("layout")) as cluster, ExitStack() as stack:
        url = stack.enter_context(served(cluster))
        yield Page(stack.enter_context(chromium(cluster)), url)


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
@pytest.mark.parametrize("where", PAGES)
def test_nothing_is_wider_than_the_page(page: Page, where: str, width: int, scheme: str) -> None:
    """The colours are those of the scheme, too."""
    with screen(page, width, 800, scheme):
        page.open(where)
        settled(page, where)
        assert page.script("return innerWidth") == width
        assert page.script("return document.documentElement.scrollWidth") <= width
        assert page.script(WIDER) == []
        ground = page.script("return getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(246, 247, 249)") == (scheme == "light")
