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
SCREENS = [(1440, "light"), (1280, "dark"), (1024, "light"), (390, "light"), (390, "dark")]
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
# Names of up to 32 letters, times and addresses are never cut; longer names and free text may be.
CUT = """
return [...document.querySelectorAll(".own, td.time, td.day, td.number, td.frontend")].filter(
  (it) => it.checkVisibility() && it.textContent.length <= 32
    && it.scrollWidth > it.clientWidth + 1).map((it) => it.textContent);
"""
# The highest empty strip between two lines, fields or drawings of the page.
GAP = """
const parts = [...document.querySelectorAll("main *")].filter((it) => it.checkVisibility()
  && (it.matches("svg, input, select, button") || [...it.childNodes].some(
    (node) => node.nodeType === 3 && node.data.trim()))).map((it) => it.getBoundingClientRect());
let end = document.querySelector("main").getBoundingClientRect().top, gap = 0;
for (const { top, bottom } of parts.sort((a, b) => a.top - b.top)) {
  gap = Math.max(gap, top - end);
  end = Math.max(end, bottom);
}
return gap;
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


def test_the_node_has_40_services_of_long_names(page: Page) -> None:
    """All but two have names of 30 to 60 letters, without the namespace."""
    page.open("/services")
    rows = page.wait("services", lambda: page.cells("Services of this node"))
    lengths = [len(row["Service"].partition("/")[2]) for row in rows]
    assert len(lengths) == 40
    assert sum(30 <= each <= 60 for each in lengths) == 38


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
@pytest.mark.parametrize("where", PAGES)
def test_everything_fits_and_can_be_read(page: Page, where: str, width: int, scheme: str) -> None:
    """Contrast by WCAG 2.2, 1.4.3 and 1.4.11 (AA): 4.5 for texts, 3 for drawings."""
    with screen(page, width, 800, scheme):
        page.open(where)
        settled(page, where)
        assert page.script("return innerWidth") == width
        assert page.script("return document.documentElement.scrollWidth") <= width
        assert page.script(WIDER) == []
        assert page.script(HIGHER) == []
        assert page.script(CUT) == []
        assert page.script(GAP) < 60
        assert page.script(NAVIGATION) == 1
        text, drawing = page.script(CONTRAST)
        assert text >= 4.5 and drawing >= 3
        ground = page.script("return getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(246, 247, 249)") == (scheme == "light")


@pytest.mark.parametrize("where", ["/events", "/history"])
def test_a_row_of_events_and_history_is_one_line(page: Page, where: str) -> None:
    with screen(page, 1280, 800, "light"):
        page.open(where)
        settled(page, where)
        lines = """return Math.max(...[...document.querySelectorAll(".lines tbody td")].map((it) =>
            it.firstChild ? it.getBoundingClientRect().height
              / parseFloat(getComputedStyle(it).lineHeight) : 0))"""
        assert page.script(lines) < 1.8


def test_events_are_coloured_and_filtered_by_verdict(page: Page) -> None:
    """Chosen from a list; what is refused stands out."""
    colour = "return getComputedStyle(document.querySelector(arguments[0])).color"
    with screen(page, 1280, 800, "light"):
        page.open("/events")
        settled(page, "/events")
        page.wait("both", lambda: {"translated", "refused"} <= verdicts(page))
        down, up = (page.script(colour, f".events .{it}") for it in ("bad", "good"))
        assert (down, up) == ("rgb(179, 19, 27)", "rgb(15, 107, 51)")
        page.script("document.querySelector('#watch').click()")
        page.script("document.querySelector('[name=verdict]').value = 'refused'")
        page.script("document.querySelector('#watch').click()")
        page.wait("events", lambda: len(page.cells("Events, the newest first")) > 2)
        assert verdicts(page) == {"refused"}
        assert "verdict=refused" in page.driver.current_url


def verdicts(page: Page) -> set[str]:
    return {row["Verdict"] for row in page.cells("Events, the newest first")}


def test_the_table_stands_beside_the_way(page: Page) -> None:
    where = f"/explain?service=default/web&to={VIP}:80/tcp&from=web-1"
    with screen(page, 1280, 800, "light"):
        page.open(where)
        settled(page, where)
        edges = """const way = document.querySelector(".way").getBoundingClientRect();
            const table = document.querySelector(".beside").getBoundingClientRect();
            return [table.left > way.right, Math.abs(table.top - way.top) < 20]"""
        assert page.script(edges) == [True, True]
        assert page.script("return document.querySelectorAll('.way').length") == 1


@pytest.mark.parametrize("width", [1280, 390])
def test_a_row_that_is_chosen_shows_all_of_its_text(page: Page, width: int) -> None:
    """By a click, or by the focus of its link."""
    cut = """return [...document.querySelectorAll(".changes tr")].filter((row) =>
        [...row.cells].some((it) => it.scrollWidth > it.clientWidth)).indexOf(arguments[0])"""
    row = """return [...document.querySelectorAll(".changes tr")].find(
        (it) => it.innerText.includes("ledger"))"""
    with screen(page, width, 800, "light"):
        page.open("/history")
        settled(page, "/history")
        long = page.script(row)
        assert page.script(cut, long) >= 0
        page.script("arguments[0].lastChild.click()", long)
        assert page.script(cut, long) == -1
        page.script("arguments[0].lastChild.click()", long)
        assert page.script(cut, long) >= 0
        page.script("arguments[0].querySelector('a').focus()", long)
        assert page.script(cut, long) == -1


def test_the_history_has_each_day_once(page: Page) -> None:
    """At its first row; the rows below it are of the same day."""
    with screen(page, 1440, 800, "light"):
        page.open("/history")
        settled(page, "/history")
        first, *others = [row["Day"] for row in page.cells("Changes, the newest first")]
        assert first and len(others) > 30 and sum(map(bool, others)) <= 1  # midnight


def test_captions_are_whole_words_on_a_narrow_screen(page: Page) -> None:
    """A field's name and value are in one line, and a value has no narrow column of its own."""
    with screen(page, 390, 800, "light"):
        page.open("/service/default/web")
        settled(page, "/service/default/web")
        lines = """return [...document.querySelectorAll("td")].filter((it) => it.checkVisibility()
            && it.cellIndex > 0).map((it) => it.getBoundingClientRect().height
            / parseFloat(getComputedStyle(it).lineHeight)).filter((it) => it > 1.5)"""
        assert page.script(lines) == []
