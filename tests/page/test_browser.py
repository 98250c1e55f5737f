# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser, beside a real agent with real connections.

What is shown is what the maps hold; it can be used without a mouse, in both colour schemes and on a
narrow screen; and it asks for nothing anywhere else.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.serve import status
from ebpflb.tools.dump import dump_maps
from ebpflb.version import VERSION
from tests.kit import requests
from tests.kit.cluster import NODEPORT, VIP, Cluster, endpoint, running, web
from tests.page.browser import Page, chromium, command, served

CHANGES = "Changes, the newest first"
PICK = """const it = document.querySelector('[name=since]'); it.value = arguments[0];
          document.querySelector('.changes tbody').replaceChildren();
          it.dispatchEvent(new Event('change'));"""
# An answer since a day is of no change, and comes when window.late() is called; window.isLate says
# that it has.
LATE = """
const ask = window.fetch;
window.fetch = async (path, options) => {
  const answer = await ask(path, options);
  if (!path.includes("since=24h")) return answer;
  await new Promise((resolve) => { window.late = resolve; });
  const found = await answer.json();
  setTimeout(() => { window.isLate = true; }, 100);
  return new Response(JSON.stringify({ ...found, changes: [] }));
};"""
# Adds markup to the texts of all answers that come from objects or are sentences.
MARKUP = """
const words = new Set(["service", "pod", "node", "endpoint", "frontend", "problems", "notes",
  "reason", "text", "says", "name", "addresses", "ports", "kind", "namespaces", "type", "source"]);
const hostile = (it, word) => {
  if (typeof it === "string") return words.has(word) ? `${it}<i class=hostile>"'` : it;
  if (Array.isArray(it)) return it.map((each) => hostile(each, word));
  if (!it || typeof it !== "object") return it;
  return Object.fromEntries(Object.entries(it).map(([key, value]) => [key, hostile(value, key)]));
};
const real = window.fetch;
window.fetch = async (...words) => {
  const response = await real(...words);
  if (!response.headers.get("content-type").includes("json")) return response;
  return new Response(JSON.stringify(hostile(await response.json())), { status: response.status });
};
"""
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
        row["Endpoint"].removesuffix(" tcp/TCP"): row["Opened"]
        for row in page.cells("Endpoints")
        if row["Endpoint"].endswith(" tcp/TCP")
    }


@pytest.mark.extended
def test_the_verdict_is_that_of_status(page: Page, cluster: Cluster) -> None:
    """With every reason, and the facts that it rests on, which are folded."""
    page.open("/")
    found = command(cluster, "status", *cluster.agent.where)
    page.wait("the verdict", lambda: page.text("#verdict") == found["verdict"])
    page.wait("the facts", lambda: page.text("#says") != "reading")
    for reason in found["reasons"]:
        assert reason["text"] in page.text("#reasons")
    assert page.text("#facts") == ""
    page.script("document.querySelector('summary').click()")
    assert page.text("#fact-backends") == str(found["backends"])
    assert page.text("#fact-socket_hooks") == ", ".join(found["socket_hooks"])
    assert found["packet_path"]["engine"] in page.text(".about") and VERSION in page.text(".about")
    assert "running for" in page.text(".about")


def test_the_overview_has_what_an_operator_looks_for(page: Page, cluster: Cluster) -> None:
    """Rates with their highest, unused endpoints, the fullest map, and Services with a problem."""
    client = cluster.start_client(cluster.client, "tcp", VIP, pause=0.02)
    page.open("/")
    page.wait("a rate", lambda: "highest" in card(page, "New connections"))
    listed = command(cluster, "services", "list", *cluster.agent.where)["services"]
    unused, used = (sum(it[name] for it in listed) for name in ("unused", "used"))
    assert f"{unused} of {used + unused}" in card(page, "Endpoints not used")
    assert "entries" in card(page, "Fullest map") and "ago" in card(page, "API's freshness")
    for name in ("Refused", "Dropped"):
        assert "0/s" in card(page, name).replace("\n", "")
    lines = 'return document.querySelectorAll(".card .spark .line").length'
    page.wait("a line over time in each card", lambda: page.script(lines) == len(CARDS))
    assert all("highest" in card(page, name) for name in CARDS)
    page.open("/")
    page.wait("the lines again", lambda: page.script(lines) == len(CARDS))
    rows = {it["Service"]: it["Problem"] for it in page.cells("Services with a problem")}
    assert rows == {it["service"]: it["problems"][0] for it in listed if it["problems"]}
    assert rows
    assert cluster.stop_client(client)["errors"] == {}


