# SPDX-License-Identifier: Apache-2.0
"""What becomes of connections that sockets hold when their endpoint goes: on-removal."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pytest import MonkeyPatch

from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from ebpflb.lab.sockets import Sockets
from ebpflb.node import sock_diag
from tests.kit.cluster import NODEPORT, PORT, TARGET, VIP, VIP6, Cluster, endpoint
from tests.kit.on_removal import (
    LATE,
    SHORT,
    SOON,
    connected,
    is_reset,
    lives,
    one_each,
    saying,
)
from tests.kit.stale_udp import dual_stack_web

pytestmark = pytest.mark.skipif(
    not sock_diag.can_destroy_tcp(), reason="this kernel ends no sockets"
)

OTHER = "10.96.0.11"

families = pytest.mark.parametrize("vip", [VIP, VIP6, f"::ffff:{VIP}"], ids=["v4", "v6", "mapped"])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@families
def test_reset_ends_the_connections_of_an_endpoint_that_goes(
    cluster: Cluster, sockets: Sockets, stack: ExitStack, vip: str
) -> None:
    """Of clients that only wait, too; others live: to other endpoints, and to the pod itself."""
    one, other, _ = cluster.web
    cluster.publish(saying(dual_stack_web(one, other), SOON))
    pair = one.name, other.name
    found = one_each(stack, lambda: connected(sockets, vip, PORT), *pair)
    address = one.v6 if vip == VIP6 else one.v4
    direct, _ = connected(sockets, address, TARGET)
    stack.enter_context(direct)
    cluster.publish(saying(dual_stack_web(other), SOON))
    assert is_reset(found[one.name])
    assert lives(found[other.name])
    assert lives(direct)


@pytest.mark.parametrize("value", [None, "keep", "drop", LATE])
def test_connections_are_kept_unless_their_grace_is_over(
    cluster: Cluster, pod: Sockets, stack: ExitStack, value: str | None
) -> None:
    """By default, by choice, with a wrong annotation, which is named once, and within the grace.

    Beside them those of a Service that are reset show that the search is over.
    """
    one, other, third = cluster.web
    cluster.publish(saying(dual_stack_web(one, other), value), beside(third))
    found = one_each(stack, lambda: connected(pod, VIP, PORT), one.name)
    client = one_each(stack, lambda: connected(pod, OTHER, PORT), third.name)[third.name]
    cluster.publish(saying(dual_stack_web(other), value), beside(other))
    assert is_reset(client)
    assert lives(found[one.name])
    said = 'metadata.annotations[ebpflb.io/on-removal]: "drop" is not keep, reset or reset=DURATION'
    assert value != "drop" or cluster.agent.log().count(said) == 1


def test_an_endpoint_that_comes_back_within_the_grace_keeps_its_connections(
    cluster: Cluster, pod: Sockets, stack: ExitStack
) -> None:
    """One that goes after it is reset, when the first one's grace would be over too."""
    one, other, third = cluster.web
    cluster.publish(saying(dual_stack_web(one, other, third), SHORT))
    found = one_each(stack, lambda: connected(pod, VIP, PORT), one.name, other.name)
    cluster.publish(saying(dual_stack_web(other, third), SHORT))
    cluster.publish(saying(dual_stack_web(one, other, third), SHORT))
    cluster.publish(saying(dual_stack_web(one, third), SHORT))
    assert is_reset(found[other.name])
    assert lives(found[one.name])


def test_an_endpoint_that_terminates_or_is_not_ready_has_not_gone(
    cluster: Cluster, pod: Sockets, stack: ExitStack
) -> None:
    """It has when its slice lists it no more."""
    one, other, third = cluster.web
    cluster.publish(saying(dual_stack_web(one, other), SOON), beside(third))
    found = one_each(stack, lambda: connected(pod, VIP, PORT), one.name, other.name)
    client = one_each(stack, lambda: connected(pod, OTHER, PORT), third.name)[third.name]
    said = saying(dual_stack_web(one, other), SOON)
    for each in said:
        if each["kind"] == "EndpointSlice":
            states = {"ready": False, "serving": False}
            each["endpoints"][0]["conditions"] = states | {"terminating": True}
            each["endpoints"][1]["conditions"] = states
    cluster.publish(said, beside(other))
    assert is_reset(client)
    assert all(map(lives, found.values()))
    cluster.publish(saying(dual_stack_web(other), SOON))
    assert is_reset(found[one.name])
    assert lives(found[other.name])


@pytest.mark.parametrize("where", [(VIP, PORT), ("127.0.0.1", NODEPORT)], ids=["vip", "nodeport"])
def test_every_frontend_of_a_service_that_is_deleted(
    cluster: Cluster, host: Sockets, stack: ExitStack, where: tuple[str, int]
) -> None:
    """Its endpoints go with it. The same endpoint in another Service keeps its connections."""
    one = cluster.web[0]
    same = another(one)
    cluster.publish(saying(dual_stack_web(one, nodeport=NODEPORT), SOON), same)
    client = one_each(stack, lambda: connected(host, *where), one.name)[one.name]
    other = one_each(stack, lambda: connected(host, OTHER, PORT), one.name)[one.name]
    cluster.publish(same)
    assert is_reset(client)
    assert lives(other)


