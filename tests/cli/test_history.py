# SPDX-License-Identifier: Apache-2.0
"""`ebpflb history` of a real agent, across its restart and its death."""

import signal
from datetime import datetime
from typing import Any

import pytest

from ebpflb.history.records import latest_changes
from ebpflb.lab.agents import wait_until
from tests.cli.conftest import Ebpflb
from tests.kit import answers
from tests.kit.cluster import NODEPORT, Cluster, endpoint, web


def changes(ebpflb: Ebpflb, *words: object) -> list[dict[str, Any]]:
    return answers.items(ebpflb("history", "-o", "json", *words).out)


@pytest.fixture(scope="module")
def moments(cluster: Cluster) -> list[str]:
    """Let a service grow, kill the agent, remove an endpoint, and restart the agent."""
    one, two, three = map(endpoint, cluster.web)
    made: list[str] = []
    for number, endpoints in enumerate(([one], [one, two, three], [three])):
        cluster.publish(web(*endpoints, nodeport=NODEPORT))
        wait_until("it is recorded", lambda: latest(cluster) == len(endpoints))  # noqa: B023
        made.append(datetime.now().isoformat())
        if number:
            cluster.agent.stop(signal.SIGKILL if number == 1 else signal.SIGTERM)
            cluster.agent.start()
    return made


def latest(cluster: Cluster) -> int:
    """Return the number of endpoints after the last change; 0 before the first change is
    recorded.
    """
    found = latest_changes(cluster.agent.paths, ("default", "web"), None, 0).changes
    return max((port.endpoints_after for it in found[-1:] for port in it.services), default=0)


def test_changes_have_causes(ebpflb: Ebpflb, where: list[str], moments: list[str]) -> None:
    """Each change of the service names the slice that caused it, and the endpoints."""
    words = ("--service", "default/web", "--since", moments[1], *where)
    found = changes(ebpflb, *words)
    (tcp,) = (it for it in found if it["service"] == "default/web:tcp/TCP" and it["change"])
    slices = [it for it in tcp["cause"] if it["kind"] == "EndpointSlice"]
    assert {it["name"].partition("/")[0] for it in slices} == {"default"}
    assert tcp["change"]["endpoints_removed"] == ["10.244.1.11:8080", "10.244.1.12:8080"]
    assert (tcp["change"]["endpoints_before"], tcp["change"]["endpoints_after"]) == (3, 1)
    assert {it["service"].partition(":")[0] for it in found} == {"default/web"}
    of_all = changes(ebpflb, "-n", "default", "--since", moments[1], *where)
    assert tcp["change"] in [it["change"] for it in of_all]
    none = ebpflb("history", "-n", "none", *where)
    assert none.err.startswith("No changes found\n")
    none = ebpflb("history", "--service", "default/none", *where)
    assert (none.status, none.out) == (0, "") and none.err.startswith("No changes found\n")


def test_notes_say_when_the_history_begins(
    ebpflb: Ebpflb, where: list[str], moments: list[str]
) -> None:
    """Notes say when the history begins and how many older changes there are."""
    done = ebpflb("history", *where)
    assert done.out.split()[:5] == ["TIME", "AGE", "SERVICE", "CHANGE", "CAUSE"]
    assert done.err.startswith("history begins at ")
    assert "before again" not in done.out, "each change has its cause, also at the first start"
    three = ebpflb("history", "--limit", 3, *where)
    times = [[line.split()[0] for line in out.splitlines()] for out in (three.out, done.out)]
    assert times[0][1:] == times[1][-3:]
    assert "earlier changes are not shown: --limit 0 shows all" in three.err
    wide = ebpflb("history", "-o", "wide", *where).out
    assert "EndpointSlice default/web-ipv4 changed" in wide and "agent@" in wide
