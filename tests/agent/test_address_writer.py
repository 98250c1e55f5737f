# SPDX-License-Identifier: Apache-2.0
"""One agent writes the addresses of the pools into Services (docs/load-balancer-addresses.md)."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ebpflb.agent.address_writer import (
    BURST,
    BURST_SECONDS,
    RECHECK,
    STAND_IN,
    AddressWriter,
)
from ebpflb.agent.loop import Turn
from ebpflb.cluster import balanced_services, decoding
from ebpflb.cluster.event_recorder import server_factory
from ebpflb.cluster.source import ServerOptions, Timing
from ebpflb.lab import manifests
from ebpflb.model import objects
from ebpflb.model.claims import WRITER, Claims
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import Key, Kind, Replaced
from ebpflb.model.nodes import EXCLUDED_LABEL
from ebpflb.model.pools import CLASS, Pools, parse_pools, ranked
from ebpflb.model.services import PROXY_NAME_LABEL, Admission
from tests.kit.api_history import Json
from tests.kit.api_server import FakeApiServer

POOLS = parse_pools(["192.0.2.200-192.0.2.203"])
NODES = ranked(WRITER, ["one", "two", "three"])
OWNER, SECOND, THIRD = NODES
SERVICES = 200


class Now:
    """An inbox whose loop answers at once."""

    @staticmethod
    def ask(do: Callable[[], Any]) -> Any:
        return do()


class World:
    """An API server, and agents that look and see when a test says so."""

    def __init__(self, api: FakeApiServer, folder: Path, pools: Pools) -> None:
        self.api, self.now, self.told = api, 0.0, list[tuple[str, str]]()
        self._make = server_factory(ServerOptions(api.kubeconfig(folder)))
        self.clusters: dict[str, ClusterState] = {}
        self.agents = {name: self._agent(name, pools) for name in NODES}
        for name in NODES:
            self.node(name)

    def _agent(self, name: str, pools: Pools) -> AddressWriter:
        self.clusters[name] = cluster = ClusterState(name, admission=Admission(pools=pools))
        record = lambda key, note: self.told.append((key.name, note))  # noqa: E731
        here: Any = Now()
        more: Any = {"clock": lambda: self.now, "timing": Timing(jitter=lambda: 1.0)}
        return AddressWriter(cluster, here, self._make, record, **more)

    def node(self, name: str, *, ready: bool = True, label: str = "") -> None:
        labels = {label: ""} if label else None
        made = manifests.node(name, ("InternalIP", f"10.0.0.{len(name)}"), labels=labels)
        made["status"]["conditions"] = [{"type": "Ready", "status": str(ready)}]
        self.api.put(made)

    def service(self, name: str, *held: str, created: int = 0, **spec: Any) -> Json:
        ports, ingress = spec.pop("ports", [{"port": 80}]), spec.pop("ingress", held)
        spec = {"type": "LoadBalancer", "loadBalancerClass": CLASS, **spec}
        made = manifests.service(name, ["10.96.0.9"], ports, ingress=ingress, **spec)
        made["metadata"] |= {"uid": name, "creationTimestamp": f"2026-11-29T{created:06}Z"}
        self.api.put(made)
        return made

    def namespace(self, name: str, **labels: str) -> None:
        self.api.put({"kind": "Namespace", "metadata": {"name": name, "labels": labels}})

    def see(self, *names: str) -> None:
        """Let these agents, or all, take what the API server has now."""
        for name in names or self.agents:
            for kind in (Kind.SERVICE, Kind.ENDPOINT_SLICE, Kind.NODE):
                listed = [json.dumps(it).encode() for it in self.api.objects(kind)]
                found = dict(decoding.read_object(kind, it, "") for it in listed)
                self.clusters[name].apply(Replaced(kind, found))
            self.agents[name].observe(Turn())

    def turn(self, *names: str, after: float = 0.0) -> None:
        self.now += after
        for name in names or self.agents:
            self.agents[name].turn()

    def ips(self, namespace: str = "default") -> dict[str, str]:
        services = self.api.objects(Kind.SERVICE)
        return {
            it["metadata"]["name"]: " ".join(
                each["ip"] for each in it["status"]["loadBalancer"].get("ingress") or ()
            )
            for it in services
            if it["metadata"]["namespace"] == namespace
        }

    def status(self, name: str) -> dict[str, str]:
        return dict(self.agents[name].status()["addresses_missing"])


@pytest.fixture
def api() -> Iterator[FakeApiServer]:
    with FakeApiServer() as made:
        yield made


@pytest.fixture
def world(api: FakeApiServer, tmp_path: Path) -> World:
    return World(api, tmp_path, POOLS)


def test_the_owner_writes_once(world: World) -> None:
    """The owner gives each Service its address at once; the others, and a later look, change
    nothing and ask for nothing.
    """
    world.service("web")
    world.service("other", type="ClusterIP", loadBalancerClass=None)
    world.see()
    world.turn()
    assert world.ips() == {"web": "192.0.2.200", "other": ""}
    world.see()
    lists = world.api.lists("Service")
    world.turn(after=10 * STAND_IN)
    assert (world.api.lists("Service"), len(world.api.patches)) == (lists, 1)
    world.turn(OWNER, after=RECHECK)
    assert world.api.lists("Service") == lists + 1


def test_the_next_one_stands_in(world: World) -> None:
    """If the owner's agent does nothing, the second writes three seconds later; if its Node is not
    Ready, or says that it may have no agent, at once.
    """
    world.service("web")
    world.see()
    world.turn(SECOND, THIRD, after=STAND_IN / 2)
    assert world.ips() == {"web": ""}
    world.turn(THIRD, SECOND, after=STAND_IN / 2)
    assert world.ips() == {"web": "192.0.2.200"}
    world.node(OWNER, ready=False)
    world.service("next")
    world.see()
    world.turn(THIRD, SECOND)
    assert world.ips()["next"] == "192.0.2.201"
    world.node(OWNER, label=EXCLUDED_LABEL)
    world.service("last")
    world.see()
    world.turn(THIRD, SECOND)
    assert world.ips()["last"] == "192.0.2.202"


def test_pools_that_change_during_a_rollout(world: World) -> None:
    """A Service changes its address once, as the owner has it, whatever pools the others have."""
    world.service("web", "192.0.2.200")
    new, told = parse_pools(["192.0.2.208"]), "192.0.2.200 is taken away: it is in no pool"
    for name, ip in ((SECOND, "192.0.2.200"), (OWNER, "192.0.2.208")):
        world.clusters[name].claims.pools = new
        world.service("web", "192.0.2.200")
        for _ in range(4):
            world.see()
            world.turn(*reversed(NODES), after=RECHECK / 2)
        assert world.ips() == {"web": ip}
    assert (len(world.api.patches), world.told) == (1, [("web", told)])


def test_two_owners(api: FakeApiServer, tmp_path: Path) -> None:
    """200 Services come at once; for a while two agents are the owner, one with a late copy, and
    one is killed: in the end each has an address of its own, and those that had one keep it.
    """
    world = World(api, tmp_path, parse_pools(["192.0.2.0/24"]))
    world.service("old", "192.0.2.7", created=9)
    world.see()
    for number in range(SERVICES):
        world.service(f"web-{number:03}", created=number % 3)
    world.see(OWNER)
    world.node(OWNER, ready=False)
    world.see(SECOND)
    both = [threading.Thread(target=world.turn, args=(it,)) for it in (OWNER, SECOND)]
    for each in both:
        each.start()
    for each in both:
        each.join()
    for _ in range(5):  # the owner is dead
        world.see(SECOND, THIRD)
        world.turn(SECOND, THIRD, after=2 * STAND_IN)
    found = world.ips()
    assert (len(found), len(set(found.values())), found["old"]) == (201, 201, "192.0.2.7")
    world.see()
    assert world.status(SECOND) == {}


def test_of_two_that_were_given_one_address_the_younger_gets_another(world: World) -> None:
    """It is told so by an Event, and the older one keeps its address."""
    world.service("old", "192.0.2.200", created=1)
    world.service("new", "192.0.2.200", created=2)
    world.see()
    world.turn(OWNER)
    assert world.ips() == {"old": "192.0.2.200", "new": "192.0.2.201"}
    assert world.told == [("new", "192.0.2.200 is taken away: Service default/old has it")]
    world.see()
    assert world.status(OWNER) == {}


def test_a_stale_copy_overwrites_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Service that changes between the list and the write stays as it is, and is read again."""
    made = world.service("web")
    world.see()
    later = made | {"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.203"}]}}}
    write = balanced_services.write

    def late(*about: Any) -> None:
        monkeypatch.setattr(balanced_services, "write", write)
        world.api.put(later)
        write(*about)

    monkeypatch.setattr(balanced_services, "write", late)
    world.turn(OWNER)
    assert world.ips() == {"web": "192.0.2.203"}
    assert list(world.status(OWNER)) == ["default/web"]
    world.turn(OWNER, after=1)
    world.see()
    assert (world.ips(), world.status(OWNER)) == ({"web": "192.0.2.203"}, {})


