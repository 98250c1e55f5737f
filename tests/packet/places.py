# SPDX-License-Identifier: Apache-2.0
"""The addresses in these tests, for each family."""

from typing import NamedTuple

import pytest


class Places(NamedTuple):
    """Hosts by their addresses; ``here`` and ``there`` are backends, one on this node."""

    client: str
    other_client: str
    router: str
    node: str
    bridge: str
    other_node: str
    pod: str
    remote_pod: str
    here: str
    there: str
    elsewhere: str
    cluster_ip: str
    unallocated: str
    balancer: str
    external: str
    any: str
    service_range: str
    clients: str
    pods: str

    @property
    def version(self) -> int:
        return 6 if ":" in self.node else 4


V4 = Places(
    client="198.51.100.7",
    other_client="198.51.101.8",
    router="192.0.2.254",
    node="192.0.2.1",
    bridge="10.244.1.1",
    other_node="192.0.2.2",
    pod="10.244.1.10",
    remote_pod="10.244.2.10",
    here="10.244.1.20",
    there="10.244.2.20",
    elsewhere="10.244.3.20",
    cluster_ip="172.30.0.10",
    unallocated="172.30.7.7",
    balancer="203.0.113.10",
    external="203.0.113.20",
    any="0.0.0.0",
    service_range="172.30.0.0/16",
    clients="198.51.100.0/24",
    pods="10.244.0.0/16",
)
V6 = Places(
    client="2001:db8:c::7",
    other_client="2001:db8:d::8",
    router="2001:db8:1::fe",
    node="2001:db8:1::1",
    bridge="fd00:244:1::1",
    other_node="2001:db8:1::2",
    pod="fd00:244:1::10",
    remote_pod="fd00:244:2::10",
    here="fd00:244:1::20",
    there="fd00:244:2::20",
    elsewhere="fd00:244:3::20",
    cluster_ip="fd00:30::10",
    unallocated="fd00:30::707",
    balancer="2001:db8:113::10",
    external="2001:db8:113::20",
    any="::",
    service_range="fd00:30::/112",
    clients="2001:db8:c::/48",
    pods="fd00:244::/32",
)
IPV4 = pytest.mark.parametrize("places", [V4], indirect=True, ids=["v4"])  # of one family alone
IPV6 = pytest.mark.parametrize("places", [V6], indirect=True, ids=["v6"])
