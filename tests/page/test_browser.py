# SPDX-License-Identifier: Apache-2.0
"""In a real browser beside a real agent, the page shows the maps' content, and contacts no other
server.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from ebpflb.lab import manifests
from ebpflb.tools.dump import dump_maps
from tests.kit import requests
from tests.kit.cluster import NODEPORT, VIP, Cluster, endpoint, running, web
from tests.page.browser import Page, chromium, served

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


def everything(cluster: Cluster) -> list[Any]:
    """Publish several Services: one with an unused endpoint, one whose pod has a hostile name."""
    hostile = manifests.endpoint("10.250.0.1", node="node", target=HOSTILE)
    away = manifests.endpoint("10.244.9.9", node="away", target="far", ready=False)
    ports = [{"port": 80}]
    return [
        *web(*map(endpoint, cluster.web), away, nodeport=NODEPORT, ipFamilies=["IPv4"]),
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
    """Return the TCP connections of default/web by endpoint, from `ebpflb maps dump`."""
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


def test_a_service_shows_the_numbers_of_the_maps(page: Page, cluster: Cluster) -> None:
    """The page updates a Service's numbers without a click when connections are made."""
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


@pytest.mark.parametrize("where", PAGES)
def test_markup_in_any_answer_is_text(page: Page, where: str) -> None:
    """No name, annotation or sentence becomes an element."""
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


@pytest.mark.extended
def test_nothing_is_asked_for_elsewhere(page: Page) -> None:
    """No page requests anything from another server; the policy refuses nothing that the page
    itself does.
    """
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
    """An injected script would neither run nor reach another server."""
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