def test_a_status_that_somebody_else_wrote(world: World) -> None:
    """Another controller's address, or a tenant's, is replaced by one of the pool."""
    world.service("web", "10.0.0.1")
    world.service("node", "10.0.0.3")
    world.see()
    world.turn(OWNER)
    assert world.ips() == {"node": "192.0.2.200", "web": "192.0.2.201"}


def test_what_a_service_gives_back(world: World) -> None:
    """A Service that is of our class no more loses the address, and another one gets it, as it gets
    that of a deleted one.
    """
    made = [world.service(f"s{n}", created=n) for n in range(6)]
    world.see()
    world.turn(OWNER)
    lost = "no pool of its namespace has a free IPv4 address"
    assert [name for name, ip in world.ips().items() if not ip] == ["s4", "s5"]
    assert sorted(world.told) == [("s4", lost), ("s5", lost)]
    assert world.status(OWNER) == {"default/s4": lost, "default/s5": lost}
    world.service("s0", "192.0.2.200", type="ClusterIP", loadBalancerClass=None)
    world.api.delete(made[1])
    for _ in range(3):
        world.see()
        world.turn(OWNER)
    found = world.ips()
    assert (found["s0"], {found["s4"], found["s5"]}) == ("", {"192.0.2.200", "192.0.2.201"})
    world.see()
    assert world.status(OWNER) == {}


