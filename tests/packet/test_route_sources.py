# SPDX-License-Identifier: Apache-2.0
"""A masqueraded flow gets the source that the kernel's route to the backend would choose.

On kernels that programs cannot ask (before 6.7) the flow gets the device's own address.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ebpflb.kernel import probe
from ebpflb.kernel.programs.loader import run_program
from tests.packet.frames import at, destination, forwarded, host_of, opening, source
from tests.packet.node import Outcome, PacketNode
from tests.packet.places import IPV4, Places
from tests.packet.services import exchange, serve

OTHER = {4: "192.0.2.77", 6: "2001:db8:77::77"}


@contextmanager
def configured(*lines: str) -> Iterator[None]:
    """Run commands of ip(8) that add objects; remove these objects at the end."""
    done = []
    try:
        for line in lines:
            subprocess.run(["ip", *line.split()], check=True)
            done.append(line)
        yield
    finally:
        for line in reversed(done):
            removal = line.replace(" add ", " del ").removesuffix(" nodad")
            subprocess.run(["ip", *removal.split()], check=True)


def second_address(places: Places) -> str:
    other = OTHER[places.version]
    return f"address add {other}/{32 if places.version == 4 else '128'} dev uplink" + (
        " nodad" if places.version == 6 else ""
    )


def route(places: Places, backend: str) -> str:
    length = 32 if places.version == 4 else 128
    return f"route add {backend}/{length} via {places.router} src {OTHER[places.version]}"


asks = pytest.mark.skipif(not probe.route_source(), reason="no program can ask this kernel")


@asks
def test_source_of_the_route(node: PacketNode, places: Places, protocol: str) -> None:
    """The route's source (``src``) is used, not the device's first address; replies return."""
    other = OTHER[places.version]
    where = serve(node, places, "nodeport", protocol, cluster=[at(places.there, 8080)])
    client = at(places.client, 50123)
    with configured(second_address(places), route(places, places.there)):
        request = exchange(node, protocol, client, where)
        assert host_of(source(request)) == other


@asks
def test_source_by_mark(node: PacketNode, places: Places, protocol: str) -> None:
    """A rule for the packet's mark selects the route whose source is used (Linux 6.10)."""
    other, family = OTHER[places.version], f"-{places.version}"
    where = serve(node, places, "nodeport", protocol, cluster=[at(places.there, 8080)])
    marked = f"{family} route add default via {places.router} src {other} table 7"
    with configured(second_address(places), marked, f"{family} rule add fwmark 7 lookup 7"):
        came = node.ingress(opening(protocol, at(places.client, 50123), where))
        uplink, frame = node.devices["uplink"], bytes(forwarded(came.packet))
        sent = run_program(
            node.hooks["egress"], frame, ifindex=uplink, ingress_ifindex=uplink, mark=7
        )
        assert host_of(source(Outcome("pass", sent.packet, {}).packet)) == other


@IPV4
def test_first_address_elsewhere(node: PacketNode, places: Places, protocol: str) -> None:
    """Flows to destinations beyond another route of the device get the device's address."""
    where = serve(node, places, "nodeport", protocol, cluster=[at(places.elsewhere, 8080)])
    with configured(second_address(places), route(places, places.there)):
        request = exchange(node, protocol, at(places.client, 50123), where)
        assert host_of(source(request)) == places.node


def test_no_route(node: PacketNode, places: Places) -> None:
    """If the kernel knows no route by this device, the device's address in map `devices` is
    used.
    """
    length = 32 if places.version == 4 else 128
    where = serve(node, places, "nodeport", cluster=[at(places.there, 8080)])
    node.device("tunnel", *(places.node, "::") if places.version == 4 else ("0.0.0.0", places.node))
    with configured(f"route add unreachable {places.there}/{length} metric 5"):
        left = node.through(opening("tcp", at(places.client, 50123), where), out="tunnel")
    assert host_of(source(left)) == places.node


def test_device_without_address(node: PacketNode, places: Places, protocol: str) -> None:
    """A flow that must be masqueraded is dropped at a device that has no address for it."""
    where = serve(node, places, "nodeport", protocol, cluster=[at(places.there, 8080)])
    came = node.ingress(opening(protocol, at(places.client, 50123), where))
    left = node.egress(came.packet, "tunnel")
    assert (left.action, left.verdicts) == ("drop", {"ports_exhausted": 1})
    assert destination(node.egress(came.packet, "uplink").packet) == at(places.there, 8080)
