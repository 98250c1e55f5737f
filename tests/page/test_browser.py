# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser, beside a real agent with real connections.

What is shown is what the maps hold; it can be used without a mouse, in both colour schemes and on a
narrow screen; and it asks for nothing anywhere else.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.serve import status
from ebpflb.tools.dump import dump_maps
from tests.kit import requests
from tests.kit.cluster import NODEPORT, VIP, Cluster, endpoint, running, web
from tests.page.browser import CONTRAST, Page, chromium, command, served

HOSTILE = "a\x1b[2J\u202e<b>&"
PAGES = [
    "/",
    "/services",
    "/service/default/web",
    "/explain?to=10.96.0.10:80",
    "/events",
    "/history",
]


def everything(cluster: Cluster, *, fewer: bool = False) -> list[Any]:
    """Three of four endpoints are used, or two; a pod has a hostile name, and a Service many."""
    pods = cluster.web[:-1] if fewer else cluster.web
    many = [
        manifests.endpoint(f"10.251.{i // 250}.{i % 250 + 1}", node="node", target=f"pod-{i}")
        for i in range(250)
    ]
    hostile = manifests.endpoint("10.250.0.1", node="node", target=HOSTILE)
    away = manifests.endpoint("10.244.9.9", node="away", target="far", ready=False)
    ports = [{"port": 80}]
    return [
        *web(*map(endpoint, pods), away, nodeport=NODEPORT, ipFamilies=["IPv4"]),
        manifests.service("many", ["10.96.1.1"], ports, namespace="shop"),
        manifests.endpoint_slice("many", "IPv4", many, ports, namespace="shop"),
        manifests.service("hostile", ["10.96.1.2"], ports, namespace="shop"),
        manifests.endpoint_slice("hostile", "IPv4", [hostile], ports, namespace="shop"),
    ]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("ui")) as made:
        made.publish(everything(made))
        requests.backends(made.sockets(made.client), VIP, 20)
        yield made


@pytest.fixture(scope="module")
def page(cluster: Cluster) -> Iterator[Page]:
    with ExitStack() as stack:
        url = stack.enter_context(served(cluster))
        yield Page(stack.enter_context(chromium(cluster)), url)


def opened_by_the_maps(cluster: Cluster) -> dict[str, str]:
    """Endpoint -> connections, of default/web by TCP; the rows of `ebpflb maps dump`."""
    rows = dump_maps(cluster.maps, ("slots",)).maps["slots"]
    used = [row for row in rows if "cluster" in row["selected_for"]]
    ours = [row for row in used if row["service"] == "default/web:tcp/TCP"]
    return {row["endpoint"]: str(row["opened"]) for row in ours}


def opened_by_the_page(page: Page) -> dict[str, str]:
    return {
        row["Endpoint"]: row["Opened"]
        for row in page.cells("Endpoints")
        if row["Port"] == "default/web:tcp/TCP"
    }


@pytest.mark.extended
def test_the_verdict_is_that_of_status(page: Page, cluster: Cluster) -> None:
    """With every reason, and the facts that it rests on."""
    page.open("/")
    found = command(cluster, "status", *cluster.agent.where)
    page.wait("the verdict", lambda: page.text("#verdict").startswith(found["verdict"]))
    for reason in found["reasons"]:
        assert reason["text"] in page.text("#reasons")
    assert page.text("#fact-backends") == str(found["backends"])
    assert page.text("#fact-socket_hooks") == ", ".join(found["socket_hooks"])


def test_services_are_those_of_the_maps(page: Page, cluster: Cluster) -> None:
    """Each has a row with its endpoints and connections."""
    page.open("/services")
    rows = page.wait("services", lambda: page.cells("Services of this node"))
    listed = command(cluster, "services", "list", *cluster.agent.where)["services"]
    shown = {row["Service"]: (row["Open"], row["Opened"]) for row in rows}
    assert shown == {it["service"]: (str(it["open"]), str(it["opened"])) for it in listed}
    by_the_maps = opened_by_the_maps(cluster)
    assert shown["default/web"][1] == str(sum(map(int, by_the_maps.values()))) != "0"