def test_another_class_keeps_the_rest_of_its_status(world: World) -> None:
    """Of a Service that has become another controller's only the pool's address is taken."""
    kept = [
        {"hostname": "lb.example.org"},
        {"ip": "192.0.2.201", "ipMode": "Proxy"},
        {"ip": "198.51.100.7", "ports": [{"port": 80, "protocol": "TCP"}]},
    ]
    world.service("web", "192.0.2.200")
    world.see()
    world.service("web", ingress=[kept[0], {"ip": "192.0.2.200"}, *kept[1:]], loadBalancerClass="x")
    world.see()
    world.turn(OWNER)
    (web,) = world.api.objects(Kind.SERVICE)
    assert web["status"]["loadBalancer"]["ingress"] == kept


def test_nobody_hides_an_address(world: World) -> None:
    """A Service without addresses of its own by its type has none of the pool either, also if no
    agent watches it, or was there when it changed; nobody else has the address before.
    """
    for number in range(4):
        world.service(f"s{number}", f"192.0.2.{200 + number}", created=number)
        made = world.service(f"s{number}", f"192.0.2.{200 + number}", type="ClusterIP")
        made["metadata"]["labels"] = {PROXY_NAME_LABEL: "hidden"}
        world.api.put(made)
    world.service("web")
    world.see()
    world.turn(OWNER)
    assert set(world.ips().values()) == {""}
    world.turn(OWNER, after=RECHECK)
    assert world.ips()["web"] == "192.0.2.200"


def test_who_gives_back_and_takes_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old Service that cannot be cleared, and asks again, takes the address from nobody."""
    world.service("old", "192.0.2.200", created=1)
    world.see()
    world.service("old", "192.0.2.200", created=1, type="ClusterIP")
    world.service("web", created=2)
    write = balanced_services.write

    def refuse(server: Any, key: Key, *about: Any) -> None:
        if key.name == "old":
            raise decoding.RequestRejected("409 Conflict")
        write(server, key, *about)

    monkeypatch.setattr(balanced_services, "write", refuse)
    world.see()
    world.turn(OWNER)
    world.service("old", "192.0.2.200", created=1)
    world.see()
    world.turn(OWNER, after=BURST_SECONDS)
    assert world.ips() == {"old": "192.0.2.200", "web": "192.0.2.201"}
    assert world.told == []


def test_who_cannot_be_helped_costs_one_list(world: World) -> None:
    """Services without a free address make neither the owner list again and again, nor the others
    list at all.
    """
    for number in range(6):
        world.service(f"s{number}", created=number)
    world.see()
    world.turn(OWNER)
    world.see()
    lists = world.api.lists("Service")
    for _ in range(9):
        world.turn(after=2 * STAND_IN)
    assert world.api.lists("Service") == lists


def test_the_loop_looks_at_what_changed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many Services wait for an address that becomes free."""
    for number in range(9):
        world.service(f"s{number}", created=number)
    for _ in range(2):
        world.see(OWNER)
        world.turn(OWNER)
    asked, is_settled = list[str](), Claims.is_settled

    def noted(self: Claims, key: Key) -> bool:
        asked.append(key.name)
        return is_settled(self, key)

    monkeypatch.setattr(Claims, "is_settled", noted)
    world.api.delete(world.service("s0"))
    world.see(OWNER)
    world.turn(OWNER)
    assert asked == ["s0"] and world.ips()["s4"] == "192.0.2.200"