CARDS = (
    *("New connections", "Refused", "Dropped"),
    *("Endpoints not used", "Fullest map", "API's freshness"),
)


def card(page: Page, label: str) -> str:
    return page.text(f'.card[aria-label="{label}"]')


def test_that_no_agent_runs_is_said_on_every_page(page: Page, cluster: Cluster) -> None:
    """By a banner, the title and the icon; when one runs again all are gone without a click."""
    page.open("/services")
    page.wait("services", lambda: page.cells("Services of this node"))
    cluster.agent.stop()
    try:
        page.wait("the banner", lambda: "No agent is running" in page.text("#banner"))
        for where in (*PAGES, "/nothing"):
            page.script("location.hash = arguments[0]", where)
            page.wait(
                "the page", lambda: page.driver.title.startswith(f"DEGRADED: {heading(page)} - ")
            )
            assert "No agent is running" in page.text("#banner")
            assert icon(page) == "icon-degraded.svg"
    finally:
        cluster.agent.start()
    page.wait("no banner", lambda: page.text("#banner") == "")
    assert page.driver.title == f"OK: {heading(page)} - node"
    assert icon(page) == "icon-ok.svg"


def heading(page: Page) -> str:
    return page.text("h1")


def icon(page: Page) -> str:
    return str(page.script("return document.getElementById('icon').href.split('/').pop()"))


def test_that_the_command_has_ended_is_said_on_every_page(page: Page, cluster: Cluster) -> None:
    """Also on a page that reads nothing by itself; once."""
    with served(cluster) as url:
        own = Page(page.driver, url)
        own.open("/explain")
        own.wait("the verdict", lambda: own.driver.title.startswith("OK: "))
    own.wait("the banner", lambda: "has it ended?" in own.text("#banner"))
    assert own.driver.title.startswith("UNKNOWN: Explain - ")
    assert icon(own) == "icon-unknown.svg"
    assert own.text("#problem") == ""


@pytest.mark.parametrize("where", ["/", "/services", "/history"])
def test_a_list_that_is_still_being_read_is_not_called_empty(page: Page, where: str) -> None:
    """On a large node the first answer takes seconds."""
    no_answer = {"source": "window.fetch = () => new Promise(() => {})"}
    added = page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", no_answer)
    try:
        page.open(where)
        page.wait("the table", lambda: page.text("main .table"))
        assert page.text("main .table").splitlines()[-1] == "reading"
        assert "none" not in page.text()
    finally:
        page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def test_services_are_those_of_the_maps(page: Page, cluster: Cluster) -> None:
    """Each has a row with its endpoints and connections."""
    page.open("/services")
    rows = page.wait("services", lambda: page.cells("Services of this node"))
    listed = command(cluster, "services", "list", *cluster.agent.where)["services"]
    shown = {row["Service"]: (row["Open"], row["Endpoints"]) for row in rows}
    assert shown == {it["service"]: (str(it["open"]), endpoints_of(it)) for it in listed}
    assert all(it["addresses"][0] in str(rows) for it in listed)


def endpoints_of(row: Any) -> str:
    used, unused = row["used"], row["unused"]
    return f"{used} of {used + unused}" if unused else str(used)


