# SPDX-License-Identifier: Apache-2.0
"""`ebpflb maps dump`: from the pins alone, with names for numbers."""

import json
from typing import Any

import pytest
import yaml

from ebpflb.tools.dump import ROWS
from tests.cli.conftest import Ebpflb
from tests.kit import answers, requests
from tests.kit.cluster import NODEPORT, VIP, Cluster, endpoint, web


@pytest.fixture(scope="module", autouse=True)
def dead(cluster: Cluster) -> None:
    """A service, one connection, and no agent any more."""
    cluster.publish(web(*map(endpoint, cluster.web), nodeport=NODEPORT))
    requests.tcp(cluster.sockets(cluster.client), VIP)
    cluster.agent.stop()


def test_table(ebpflb: Ebpflb, state: list[str]) -> None:
    """Every map with entries has a table, whose rows name it; numbers are joined to names."""
    done = ebpflb("maps", "dump", "--all", *state, "-o", "wide")
    assert (done.status, done.err) == (0, "")
    shown = {line.split()[0] for line in done.out.splitlines() if line} - {"MAP"}
    full = ebpflb("maps", "dump", "--all", *state, "-o", "name").out.splitlines()
    for names in (shown, set(full)):
        assert {"services", "slots", "settings"} <= names < set(ROWS)
    for words in ("default/web:tcp/TCP", "10.244.1.11:8080", "web-3", "NodePort", f"{VIP}:80"):
        assert words in done.out


def test_counts(ebpflb: Ebpflb, state: list[str]) -> None:
    """Without a map's name no entries are printed: how many each map has, and how to get them."""
    done = ebpflb("maps", "dump", *state)
    rows = dict(line.split() for line in done.out.splitlines())
    assert rows.pop("MAP") == "ENTRIES" and 0 < len(rows) < len(ROWS)
    slots = ebpflb("maps", "dump", "slots", "--no-headers", *state).out
    assert int(rows["slots"]) == len(slots.splitlines())
    assert "`ebpflb maps dump MAP`" in done.err


def test_a_service(ebpflb: Ebpflb, state: list[str]) -> None:
    """--service leaves the rows of one Service, of the maps that are named or of all."""
    words = ("maps", "dump", "--service", "default/web", *state, "-o", "json")
    maps = answers.dumped(ebpflb(*words).out)
    assert {"services", "slots", "service_names"} <= {name for name, rows in maps.items() if rows}
    assert all(row["service"].startswith("default/web:") for rows in maps.values() for row in rows)
    assert answers.dumped(ebpflb(*words, "slots").out) == {"slots": maps["slots"]}
    missing = ebpflb("maps", "dump", "--service", "default/wob", *state)
    assert missing.status == 1 and "did you mean default/web" in missing.err


def test_columns(ebpflb: Ebpflb, state: list[str]) -> None:
    """By default without counters, which -o wide adds, and the maps of counters have."""
    wide = ebpflb("maps", "dump", "services", *state, "-o", "wide").out.splitlines()
    narrow = ebpflb("maps", "dump", "services", *state).out.splitlines()
    heads = narrow[0].split()
    assert heads and wide[0].split()[: len(heads)] == heads
    assert {"CHOSEN", "REFUSED"} <= set(wide[0].split()) - set(heads)
    assert "CHOSEN" in ebpflb("maps", "dump", "service_stats", *state).out
    assert any(f"{VIP}:80" in line and "default/web:tcp/TCP" in line for line in narrow)


def unchanging(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without what time and packets of others change between two dumps."""
    changing = {"age_seconds", "idle_seconds", "expires_seconds", "count"}
    return [{key: row[key] for key in row.keys() - changing} for row in rows]


def test_json_and_yaml(ebpflb: Ebpflb, state: list[str]) -> None:
    """Both hold every map, and the same."""
    said = json.loads(ebpflb("maps", "dump", "--all", *state, "-o", "json").out)
    assert {"services", "slots", "settings"} <= {row["map"] for row in said["items"]} <= ROWS.keys()
    assert said["notes"] == []
    same = yaml.safe_load(ebpflb("maps", "dump", "--all", *state, "-o", "yaml").out)
    assert unchanging(said["items"]) == unchanging(same["items"])


def test_one_map(ebpflb: Ebpflb, state: list[str]) -> None:
    """Named maps come alone, with live counters beside each row."""
    said = answers.dumped(ebpflb("maps", "dump", "services", *state, "-o", "json").out)
    assert list(said) == ["services"]
    rows = {(row["frontend"], row["service"]): row for row in said["services"]}
    assert rows[f"{VIP}:80", "default/web:tcp/TCP"]["chosen"] == 1


def test_empty_map(ebpflb: Ebpflb, state: list[str]) -> None:
    """A map without entries says that it has none."""
    none = ebpflb("maps", "dump", "assignments", *state)
    assert none == (0, "", "No entries found\n")


def test_unknown_map(ebpflb: Ebpflb, state: list[str]) -> None:
    """An unknown name is refused with those like it, or with all that there are."""
    done = ebpflb("maps", "dump", "sevrices", *state)
    assert done.status == 2
    assert "'sevrices' is not a known word. Did you mean services" in done.err
    done = ebpflb("maps", "dump", "xyz", *state)
    assert done.status == 2 and "'xyz' is not one of 'services', 'slots', " in done.err


def test_changed_while_reading(ebpflb: Ebpflb, cluster: Cluster, state: list[str]) -> None:
    """It says when the agent was writing, in words and in JSON."""
    settings = cluster.maps["settings"]
    before = settings.get(0)
    settings.write([(0, before._replace(writes=before.writes + 1))])
    for words in (["--all"], []):
        assert "changed the maps during the dump" in ebpflb("maps", "dump", *words, *state).err
    said = ebpflb("maps", "dump", "settings", *state, "-o", "json").out
    assert "changed the maps" in json.loads(said)["notes"][0]
    settings.write([(0, before)])