@pytest.mark.parametrize("deleted", [False, True], ids=["endpoint", "service"])
def test_an_agent_that_is_started_again_gives_the_grace_anew(
    cluster: Cluster, pod: Sockets, stack: ExitStack, deleted: bool, monkeypatch: MonkeyPatch
) -> None:
    """Whether the endpoint or the whole Service went while no agent ran, or within the grace."""
    one, other, _ = cluster.web
    cluster.publish(saying(dual_stack_web(one, other), SHORT))
    found = one_each(stack, lambda: connected(pod, VIP, PORT), one.name, other.name)
    wait_until("the status names it", lambda: '"grace"' in status_of(cluster))
    cluster.agent.stop(signal.SIGKILL)
    cluster.publish([] if deleted else saying(dual_stack_web(other), SHORT))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # start() deletes the former status
        cluster.agent.start()
    assert is_reset(found[one.name])
    assert is_reset(found[other.name]) if deleted else lives(found[other.name])


def test_the_annotation_may_change_within_the_grace(
    cluster: Cluster, pod: Sockets, stack: ExitStack
) -> None:
    """A shorter grace counts from when the endpoint went; one that was kept has it from then on."""
    one, other, third = cluster.web
    cluster.publish(saying(dual_stack_web(one, other, third), None))
    found = one_each(stack, lambda: connected(pod, VIP, PORT), one.name, other.name)
    cluster.publish(saying(dual_stack_web(other, third), None))
    cluster.publish(saying(dual_stack_web(other, third), LATE))
    cluster.publish(saying(dual_stack_web(third), LATE))
    cluster.publish(saying(dual_stack_web(third), SOON))
    assert is_reset(found[one.name])
    assert is_reset(found[other.name])


def test_operators_see_the_setting_the_log_the_counter_and_the_history(
    cluster: Cluster, pod: Sockets, stack: ExitStack
) -> None:
    one, other, _ = cluster.web
    cluster.publish(saying(dual_stack_web(one, other), SOON))
    assert "reset=0s" in said_by(cluster, "services", "get", "default/web")
    line = "reset on removal   default/web:tcp: after 0 s\n"
    wait_until("status has it", lambda: line in said_by(cluster, "status"))
    client = one_each(stack, lambda: connected(pod, VIP, PORT), one.name)[one.name]
    cluster.publish(saying(dual_stack_web(other), SOON))
    assert is_reset(client)
    said = f"default/web:tcp: 1 sockets to {one.v4} port {TARGET} reset"
    wait_until("it is logged", lambda: said in cluster.agent.log())
    event = f"reset: 1 sockets to {one.v4}:{TARGET}"
    wait_until("history has it", lambda: event in said_by(cluster, "history", "-o", "wide"))


def another(*pods: Host) -> list[Manifest]:
    """A Service beside, at OTHER, of IPv4 only."""
    named = [{"name": "tcp", "port": TARGET, "protocol": "TCP"}]
    return [
        manifests.service("other", [OTHER], [{**named[0], "port": PORT}]),
        manifests.endpoint_slice("other", "IPv4", [endpoint(pod) for pod in pods], named),
    ]


def beside(*pods: Host) -> list[Manifest]:
    """The same: when it loses an endpoint, its connections are reset at once."""
    return saying(another(*pods), SOON)


def status_of(cluster: Cluster) -> str:
    return cluster.agent.paths.status_file.read_text()


def said_by(cluster: Cluster, *words: str) -> str:
    command = [sys.executable, "-m", "ebpflb", *words, *cluster.agent.where]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_connections_after_a_return_are_kept_if_the_service_keeps_them_now(
    cluster: Cluster, pod: Sockets, stack: ExitStack
) -> None:
    """Later passes of the search, for what went before, leave them alone."""
    one, other, third = cluster.web
    cluster.publish(saying(dual_stack_web(one, other), SOON), beside(third))
    first = one_each(stack, lambda: connected(pod, VIP, PORT), one.name)[one.name]
    cluster.publish(saying(dual_stack_web(other), SOON), beside(third))
    assert is_reset(first)
    cluster.publish(saying(dual_stack_web(one, other), None), beside(third))
    kept = one_each(stack, lambda: connected(pod, VIP, PORT), one.name)[one.name]
    cluster.publish(saying(dual_stack_web(other), None), beside(third))
    for pods in ((other,), (one,)):  # their last passes come after those for the first one
        client, _ = connected(pod, OTHER, PORT)
        stack.enter_context(client)
        cluster.publish(saying(dual_stack_web(other), None), saying(another(*pods), "reset=4s"))
        assert is_reset(client)
    assert lives(kept)