def test_services_are_found_while_typing_and_sorted_by_column(page: Page) -> None:
    """The address repeats filter, namespace and order."""
    page.open("/services")
    page.wait("services", lambda: page.cells("Services of this node"))
    page.script("document.querySelector('[name=match]').focus()")
    page.keys("hos")
    page.wait("the filter", lambda: services(page) == ["shop/hostile"])
    page.open("/services?namespace=shop&sort=service")
    page.wait("the namespace", lambda: services(page) == ["shop/hostile", "shop/many"])
    head = "[...document.querySelectorAll('th button')].find((it) => it.innerText === 'Endpoints')"
    page.script(f"{head}.click()")
    page.wait("the order", lambda: "sort=endpoints" in page.driver.current_url)
    assert services(page) == ["shop/hostile", "shop/many"]
    order = """const it = document.querySelector('th[aria-sort]');
               return [it.innerText, it.ariaSort]"""
    page.wait("the mark", lambda: page.script(order) == ["Endpoints", "ascending"])
    page.script(f"{head}.click()")
    page.wait("the other order", lambda: page.script(order) == ["Endpoints", "descending"])
    assert services(page) == ["shop/many", "shop/hostile"]
    assert "reverse=1" in page.driver.current_url


def services(page: Page) -> list[str]:
    return [row["Service"] for row in page.cells("Services of this node")]


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
    assert reasons["10.244.9.9:8080 tcp/TCP"] == "not ready"
    about = page.text(".about")
    assert all(word in about for word in ("NodePort", "ClusterIP Cluster", "none", "random"))


def test_a_service_has_its_history_and_events(page: Page, cluster: Cluster) -> None:
    """Its own alone; and a frontend's link asks how a connection to it goes."""
    page.open("/service/default/web")
    rows = page.wait("changes", lambda: page.cells("Latest changes"))
    assert all(row["Port"].startswith(("tcp/", "udp/")) for row in rows)
    page.script("document.querySelector('summary').click()")
    page.script("document.querySelector('#watch').click()")
    page.wait("it watches", lambda: page.text("#watching").startswith("watching"))
    requests.tcp(cluster.sockets(cluster.client), VIP)
    page.wait("an event", lambda: page.cells("Events, the newest first"))
    page.script(f"""[...document.querySelectorAll("a")].find((it) =>
        it.innerText === "0.0.0.0:{NODEPORT}" && it.href.includes("tcp")).click()""")
    page.wait("the answer", lambda: page.text("#explained"))
    assert page.script("return document.querySelector('[name=to]').value") == (
        f"{cluster.node.v4}:{NODEPORT}/tcp"
    )
    wait_until("nobody watches", lambda: not monitors(cluster), 120)


def test_rates_are_those_of_the_connections(page: Page, cluster: Cluster) -> None:
    """While a client connects all the time they are not zero; the graph has a line an endpoint."""
    client = cluster.start_client(cluster.client, "tcp", VIP, pause=0.02)
    page.open("/services")

    def rate() -> float:
        rows = {row["Service"]: row["New/s"] for row in page.cells("Services of this node")}
        return float(rows.get("default/web") or 0)

    page.wait("a rate", lambda: rate() > 1)
    page.wait("a line", lambda: page.script("return document.querySelector('.spark .line')"))
    parts = "return document.querySelectorAll('svg.parts .mark').length"
    page.wait("a bar for each endpoint", lambda: page.script(parts) == 3)
    expected = "return document.querySelector('svg.parts').getAttribute('aria-label')"
    assert page.script(expected).count("expected 33.3%") == 3
    page.open("/service/default/web")
    legend = "return [...document.querySelectorAll('.legend li')].map((it) => it.innerText)"
    page.wait("three lines", lambda: len(page.script(legend)) == 3)
    width = "return document.querySelector('.graph').clientWidth / document.body.clientWidth"
    assert page.script(width) > 0.9
    hover(page)
    page.wait("a value under the pointer", lambda: "s ago" in page.text("figcaption"))
    page.script("document.querySelector('.graph').dispatchEvent(new Event('pointerleave'))")
    assert page.text("figcaption").endswith("now")
    page.script("document.querySelector('.graph').focus()")
    page.keys("\ue012")  # the left arrow
    page.wait("a value of the past", lambda: "s ago" in page.text("figcaption"))
    assert cluster.stop_client(client)["errors"] == {}
    page.open("/services")
    page.wait("no rate any more", lambda: rate() == 0)


