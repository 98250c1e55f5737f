# SPDX-License-Identifier: Apache-2.0
"""A backend that is its own client sees this node; otherwise its replies would not pass here."""

from typing import Any

import pytest

from tests.packet.frames import at, ends, host_of, source
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import KINDS, exchange, serve


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["", "local"])
@pytest.mark.parametrize("words", ["detect_local", "guard_nodeports", "masquerade_all"])
def test_a_pod_reaches_itself(
    node: PacketNode, places: Places, kind: str, policy: str, words: str
) -> None:
    """A pod reaches itself through any frontend, with any policy and settings."""
    node.settings(words)
    backend, client = at(places.here, 8080), at(places.here, 50123)
    lists: dict[str, Any] = {"cluster": [backend], "local": [backend], "here": [backend]}
    where = serve(node, places, kind, "tcp", *policy.split(), **lists)
    asked = exchange(node, "tcp", client, where, "pods", "pods")
    assert host_of(source(asked)) == places.bridge
    assert ends(asked).endswith(f" > {backend}")


def test_same_port(node: PacketNode, places: Places, protocol: str) -> None:
    """A pod reaches itself even if its source port is the port that it serves."""
    backend = at(places.here, 8080)
    where = serve(node, places, "cluster", protocol, cluster=[backend], here=[backend])
    asked = exchange(node, protocol, backend, where, "pods", "pods")
    assert host_of(source(asked)) == places.bridge
