# SPDX-License-Identifier: Apache-2.0
"""Which addresses a Service stands for as a whole: for pings and unknown ports (docs/vips.md)."""

from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from ebpflb.model import services
from ebpflb.model.services import WholeAddresses
from ebpflb.options import UNKNOWN_PORTS, UNKNOWN_ROUTED, Options
from tests.model import builders

BALANCED = {4: "203.0.113.9", 6: "fd03::9"}
EXTERNAL = {4: "198.51.100.7", 6: "fd02::7"}
CLUSTER = {4: "172.30.0.41", 6: "fd00:30::41"}


@pytest.mark.parametrize(
    ("which", "kinds"),
    [(WholeAddresses.ALL, (EXTERNAL, BALANCED, CLUSTER)), (WholeAddresses.BALANCED, (BALANCED,))],
)
def test_the_first_port_of_each_family_stands_for_them(which: WholeAddresses, kinds: Any) -> None:
    """One is enough, however many ports the Service has."""
    service = builders.dual_stack(
        type="LoadBalancer",
        ports=[{"name": name, "port": port} for name, port in (("b", 81), ("a", 80))],
        externalIPs=list(EXTERNAL.values()),
        ingress=[{"ip": ip} for ip in BALANCED.values()],
    )
    ports = services.with_whole_addresses(services.parse(service).ports, which)
    found = {(it.name.port, int(it.name.family)): it.whole_addresses for it in ports}
    for family in (4, 6):
        wanted = tuple(ip_address(kind[family]) for kind in kinds)
        assert found["b", family] == wanted
        assert found["a", family] == ()


def options_with(**options: Any) -> Options:
    return Options(None, "node-1", Path(), **options)  # type: ignore[arg-type]


def test_only_the_options_ask_for_them() -> None:
    """Without them no frontend is added to the maps."""
    assert options_with().admission.whole_addresses is WholeAddresses.NONE
    for word in UNKNOWN_PORTS:
        options = options_with(unknown_ports=word)
        none = word == UNKNOWN_ROUTED
        wanted = WholeAddresses.NONE if none else WholeAddresses.BALANCED
        assert options.admission.whole_addresses is wanted
        assert ("unknown_ports" in options.map_settings.flags) is not none
        both = options_with(unknown_ports=word, answer_pings=True)
        assert both.admission.whole_addresses is WholeAddresses.ALL
        assert "answer_pings" in both.map_settings.flags