def hover(page: Page) -> None:
    """Moves the pointer to the middle of the graph."""
    from selenium.webdriver import ActionChains

    graph = page.script("return document.querySelector('.graph')")
    ActionChains(page.driver).move_to_element(graph).perform()


def test_names_are_shown_and_do_nothing(page: Page) -> None:
    """Control characters are escaped, and markup is text."""
    page.open("/service/shop/hostile")
    rows = page.wait("the endpoint", lambda: page.cells("Endpoints"))
    assert rows[0]["Pod"] == "a\\x1b[2J\\u202e<b>&"


@pytest.mark.parametrize("where", PAGES)
def test_markup_in_any_answer_is_text(page: Page, where: str) -> None:
    """Whatever names, annotations and sentences hold: no element is made of it."""
    added = page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": MARKUP})
    try:
        page.open(where)
        if where == "/events":
            page.wait("the form", lambda: page.script("return document.querySelector('#watch')"))
        else:
            page.wait("the markup", lambda: "<i class=hostile>" in page.text())
        assert page.script("return document.querySelectorAll('.hostile, i, img').length") == 0
    finally:
        page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def test_many_endpoints_are_pages(page: Page) -> None:
    """A hundred at a time."""
    page.open("/service/shop/many")
    assert len(page.wait("endpoints", lambda: page.cells("Endpoints"))) == 100
    assert "page 1 of 3" in page.text()
    on = "[...document.querySelectorAll('button')].find((it) => it.innerText === 'More endpoints')"
    for number in (2, 3):
        page.script(f"{on}.click()")
        page.wait(f"page {number}", lambda: f"page {number} of 3" in page.text())  # noqa: B023
    page.wait("the last fifty", lambda: len(page.cells("Endpoints")) == 50)


def test_no_such_service_is_said_in_a_sentence(page: Page) -> None:
    """And nothing is asked for again but the verdict."""
    page.open("/service/default/wob")
    page.wait("the sentence", lambda: "no Service default/wob" in page.text("#problem"))
    assert "did you mean default/web" in page.text("#problem")
    page.requests()
    statuses: list[str] = []

    def asked_twice_for_the_status() -> bool:
        statuses.extend(page.requests())
        return sum("/api/status" in it for it in statuses) >= 2

    page.wait("the page goes on asking for the verdict", asked_twice_for_the_status)
    assert {it.split("?")[0] for it in statuses} == {f"{page.url}/api/status"}
    page.script("document.querySelector('main a').click()")
    page.wait("the list", lambda: page.cells("Services of this node"))


@pytest.mark.parametrize("where", ["nothing", "services/x", "service", "%zz", "constructor"])
def test_an_unknown_part_of_the_page_is_said(page: Page, where: str) -> None:
    page.open(f"/{where}")
    page.wait("the sentence", lambda: f'no part called "{where}"' in page.text())
    assert page.text("h1") == "No such page"


def test_explain_shows_the_way_that_the_command_tells(page: Page, cluster: Cluster) -> None:
    """Of a Service that is chosen by name: each step with its row of a map, and all chances."""
    page.open("/explain")
    page.wait("the form", lambda: page.script("return document.querySelector('[name=from]')"))
    page.script("document.querySelector('[name=service]').focus()")
    page.keys("default/web\t")
    frontend = "return document.querySelector('[name=to]')?.value"
    page.wait("its frontends", lambda: page.script(frontend))
    page.script(f"document.querySelector('[name=to]').value = '{VIP}:80/tcp'")
    page.script("document.querySelector('form button').click()")
    page.wait("the verdict", lambda: page.text("#explained"))
    found = command(cluster, "explain", f"{VIP}:80", *cluster.agent.where)
    assert page.text("#explained") == f"{found['verdict']}: {found['says']}"
    assert page.script("return document.querySelector('#explained').className") == "answer good"
    steps = page.script("""return [...document.querySelectorAll(".way li")].map((it) =>
        [...it.children].map((part) => part.innerText))""")
    kept = ("hook", "frontend", "policy")  # another endpoint is drawn each time
    said = [
        [it["step"], it["says"], *([f"{it['map']} {it['row']}"] if it["map"] else [])]
        for it in found["steps"]
        if it["step"] in kept
    ]
    assert [it for it in steps if it[0] in kept] == said
    assert [steps[0][0], steps[-1][0]] == ["client", "verdict"]
    endpoints = page.cells("Endpoints, and the chance of a new connection")
    assert [(it["Endpoint"], it["Chance"].strip()) for it in endpoints] == [
        (it["endpoint"], f"{100 * it['chance']:.1f}".removesuffix(".0") + "%")
        for it in found["endpoints"]
    ]
    assert f"to={VIP}%3A80%2Ftcp" in page.driver.current_url
    assert "service=default%2Fweb" in page.driver.current_url


