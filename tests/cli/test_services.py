# SPDX-License-Identifier: Apache-2.0
"""`ebpflb services`, answered by a real agent."""

import json
import sys
from typing import Any

import pytest

from ebpflb.lab import manifests
from tests.cli.conftest import Ebpflb
from tests.kit import requests
from tests.kit.cluster import NODEPORT, VIP, Cluster, endpoint, web

MANY = 250


@pytest.fixture(scope="module", autouse=True)
def published(cluster: Cluster) -> None:
    """Publish a Service of which two of four endpoints are used, a Service with many endpoints, and
    a pod with a hostile name.
    """
    first, second, third = cluster.web
    hostile = manifests.endpoint("10.250.0.1", node="node", target="a\x1b[2Jb")
    many = [
        manifests.endpoint(f"10.251.{i // 250}.{i % 250 + 1}", node="node", target=f"pod-{i}")
        for i in range(MANY)
    ]
    cluster.publish(
        web(
            endpoint(first),
            endpoint(second),
            endpoint(third, ready=False, serving=True, terminating=True),
            manifests.endpoint("10.244.9.9", node="away", target="far", ready=False),
            nodeport=NODEPORT,
        ),
        [
            manifests.service(
                "many", ["10.96.1.1"], [{"port": 80}], namespace="shop", labels={"app": "many"}
            ),
            manifests.endpoint_slice("many", "IPv4", many, [{"port": 80}], namespace="shop"),
            manifests.service("hostile", ["10.96.1.2"], [{"port": 80}], namespace="shop"),
            manifests.endpoint_slice(
                "hostile", "IPv4", [hostile], [{"port": 80}], namespace="shop"
            ),
        ],
    )
    requests.tcp(cluster.sockets(cluster.client), VIP)


def page(ebpflb: Ebpflb, name: str, *words: object) -> Any:
    done = ebpflb("services", "get", name, "-o", "json", *words)
    assert done.err == ""
    return json.loads(done.out)


def test_used_endpoints_have_a_share(ebpflb: Ebpflb, where: list[str]) -> None:
    """Used endpoints have a share, unused endpoints a reason."""
    done = ebpflb("services", "get", "default/web", *where)
    assert done.err == ""
    frontends, endpoints = (part.splitlines() for part in done.out.split("\n\n"))
    assert frontends[0].startswith("SERVICE      PORT     KIND") and len(frontends) > 2
    assert endpoints[0].endswith("REASON")
    used = [line.split() for line in endpoints if "10.244.1.11:8080" in line]
    assert len(used) == 2 and all("50%" in line for line in used)
    assert any(line.endswith("terminating, while others are ready") for line in endpoints)
    unused = [line for line in endpoints if "10.244.9.9:8080" in line]
    assert len(unused) == 2 and all("not ready" in line for line in unused)


def test_exit_status(ebpflb: Ebpflb, where: list[str]) -> None:
    """The status is 0 if every frontend is served, 3 if one is not, 1 if there is no such
    Service.
    """
    assert ebpflb("services", "get", "shop/many", *where).status == 0
    assert ebpflb("services", "get", "default/web", *where).status == 3  # nothing serves its IPv6
    missing = ebpflb("services", "get", "default/wob", *where)
    assert missing.status == 1
    assert missing.err.startswith("ebpflb: no Service default/wob: did you mean default/web")
    assert ebpflb("services", "get", "a/b/c", *where).status == 2
    nothing = ebpflb("services", "list", "nothing-*", *where)
    assert nothing == (0, "", "No Services found\n")
    assert ebpflb("services", "list", "-n", "nothing", *where) == nothing


def test_many_endpoints(ebpflb: Ebpflb, where: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal a table ends after 100 rows and says how many more there are; a pipe and JSON
    get all rows.
    """
    words = ("services", "get", "shop/many", *where)
    assert ebpflb(*words).out.count("pod-") == MANY
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    done = ebpflb(*words)
    assert done.out.count("pod-") == 100
    assert done.err == f"... and {MANY - 100} more: --limit 0 shows all\n"
    assert ebpflb(*words, "--limit", 0).out.count("pod-") == MANY
    assert len(page(ebpflb, "shop/many", *where)["ports"][0]["endpoints"]) == MANY


def test_control_characters(ebpflb: Ebpflb, where: list[str]) -> None:
    """A terminal shows a hostile name without acting on it."""
    for output in ("table", "wide", "json", "yaml"):
        done = ebpflb("services", "get", "shop/hostile", "-o", output, *where)
        assert "\x1b" not in done.out
        assert "[2Jb" in done.out


def test_without_an_agent(ebpflb: Ebpflb, cluster: Cluster, where: list[str]) -> None:
    """Without an agent one line names an alternative."""
    cluster.agent.stop()
    try:
        listed = ebpflb("services", "list", *where)
        one = ebpflb("services", "get", "default/web", *where)
    finally:
        cluster.agent.start()
    for done, words in ((listed, "services"), (one, "--service default/web")):
        assert done == (
            *(1, ""),
            "ebpflb: no agent runs: only the agent knows its Services;"
            f" `ebpflb maps dump {words}` shows what the maps hold\n",
        )