def test_a_service_shows_the_numbers_of_the_maps(page: Page, cluster: Cluster) -> None:
    """And the same again, without a click, when connections have been made meanwhile."""
    page.open("/service/default/web")
    before = opened_by_the_maps(cluster)
    page.wait(f"endpoints: {before}", lambda: opened_by_the_page(page) == before)
    requests.backends(cluster.sockets(cluster.client), VIP, 30)
    after = opened_by_the_maps(cluster)
    assert sum(map(int, after.values())) == sum(map(int, before.values())) + 30
    page.wait(f"new connections: {after}", lambda: opened_by_the_page(page) == after)
    (share,) = {row["Share"].strip() for row in page.cells("Endpoints")}
    assert share == "33.3%"
    reasons = {row["Endpoint"]: row["Why"] for row in page.cells("Not used, and why")}
    assert reasons["10.244.9.9:8080"] == "not ready"


def test_rates_are_those_of_the_connections(page: Page, cluster: Cluster) -> None:
    """While a client connects all the time they are not zero, and the line has points."""
    client = cluster.start_client(cluster.client, "tcp", VIP, pause=0.02)
    page.open("/services")

    def rate() -> float:
        rows = {row["Service"]: row["New/s"] for row in page.cells("Services of this node")}
        return float(rows.get("default/web") or 0)

    page.wait("a rate", lambda: rate() > 1)
    page.wait("a line", lambda: page.script("return document.querySelector('svg .line')"))
    assert page.script("return document.querySelectorAll('svg .bar').length") >= 3
    assert cluster.stop_client(client)["errors"] == {}
    page.wait("no rate any more", lambda: rate() == 0)


def test_names_are_shown_and_do_nothing(page: Page) -> None:
    """Control characters are escaped, and markup is text."""
    page.open("/service/shop/hostile")
    rows = page.wait("the endpoint", lambda: page.cells("Endpoints"))
    assert rows[0]["Pod"] == "a\\x1b[2J\\u202e<b>&"


def test_many_endpoints_are_pages(page: Page) -> None:
    """A hundred at a time."""
    page.open("/service/shop/many")
    assert len(page.wait("endpoints", lambda: page.cells("Endpoints"))) == 100
    assert "page 1 of 3" in page.text()
    for number in (2, 3):
        page.script("[...document.querySelectorAll('button')].at(-1).click()")
        page.wait(f"page {number}", lambda it=number: f"page {it} of 3" in page.text())
    page.wait("the last fifty", lambda: len(page.cells("Endpoints")) == 50)


def test_no_such_service_is_said_in_a_sentence(page: Page) -> None:
    page.open("/service/default/wob")
    page.wait("the sentence", lambda: "no Service default/wob" in page.text("#problem"))
    assert "did you mean default/web" in page.text("#problem")


def test_explain_shows_the_way_that_the_command_tells(page: Page, cluster: Cluster) -> None:
    """Steps, rows of maps and chances in tables; every step is a box of the diagram too."""
    page.open("/explain")
    page.script("document.querySelector('[name=to]').focus()")
    page.keys(f"{VIP}:80\n")
    page.wait("the verdict", lambda: page.text("#explained"))
    found = command(cluster, "explain", f"{VIP}:80", *cluster.agent.where)
    assert page.text("#explained") == f"{found['verdict']}: {found['says']}"
    steps = page.cells("Steps, and the row of the map that each comes from")
    drawn = page.script("return document.querySelector('#answer svg').textContent")
    kept = ("hook", "frontend", "policy")  # another endpoint is drawn each time
    shown = [(it["Step"], it["What"], it["Row"]) for it in steps if it["Step"] in kept]
    said = [(it["step"], it["says"], it["row"]) for it in found["steps"] if it["step"] in kept]
    assert shown == said
    endpoints = page.cells("Endpoints, and the chance of a new connection")
    assert [(it["Endpoint"], it["Chance"].strip()) for it in endpoints] == [
        (it["endpoint"], f"{100 * it['chance']:.1f}".removesuffix(".0") + "%")
        for it in found["endpoints"]
    ]
    assert all(label in drawn for label in ("client", "verdict", *(it["Step"] for it in steps)))
    assert f"to={VIP}%3A80" in page.driver.current_url


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("to=nobody", "is not ADDRESS:PORT"),
        (f"to={VIP}:80&from=no-such-pod", "no pod no-such-pod"),
        (f"to={VIP}:80&from=999999999", "there is no process 999999999"),
        ("to=198.51.100.1:80", "left alone"),
    ],
)
def test_what_cannot_be_explained_is_said(page: Page, query: str, text: str) -> None:
    """In the command's sentence."""
    page.open(f"/explain?{query}")
    page.wait(text, lambda: text in page.text("body"))