def test_a_pod_or_a_client_outside_is_chosen_from_a_list(page: Page, cluster: Cluster) -> None:
    """The address of the page repeats the question."""
    page.open(f"/explain?to={VIP}:80&from=web-1")
    page.wait("the answer", lambda: page.text("#explained"))
    listed = "return [...document.querySelector('[name=from]').options].map((it) => it.value)"
    assert {"node", "outside", "web-1", "web-2", "web-3"} <= set(page.script(listed))
    assert page.script("return document.querySelector('[name=from]').value") == "web-1"
    assert cluster.web[0].v4 in page.text(".way")


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
    page.wait("the form", lambda: page.script("return document.querySelector('#watch')"))
    page.script("document.querySelector('#watch').click()")
    page.wait("it watches", lambda: page.text("#watching").startswith("watching"))
    answers = [requests.tcp(cluster.sockets(cluster.client), VIP).name for _ in range(3)]
    caption = "Events, the newest first"

    def backends() -> list[str]:
        rows = [row for row in page.cells(caption) if row["Hook"] == "connect"]
        return [row["Endpoint"].split()[-1] for row in reversed(rows)]

    page.wait(f"events of {answers}", lambda: backends() == answers)
    rows = page.cells(caption)
    assert {row["Frontend"] for row in rows if row["Hook"] == "connect"} == {f"{VIP}:80/TCP"}
    wait_until("the agent says so", lambda: monitors(cluster), 120)
    page.open("/")
    wait_until("nobody watches", lambda: not monitors(cluster), 120)


def monitors(cluster: Cluster) -> bool:
    """Whether the agent says that a monitor runs."""
    found = status.read(cluster.agent.paths)
    return found is None or found.monitor is not None


def test_a_late_answer_replaces_no_later_one(page: Page) -> None:
    """Another time is chosen while the first one's answer is on its way."""
    page.open("/history")
    page.wait("a change", lambda: page.cells(CHANGES))
    page.script(LATE)
    page.script(PICK, "24h")
    page.wait("the question", lambda: page.script("return Boolean(window.late)"))
    page.script(PICK, "")
    page.wait("the later answer", lambda: page.text("main").count("history begins at"))
    page.script("window.late()")
    page.wait("the late answer", lambda: page.script("return window.isLate"))
    assert page.cells(CHANGES)


def test_filters_are_lists_to_choose_from(page: Page, cluster: Cluster) -> None:
    """A time of the history; a client and a verdict of events."""
    page.open("/history")
    page.wait("changes", lambda: page.cells(CHANGES))
    page.script(PICK, "24h")
    page.wait("the address", lambda: page.driver.current_url.endswith("/#/history?since=24h"))
    assert any("since=24h" in it for it in page.requests())
    page.open("/events")
    page.wait("the form", lambda: page.script("return document.querySelector('#watch')"))
    listed = "return [...document.querySelector(arguments[0]).options].map((it) => it.text)"
    pod = cluster.web[0]
    assert f"web-1 ({pod.v4})" in page.script(listed, "select[name=client]")
    assert {"refused", "source denied"} <= set(page.script(listed, "select[name=verdict]"))


