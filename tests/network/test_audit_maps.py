# SPDX-License-Identifier: Apache-2.0
"""Changes by other programs in the maps that the agent writes are named and corrected."""

from collections.abc import Callable, Iterator, Mapping
from ipaddress import ip_address
from typing import Any

import pytest

from ebpflb.entries.services import BackendName, Frontend
from ebpflb.kernel.map_writer import bit_of
from ebpflb.kernel.maps import layout
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.lab.agents import wait_until
from ebpflb.model.annotations import MAGLEV, SCHEDULER_ANNOTATION
from ebpflb.model.services import Protocol
from ebpflb.serve import status
from tests.kit import requests
from tests.kit.cluster import VIP, Cluster, endpoint, running, web

Maps = Mapping[str, Map]
UNPLANNED = ip_address("198.51.100.77")
IDS = 1024
HASHES = (
    *("services", "service_names", "backend_names", "cluster_ips", "source_ranges", "devices"),
    *("node_addresses", "own_addresses", "link_addresses", "timeouts", "service_ranges"),
)
# Written by programs and sweeps: nothing is planned that they could differ from. Only their pins
# are compared, which test_audit.py takes away.
NOT_PLANNED = {
    *("affinity", "new_affinity", "sockets", "assignments", "peers", "tcp_flows", "other_flows"),
    *("half_open", "flow_stats", "sweeps", "service_stats", "backend_stats", "fragments"),
    *("forwarded", "verdicts", "reject_budgets", "scratch", "recent_choices", "moved_flows"),
    *("udp_choices", "flow_gate", "rotations", "connections", "backend_loads"),
    "sockets_full",
    "socket_places",
    *("service_clients", "backend_health", "attempts"),
    *("quiet_sockets", "failed_openings"),
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield a cluster whose maps are compared every 80 ms, with an entry in each of them. It has
    few backend ids, because each id is looked up.
    """
    options = "--iptables-sync-period=20ms", f"--map-size=backends={IDS}"
    with running(tmp_path_factory.mktemp("c"), *options) as made:
        restricted: dict[str, Any] = {
            "type": "LoadBalancer",
            "loadBalancerSourceRanges": ["10.0.0.0/8"],
        }
        balanced = web(*map(endpoint, made.web), nodeport=30080, **restricted)
        balanced[0]["status"] = {"loadBalancer": {"ingress": [{"ip": "203.0.113.20"}]}}
        balanced[0]["metadata"]["annotations"] = {SCHEDULER_ANNOTATION: MAGLEV}
        cidr = {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "ServiceCIDR",
            "metadata": {"name": "kubernetes"},
            "spec": {"cidrs": ["10.96.0.0/16"]},
        }
        made.publish([*balanced, cidr])
        yield made


@pytest.fixture(scope="module")
def maps(cluster: Cluster) -> Iterator[Maps]:
    """Return the agent's maps, opened for writing."""
    pinned = StateDir(cluster.agent.paths.state).open_maps()
    yield pinned
    for opened in pinned.values():
        opened.close()


@pytest.fixture(autouse=True)
def logged(cluster: Cluster) -> Callable[[str], bool]:
    """Whether the log has named a difference since the test began.

    Wait first until nothing differs: a repeated difference is not logged.
    """
    wait_until("nothing differs", lambda: not drift(cluster))
    before = len(cluster.agent.log())
    return lambda text: text in cluster.agent.log()[before:]


def drift(cluster: Cluster) -> Mapping[str, str]:
    """Return the agent's last findings."""
    told = status.read(cluster.agent.paths)
    assert told
    return told.drift


def content(maps: Maps, name: str) -> dict[Any, Any]:
    return dict(maps[name].items())


def settled(cluster: Cluster, logged: Callable[[str], bool], named: str) -> None:
    wait_until(f"{named} is said", lambda: logged(named))
    assert len(requests.backends(cluster.sockets(cluster.client), VIP)) == 3


@pytest.mark.extended
def test_each_map_is_compared_or_the_programs_own() -> None:
    """Each map is in one of the two lists; a new one also gets its test here."""
    arrays = {*PLACES.values(), "settings", "slots", "backend_slots"}
    assert set(layout.MAPS) == {*HASHES, *arrays, *NOT_PLANNED}


def other(value: Any) -> Any:
    """Return another value of the same kind."""
    if isinstance(value, int):
        return value + 1
    if isinstance(value, BackendName):  # type: ignore[misc]
        return BackendName("elsewhere", "nobody")
    for field in ("affinity_seconds", "idle", "namespace"):
        if hasattr(value, field):
            changed = "other" if field == "namespace" else getattr(value, field) + 7
            return value._replace(**{field: changed})
    return value._replace(v4=UNPLANNED)


def unplanned(key: Any) -> Any:
    """Return a key that no map has."""
    if isinstance(key, int):
        return 60000
    if isinstance(key, str):
        return "02:00:5e:00:53:77"
    if hasattr(key, "protocol"):
        changed = {"address": UNPLANNED} if isinstance(key, Frontend) else {"protocol": 99}
        return key._replace(**changed)
    if hasattr(key, "length"):
        return key._replace(address=UNPLANNED)
    return UNPLANNED


Change = Callable[[Map, Any, Any], object]
# By someone: an entry that serves what no Service asks for, too.
CHANGES: dict[str, Change] = {
    "removed": lambda opened, key, value: opened.delete([key]),
    "changed": lambda opened, key, value: opened.write([(key, other(value))]),
    "added": lambda opened, key, value: opened.write([(unplanned(key), value)]),
}


@pytest.mark.parametrize("name", HASHES)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_entry_that_others_change_is_corrected(
    cluster: Cluster, maps: Maps, logged: Callable[[str], bool], change: Change, name: str
) -> None:
    """The entry gets its former value again, and an unplanned entry is removed."""
    before = content(maps, name)
    change(maps[name], *next(iter(before.items())))
    wait_until("it is corrected", lambda: content(maps, name) == before)
    settled(cluster, logged, f"map {name}: ")


def place_of_a_table(maps: Maps) -> tuple[int, Any]:
    """Return a place of a table; a place that names another slot would send clients to another
    service, or nowhere.
    """
    table = next(s.table for s in content(maps, "services").values() if s.table.size)
    before = maps["choices"].get(table.base)
    return table.base, before._replace(slot=before.slot + 100_000)


def secret(maps: Maps) -> tuple[int, Any]:
    """Return another secret, with which packets of one flow would get other backends."""
    return 0, maps["secret"].get(0) ^ 2


def bit_of_a_frontend(maps: Maps) -> tuple[int, Any]:
    """Return a bit of no_frontends; a bit that is wrongly set makes a Service unreachable."""
    at, bit = divmod(bit_of(Frontend(ip_address(VIP), 80, Protocol.TCP)), 64)
    return at, maps["no_frontends"].get(at) | 1 << bit


def copy_of_a_service(maps: Maps) -> tuple[int, Any]:
    """Return the copy of a Service, and no copy; programs would look in the hash instead."""
    key, _ = next(maps["services"].packed_items())
    (at,) = [at for at, copy in maps["service_places"].items() if copy.startswith(key)]
    return at, bytes(maps["service_places"].spec.value_size)


PLACES = {
    copy_of_a_service: "service_places",
    place_of_a_table: "choices",
    secret: "secret",
    bit_of_a_frontend: "no_frontends",
}


@pytest.mark.parametrize(("changed", "name"), PLACES.items(), ids=[it.__name__ for it in PLACES])
def test_a_place_of_an_array_is_corrected(
    cluster: Cluster,
    maps: Maps,
    logged: Callable[[str], bool],
    changed: Callable[[Maps], tuple[int, Any]],
    name: str,
) -> None:
    """An array's element is corrected, whoever changes it; of slots as in plan/test_comparison."""
    at, value = changed(maps)
    before = maps[name].get(at)
    maps[name].write([(at, value)])
    wait_until("it is corrected", lambda: maps[name].get(at) == before)
    settled(cluster, logged, f"map {name}: #{at}" if name != "secret" else "map secret: ")


@pytest.mark.parametrize("field", ["first_port", "flags", "span_v4", "node_v4", "host_netns"])
def test_a_setting_is_corrected(
    cluster: Cluster, maps: Maps, logged: Callable[[str], bool], field: str
) -> None:
    """A changed setting is corrected; it would change how every packet is handled."""
    before = maps["settings"].get(0)
    value = {"flags": before.flags ^ {"masquerade_all"}, "node_v4": UNPLANNED}.get(field)
    if field == "span_v4":
        value = before.span_v4._replace(address=UNPLANNED)
    elif value is None:
        value = getattr(before, field) + 1
    maps["settings"].write([(0, before._replace(**{field: value}))])

    def is_corrected() -> bool:
        return bool(getattr(maps["settings"].get(0), field) == getattr(before, field))

    wait_until("it is corrected", is_corrected)
    settled(cluster, logged, f"map settings: {field} differs")