def test_events_are_shown_as_they_happen(page: Page, cluster: Cluster) -> None:
    """With client, frontend and backend; when the page is left the usual programs are back."""
    page.open("/events?service=default/web")
    page.script("document.querySelector('#watch').click()")
    page.wait("it watches", lambda: page.text("#watching").startswith("watching"))
    answers = [requests.tcp(cluster.sockets(cluster.client), VIP).name for _ in range(3)]
    caption = "Events, the newest first, in UTC"

    def backends() -> list[str]:
        rows = [row for row in page.cells(caption) if row["Hook"] == "connect"]
        return [row["Backend"].split()[-1] for row in reversed(rows)]

    page.wait(f"events of {answers}", lambda: backends() == answers)
    rows = page.cells(caption)
    assert {row["Frontend"] for row in rows if row["Hook"] == "connect"} == {f"{VIP}:80 TCP"}
    wait_until("the agent says so", lambda: monitors(cluster), 120)
    page.open("/")
    wait_until("nobody watches", lambda: not monitors(cluster), 120)


def monitors(cluster: Cluster) -> bool:
    """Whether the agent says that a monitor runs."""
    found = status.read(cluster.agent.paths)
    return found is None or found.monitor is not None


def test_history_goes_back_to_what_the_maps_held(page: Page, cluster: Cluster) -> None:
    """By the slider, without a mouse: the endpoint that is gone is there again."""
    from selenium.webdriver.common.keys import Keys

    slots, last = "slots", cluster.web[-1]
    cluster.publish(everything(cluster, fewer=True))
    try:
        page.open("/history?service=default/web")
        gone = f"-{last.v4}:8080"
        page.wait("the change", lambda: gone in page.text("#chosen"))
        begun = len(page.cells("Changes, the newest first"))
        assert begun >= 2
        page.script("document.querySelector('[name=map]').value = arguments[0]", slots)

        def held() -> list[str]:
            page.script("document.querySelector('#chosen + form button').click()")
            page.wait("the map", lambda: page.cells(f"{slots}, as it was"))
            rows = page.cells(f"{slots}, as it was")
            return [it["endpoint"] for it in rows if it["selected for"] != "none, draining"]

        assert f"{last.v4}:8080" not in held()
        page.script("document.querySelector('[type=range]').focus()")
        page.keys(Keys.ARROW_LEFT)
        page.wait("the change before", lambda: gone not in page.text("#chosen"))
        assert f"{last.v4}:8080" in held()
    finally:
        cluster.publish(everything(cluster))


def test_it_is_used_by_keyboard_alone(page: Page) -> None:
    """From the skip link by the pages to a Service, each with a visible focus."""
    from selenium.webdriver.common.keys import Keys

    page.open("/")
    page.wait("the page", lambda: page.text("#verdict") != "reading")
    page.keys(Keys.TAB)
    assert page.focus() == "Skip to the content"
    walked = []
    for _ in range(2):
        page.keys(Keys.TAB)
        walked.append(page.focus())
        outline = "return getComputedStyle(document.activeElement).outlineStyle"
        assert page.script(outline) == "solid"
    assert walked == ["Node", "Services"]
    page.keys(Keys.ENTER)
    page.wait("the page's heading has the focus", lambda: page.focus() == "Services")
    page.wait("services", lambda: page.cells("Services of this node"))
    for _ in range(20):
        page.keys(Keys.TAB)
        if page.focus() == "default/web":
            break
    page.keys(Keys.ENTER)
    page.wait("the Service", lambda: page.focus() == "Service default/web")
    assert page.driver.title == "Service default/web - ebpflb"


