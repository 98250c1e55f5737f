# SPDX-License-Identifier: Apache-2.0
"""`ebpflb maps dump`: entries from the pins alone, with names instead of ids."""

import json

import pytest

from ebpflb.tools.dump import ROWS
from tests.cli.conftest import Ebpflb
from tests.kit import answers, requests
from tests.kit.cluster import NODEPORT, VIP, Cluster, endpoint, web


@pytest.fixture(scope="module", autouse=True)
def dead(cluster: Cluster) -> None:
    """Publish a service, make one connection, and stop the agent."""
    cluster.publish(web(*map(endpoint, cluster.web), nodeport=NODEPORT))
    requests.tcp(cluster.sockets(cluster.client), VIP)
    cluster.agent.stop()


def test_every_map_with_entries_has_a_table(ebpflb: Ebpflb, state: list[str]) -> None:
    """Every map with entries has a table, whose rows name the map; ids are shown with names."""
    done = ebpflb("maps", "dump", "--all", *state, "-o", "wide")
    assert (done.status, done.err) == (0, "")
    shown = {line.split()[0] for line in done.out.splitlines() if line} - {"MAP"}
    assert {"services", "slots", "settings"} <= shown < set(ROWS)
    for words in ("default/web:tcp/TCP", "10.244.1.11:8080", "web-3", "NodePort", f"{VIP}:80"):
        assert words in done.out


def test_a_service(ebpflb: Ebpflb, state: list[str]) -> None:
    """--service prints the rows of one Service, from the named maps or from all."""
    words = ("maps", "dump", "--service", "default/web", *state, "-o", "json")
    maps = answers.dumped(ebpflb(*words).out)
    assert {"services", "slots", "service_names"} <= {name for name, rows in maps.items() if rows}
    assert all(row["service"].startswith("default/web:") for rows in maps.values() for row in rows)
    assert answers.dumped(ebpflb(*words, "slots").out) == {"slots": maps["slots"]}
    missing = ebpflb("maps", "dump", "--service", "default/wob", *state)
    assert missing.status == 1 and "did you mean default/web" in missing.err


def test_empty_map(ebpflb: Ebpflb, state: list[str]) -> None:
    """For a map without entries the output says that it is empty."""
    none = ebpflb("maps", "dump", "assignments", *state)
    assert none == (0, "", "No entries found\n")


def test_unknown_map(ebpflb: Ebpflb, state: list[str]) -> None:
    """An unknown name is an error that lists all names."""
    done = ebpflb("maps", "dump", "xyz", *state)
    assert done.status == 2 and "'xyz' is not one of 'services', 'service_places', " in done.err


def test_changed_while_reading(ebpflb: Ebpflb, cluster: Cluster, state: list[str]) -> None:
    """Text and JSON say that the agent was writing."""
    settings = cluster.maps["settings"]
    before = settings.get(0)
    settings.write([(0, before._replace(writes=before.writes + 1))])
    for words in (["--all"], []):
        assert "changed the maps during the dump" in ebpflb("maps", "dump", *words, *state).err
    said = ebpflb("maps", "dump", "settings", *state, "-o", "json").out
    assert "changed the maps" in json.loads(said)["notes"][0]
    settings.write([(0, before)])
