# SPDX-License-Identifier: Apache-2.0
"""`ebpflb history` and `maps dump --at`: of a real agent, across its restart and its death."""

import json
import os
import signal
from datetime import datetime
from typing import Any, NamedTuple

import pytest

from ebpflb.history import segments
from ebpflb.history.recorder import RECORDED
from ebpflb.lab.agents import wait_until
from ebpflb.tools import pins
from ebpflb.tools.dump import dump_maps
from tests.cli.conftest import Ebpflb
from tests.kit.cluster import NODEPORT, Cluster, endpoint, web

SHOWN = ["services", "slots", "service_names", "backend_names", "node_addresses"]


class Moment(NamedTuple):
    """When it was, and what the maps held."""

    at: str
    maps: dict[str, list[dict[str, Any]]]


def dumped(ebpflb: Ebpflb, *words: object) -> dict[str, list[dict[str, Any]]]:
    done = ebpflb("maps", "dump", *SHOWN, "-o", "json", *words)
    assert (done.status, done.err) == (0, "")
    maps: dict[str, list[dict[str, Any]]] = json.loads(done.out)["maps"]
    return maps


def changes(ebpflb: Ebpflb, *words: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(ebpflb("history", "-o", "json", *words).out)["changes"]
    return found


@pytest.fixture(scope="module")
def moments(cluster: Cluster) -> list[Moment]:
    """A service grows; the agent is killed; it loses an endpoint; the agent is restarted."""
    one, two, three = map(endpoint, cluster.web)
    made = []
    for number, endpoints in enumerate(([one], [one, two, three], [three])):
        cluster.publish(web(*endpoints, nodeport=NODEPORT))
        settings = cluster.maps["settings"]
        wait_until("it is written", lambda: settings.get(0).writes % 2 == 0)  # noqa: B023
        with pins.pinned_maps(cluster.agent.paths.state) as maps:
            made.append(Moment(datetime.now().isoformat(), dump_maps(maps, tuple(SHOWN)).maps))
        if number:
            cluster.agent.stop(signal.SIGKILL if number == 1 else signal.SIGTERM)
            cluster.agent.start()
    return made


def known_then(maps: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Without the counters, which are of now."""
    counters = ("opened", "open", "chosen", "by_affinity", "refused", "no_local_endpoint")
    return {
        name: [{key: row[key] for key in row if key not in counters} for row in rows]
        for name, rows in maps.items()
    }


@pytest.mark.extended
def test_what_the_maps_held(ebpflb: Ebpflb, where: list[str], moments: list[Moment]) -> None:
    """At each moment, before and after the agent's death, what `maps dump` showed then."""
    for moment in moments:
        assert dumped(ebpflb, "--at", moment.at, *where) == known_then(moment.maps)
    assert moments[0].maps != moments[1].maps != moments[2].maps


def test_changes_have_causes(ebpflb: Ebpflb, where: list[str], moments: list[Moment]) -> None:
    """Each change of the service names the slice that caused it, and the endpoints."""
    words = ("--service", "default/web", "--since", moments[1].at, *where)
    (last,) = changes(ebpflb, *words)
    assert {"EndpointSlice"} <= {cause["kind"] for cause in last["causes"]}
    (tcp,) = (it for it in last["services"] if it["service"] == "default/web:tcp/TCP")
    assert tcp["endpoints_removed"] == ["10.244.1.11:8080", "10.244.1.12:8080"]
    assert {it["service"].partition(":")[0] for it in last["services"]} == {"default/web"}
    of_all = changes(ebpflb, "-n", "default", "--since", moments[1].at, *where)
    assert any(tcp in change["services"] for change in of_all)
    none = ebpflb("history", "-n", "none", *where)
    assert none.err.startswith("No resources found in none namespace.\n")
    none = ebpflb("history", "--service", "default/none", *where)
    assert (none.status, none.out) == (0, "") and none.err.startswith("No changes found\n")


def test_table(ebpflb: Ebpflb, where: list[str], moments: list[Moment]) -> None:
    """Notes say when it begins and how many older changes there are."""
    done = ebpflb("history", *where)
    assert done.out.split()[:5] == ["TIME", "AGE", "SERVICE", "CHANGE", "CAUSE"]
    assert done.err.startswith("history begins at ")
    three = ebpflb("history", "--limit", 3, *where)
    times = [[line.split()[0] for line in out.splitlines()] for out in (three.out, done.out)]
    assert times[0][1:] == times[1][-3:]
    assert "earlier changes are not shown: --limit 0 shows all" in three.err
    names = ebpflb("history", "-o", "name", *where).out.splitlines()
    assert "default/web:tcp/TCP" in names and len(names) == len(set(names))
    assert "EndpointSlice default/web-ipv4 changed" in ebpflb("history", "-o", "wide", *where).out


def test_what_cannot_be_known(ebpflb: Ebpflb, where: list[str], moments: list[Moment]) -> None:
    """A time before it, a map that is not recorded, and no time at all are one line each."""
    early = ebpflb("maps", "dump", "--at", "300d", *where)
    assert early.status == 1 and early.err.startswith("ebpflb: history begins at ")
    other = ebpflb("maps", "dump", "tcp_flows", "--at", moments[0].at, *where)
    assert (
        other.err == "ebpflb: tcp_flows: not in the history, because the agent does not write it\n"
    )
    assert ebpflb("maps", "dump", "--at", "soon", *where).status == 2
    everything = json.loads(ebpflb("maps", "dump", "--all", "--at", "0s", "-o", "json", *where).out)
    assert everything["maps"].keys() <= set(RECORDED)


def test_without_any(ebpflb: Ebpflb, nowhere: list[str]) -> None:
    """Where no agent has recorded anything a line says so."""
    done = ebpflb("history", *nowhere)
    assert done.status == 1 and done.err.startswith("ebpflb: no history in ")


def test_foreign_file(ebpflb: Ebpflb, cluster: Cluster, where: list[str]) -> None:
    """Beside a file that is not ours an agent starts, and records; a reader names the file."""
    paths = cluster.agent.paths
    cluster.agent.stop()
    foreign = segments.paths_of(paths)[-1]
    foreign.write_bytes(os.urandom(100))
    cluster.agent.start()
    assert f"{foreign}: line 1 is damaged" in ebpflb("history", *where).err
    foreign.unlink()
    assert dumped(ebpflb, "--at", "0s", *where) == known_then(dumped(ebpflb, *where))