def test_the_focus_stays_while_numbers_change(page: Page, cluster: Cluster) -> None:
    """Also that in a row of a table which is read anew."""
    page.open("/services")
    page.wait("services", lambda: page.cells("Services of this node"))
    page.script("document.querySelector('a[href$=\"default/web\"]').focus()")
    before = page.text("tbody")
    requests.tcp(cluster.sockets(cluster.client), VIP)
    page.wait("another number", lambda: page.text("tbody") != before)
    assert page.focus() == "default/web"


@pytest.mark.parametrize("where", PAGES)
def test_screen_readers_have_names_for_everything(page: Page, where: str) -> None:
    """Landmarks, one heading of the first level, labels, and a text for each graphic."""
    page.open(where)
    page.wait("the page", lambda: len(page.text()) > 100)
    assert page.script("return document.documentElement.lang") == "en"
    for selector, count in {"main": 1, "header": 1, "nav[aria-label]": 1, "h1": 1}.items():
        assert page.script(f"return document.querySelectorAll('{selector}').length") == count
    unnamed = """return [...document.querySelectorAll("input, select, button, a, svg")].filter(
        (it) => it.checkVisibility() && !(it.labels?.length || it.textContent.trim()
                || it.getAttribute("aria-label"))).map((it) => it.outerHTML)"""
    assert page.script(unnamed) == []
    assert page.script("return document.querySelectorAll('[role=status]').length") >= 1
    assert page.script("return document.querySelector('[aria-current=page]') !== null")


@pytest.mark.parametrize("where", PAGES)
def test_it_fits_a_narrow_screen(page: Page, where: str) -> None:
    """360 pixels: nothing has to be scrolled sideways."""
    metrics = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.open(where)
        page.wait("the page", lambda: len(page.text()) > 100)
        assert page.script("return innerWidth") == 360
        width = "return document.documentElement.scrollWidth"
        page.wait("it fits", lambda: page.script(width) <= 360)
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.extended
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes_can_be_read(page: Page, scheme: str) -> None:
    """As the system asks for; every text has a contrast of 4.5 or more (WCAG 2.2, 1.4.3)."""
    wanted = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
    try:
        for where in PAGES:
            page.open(where)
            page.wait("the page", lambda: len(page.text()) > 100)
            ground = page.script("return getComputedStyle(document.body).backgroundColor")
            assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
            assert page.script(CONTRAST) >= 4.5
    finally:
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.extended
def test_nothing_is_asked_for_elsewhere(page: Page) -> None:
    """On any page; and the policy refuses nothing that the page itself does."""
    page.driver.get_log("browser")
    page.requests()
    for where in PAGES:
        page.open(where)
        page.wait("the page", lambda: len(page.text()) > 100)
    asked = [it for it in page.requests() if not it.startswith(("about:", "data:"))]
    assert len(asked) > 5
    assert [it for it in asked if not it.startswith(f"{page.url}/")] == []
    said = [it["message"] for it in page.driver.get_log("browser")]
    assert [it for it in said if "Content Security Policy" in it or "Uncaught" in it] == []


def test_the_policy_holds(page: Page) -> None:
    """A script that came into the page would not run, nor reach another server."""
    page.open("/")
    page.wait("the page", lambda: page.text("#verdict") != "reading")
    page.script("""
        window.ran = false;
        try { const it = document.createElement("script"); it.text = "window.ran = true";
              document.body.append(it); } catch {}
        try { document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='ran=true'>"); }
        catch {}
    """)
    elsewhere = (
        "const done = arguments[0];"
        "fetch('http://198.51.100.77/').then(() => done('sent'), (it) => done(it.message))"
    )
    page.driver.set_script_timeout(60)
    assert "Failed to fetch" in page.driver.execute_async_script(elsewhere)
    assert page.script("return window.ran") is False


def test_the_token_is_asked_for(page: Page, cluster: Cluster, tmp_path: Any) -> None:
    """Once, and it stands in no address."""
    file = tmp_path / "token"
    file.write_text("0123456789abcdef0123\n")
    with served(cluster, "--token-file", str(file)) as url:
        own = Page(page.driver, url)
        own.open("/services")
        own.wait("the question", lambda: "Token" in own.text())
        assert "default/web" not in own.text("body")
        own.keys("0123456789abcdef0123\n")
        own.wait("services", lambda: own.cells("Services of this node"))
        assert "0123456789abcdef" not in "".join(own.requests())