def test_it_is_used_by_keyboard_alone(page: Page) -> None:
    """From the skip link by the pages to a Service, each with a visible focus."""
    from selenium.webdriver.common.keys import Keys

    page.open("/")
    page.wait("the page", lambda: page.text("#says") != "reading")
    page.keys(Keys.TAB)
    assert page.focus() == "Skip to the content"
    walked = []
    for _ in range(2):
        page.keys(Keys.TAB)
        walked.append(page.focus())
        outline = "return getComputedStyle(document.activeElement).outlineStyle"
        assert page.script(outline) == "solid"
    assert walked == ["Overview", "Services"]
    page.keys(Keys.ENTER)
    page.wait("the page's heading has the focus", lambda: page.focus() == "Services")
    page.wait("services", lambda: page.cells("Services of this node"))
    for _ in range(30):
        page.keys(Keys.TAB)
        if page.focus() == "default/web":
            break
    page.keys(Keys.ENTER)
    page.wait("the Service", lambda: page.focus() == "default/web" and "Type" in page.text())
    assert page.driver.title == "OK: default/web - node"


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
    page.wait("the page", lambda: page.text("#says") != "reading")
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


def changed(service: str) -> dict[str, Any]:
    """A change of the history, as the server gives it."""
    kinds = ("endpoints", "frontends")
    lists: dict[str, list[Any]] = {
        f"{kind}_{what}": [] for kind in kinds for what in ("added", "removed", "changed")
    }
    rows = [{"service": service, **lists, "connections_reset": ["1 to 10.0.0.1:80"]}]
    time = "2026-11-26T15:04:05.678+00:00"
    return {"time": time, "causes": [], "more_causes": 0, "services": rows, "more_services": 0}


def test_the_canary_is_folded_and_history_is_saved(page: Page) -> None:
    """What doctor's canary changes is counted; a file has a line of JSON for each change."""
    changes = [changed("ebpflb_doctor/canary:tcp/TCP"), changed("default/web:tcp/TCP")]
    said = {"begins": changes[0]["time"], "changes": changes, "earlier": 0, "notes": []}
    page.open("/history")
    page.wait("the history", lambda: page.cells(CHANGES))
    page.script(
        "const said = arguments[0]; window.fetch = async () => new Response(JSON.stringify(said))",
        said,
    )
    show = "[...document.querySelectorAll('button')].find((it) => it.innerText === 'Show')"
    page.script(f"{show}.click()")
    page.wait("the canary is folded", lambda: "1 changes of the canary" in page.text())
    assert [it["Service"] for it in page.cells(CHANGES)] == ["default/web:tcp/TCP"]
    page.script("document.querySelector('[name=canaries]').click()")
    assert len(page.cells(CHANGES)) == 2
    assert [json.loads(line) for line in saved(page).splitlines()] == changes


def test_events_are_saved(page: Page, cluster: Cluster) -> None:
    """A line of JSON for each event that is kept."""
    page.open("/events?service=default/web")
    page.wait("the form", lambda: page.script("return document.querySelector('#watch')"))
    page.script("document.querySelector('#watch').click()")
    page.wait("it watches", lambda: page.text("#watching").startswith("watching"))
    requests.tcp(cluster.sockets(cluster.client), VIP)
    page.wait("an event", lambda: page.cells("Events, the newest first"))
    (first, *_) = (json.loads(line) for line in saved(page).splitlines())
    assert (first["verdict"], first["service"]) == ("translated", "default/web:tcp/TCP")
    page.script("document.querySelector('#watch').click()")
    wait_until("nobody watches", lambda: not monitors(cluster), 120)


def saved(page: Page) -> str:
    """The file that the button makes."""
    page.driver.set_script_timeout(60)
    return str(
        page.driver.execute_async_script("""
        const done = arguments[0];
        URL.createObjectURL = (blob) => { blob.text().then(done); return "blob:none"; };
        [...document.querySelectorAll("button")].find(
            (it) => it.innerText === "Save as JSON lines").click();""")
    )
