# SPDX-License-Identifier: Apache-2.0
"""Clients in a container that sees no other processes, like the agent's own pod."""

import os
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest

from ebpflb.cli.monitor import narrow_row
from ebpflb.errors import NodeError
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.node import namespaces
from ebpflb.lab.netns import NETNS, Namespace, ip
from ebpflb.tools import events
from ebpflb.tools.events import EventNames, Told
from ebpflb.tools.explain.asking import MapFacts, find_client

PODS = {f"ebpflb-test-{os.getpid()}-pid{number}": f"10.244.7.{number}" for number in (1, 2)}


@pytest.fixture(autouse=True)
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run where /proc shows none of the pods' processes."""
    monkeypatch.setattr(namespaces, "PROCESSES", tmp_path)
    monkeypatch.setattr(namespaces, "sees_the_machine", lambda: False)


@pytest.fixture
def pods() -> Iterator[dict[str, str]]:
    """Make network namespaces with names like those from container runtimes, and an address."""
    for name, address in PODS.items():
        Namespace(name).create()
        Namespace(name).ip(f"address add {address} dev lo")
    yield PODS
    for name in PODS:
        ip("netns", "delete", name)


def test_monitor_names_the_addresses_of_new_pods_at_once(
    maps: dict[str, Map], pods: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second new pod is named at once too: searches of all namespaces are rare, but complete."""
    monkeypatch.setattr(events, "SEARCH_SECONDS", 1000.0)
    names = EventNames(maps)
    for name, address in pods.items():
        cookie = namespaces.cookie(NETNS / name)
        assert cookie is not None
        assert names.place(cookie, 4711).addresses == (ip_address(address),)


def test_an_address_says_more_than_a_number() -> None:
    """The process is shown only if nothing else is known about the client."""
    words = dict.fromkeys(["time", "hook", "verdict", "protocol", "pod", "service", "frontend"], "")
    words |= dict.fromkeys(["backend", "backend_pod", "device"], "")
    told = Told(**words, process="curl", pid=4711, client="10.244.7.1", ns=1)
    assert narrow_row(told)["from"] == "10.244.7.1"
    told.client = ""
    assert narrow_row(told)["from"] == "curl/4711"


def test_explain_asks_for_a_pods_address(maps: dict[str, Map], pods: dict[str, str]) -> None:
    """`explain` finds a pod by its address, and an endpoint also by its name."""
    facts = MapFacts(maps, Path("/"), frozenset(), socket_hooks=True)
    with pytest.raises(NodeError, match=r"name the pod's address, as `kubectl get pod -o wide`"):
        find_client("shop/web-0", 4, facts)
    (name, address), *_ = pods.items()
    found = find_client(address, 4, facts)
    assert (str(found.address), found.netns) == (address, namespaces.cookie(NETNS / name))
