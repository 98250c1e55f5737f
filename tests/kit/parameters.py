# SPDX-License-Identifier: Apache-2.0
"""Parameters of many tests: families, protocols, and the engine of the fixture ``two``."""

import pytest

from ebpflb.model.packet_path import Engine
from tests.kit import requests
from tests.kit.two_nodes import ENGINES

families = pytest.mark.parametrize("v6", [False, True], ids=["v4", "v6"])
protocols = pytest.mark.parametrize("send", [requests.tcp, requests.udp])
connecting = pytest.mark.parametrize("send", [requests.tcp, requests.connected_udp])
every_kind = pytest.mark.parametrize("send", requests.KINDS.values(), ids=requests.KINDS)

both_engines = pytest.mark.parametrize("two", ENGINES, indirect=True)
flow_tables = pytest.mark.parametrize("two", [Engine.FLOWS], indirect=True)
netfilter = pytest.mark.parametrize("two", [Engine.NETFILTER], indirect=True)

# Clients whose packets are translated, and what each asks.
packet_clients = pytest.mark.parametrize(
    ("who", "kind"), [("unhooked", "cluster"), ("outside", "nodeport")]
)