def test_a_service_that_changes_all_the_time(world: World) -> None:
    """It makes the owner list all Services no more than once in five seconds; another Service still
    gets its address.
    """
    for number in range(6):
        world.service(f"s{number}", created=number)
    for number in range(100):
        world.service("s5", created=5, ports=[{"port": 1 + number}])
        world.see(OWNER)
        world.turn(OWNER, after=0.5)
    assert world.api.lists("Service") <= BURST + 50 / BURST_SECONDS
    world.api.delete(world.service("s0"))
    for _ in range(12):
        world.see(OWNER)
        world.turn(OWNER, after=0.5)
    assert world.ips()["s4"] == "192.0.2.200"


@pytest.mark.parametrize("pools", ["192.0.2.200", "192.0.2.200 fd00::/120@team=a"])
def test_who_has_what_it_may_have_costs_no_list(
    api: FakeApiServer, tmp_path: Path, pools: str
) -> None:
    """Neither Services that share an address, nor one whose other family only another namespace's
    pool has, make any agent list all Services again and again.
    """
    world = World(api, tmp_path, parse_pools(pools.split()))
    world.namespace("default", team="b")
    for number in range(2):
        ports, families = [{"port": number + 1}], ["IPv4", "IPv6"]
        made = world.service(f"s{number}", ports=ports, ipFamilies=families)
        made["metadata"]["annotations"] = {objects.SHARING[0]: "one"}
        api.put(made)
    world.see()
    world.turn()
    world.see()
    assert world.ips() == dict.fromkeys(("s0", "s1"), "192.0.2.200")
    for _ in range(20):
        world.turn(after=2 * STAND_IN)
    assert api.lists("Service") <= 2 * len(NODES)


def test_a_status_that_cannot_be_written(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again later and later, while others get their addresses as ever."""
    write, tried = balanced_services.write, list[float]()

    def refuse(server: Any, key: Key, *about: Any) -> None:
        if key.name == "bad":
            tried.append(world.now)
            raise decoding.RequestRejected("409 Conflict")
        write(server, key, *about)

    monkeypatch.setattr(balanced_services, "write", refuse)
    world.service("bad")
    world.see()
    for _ in range(600):
        world.turn(OWNER, after=1)
    assert len(tried) < 40
    assert list(world.status(OWNER)) == ["default/bad"]
    world.service("web")
    world.see()
    world.turn(OWNER)
    assert world.ips()["web"] == "192.0.2.201"


def test_other_classes_keep_their_addresses(world: World) -> None:
    """An address of the pool that another controller's Service has is given to nobody."""
    world.service("theirs", "192.0.2.200", loadBalancerClass="metallb.io/l2")
    world.service("web")
    world.see()
    world.turn(OWNER)
    assert world.ips() == {"theirs": "192.0.2.200", "web": "192.0.2.201"}


def test_the_api_server_is_away(world: World) -> None:
    """Nothing is taken from anybody; status says why, and later the address comes."""
    world.service("has", "192.0.2.201")
    world.service("web")
    world.see()
    world.api.fail("Service", 500, b"{}")
    world.turn(OWNER)
    assert world.status(OWNER)["the API server"].startswith("500")
    world.turn(OWNER, after=1)
    world.see()
    assert world.ips() == {"has": "192.0.2.201", "web": "192.0.2.200"}
    assert world.status(OWNER) == {}


def test_a_pool_for_namespaces_with_a_label(api: FakeApiServer, tmp_path: Path) -> None:
    """Only their Services get its addresses, whoever writes."""
    world = World(api, tmp_path, parse_pools(["192.0.2.200-192.0.2.203@team=a"]))
    world.namespace("shop", team="a")
    world.namespace("evil", team="b")
    world.service("web", namespace="shop")
    world.service("web", "192.0.2.201", namespace="evil")
    world.see()
    world.turn(SECOND, after=STAND_IN)
    assert (world.ips("shop"), world.ips("evil")) == ({"web": "192.0.2.200"}, {"web": ""})
    assert "evil/web" in world.status(SECOND)


def test_without_pools_nothing_runs(api: FakeApiServer, tmp_path: Path) -> None:
    """With the option unset there is no thread, no field of the status, and no request."""
    world = World(api, tmp_path, ())
    world.service("web")
    world.see()
    agent = world.agents[OWNER]
    agent.start()
    assert (agent.thread.is_alive(), agent.status(), api.requests) == (False, {}, [])
