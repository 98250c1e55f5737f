# SPDX-License-Identifier: Apache-2.0
"""Whether a service is up, as Kubernetes' e2e tests mean it (kube-proxy.md 18)."""

import pytest

from ebpflb.lab.sockets import Sockets
from tests.network import asking
from tests.network.asking import Ask
from tests.network.cluster import VIP


def up(sockets: Sockets, *pods: str, host: str = VIP, port: int = 80) -> None:
    """These endpoints answer, and no others."""
    assert asking.names(sockets, host, port=port).keys() == set(pods)


def down(sockets: Sockets, host: str = VIP, port: int = 80, ask: Ask = asking.tcp) -> None:
    """Whoever asks is refused: the e2e tests take nothing else for "down"."""
    with pytest.raises(ConnectionRefusedError):
        ask(sockets, host, port)


def reaches(sockets: Sockets, host: str, port: int) -> bool:
    with asking.stream(sockets, host) as client:
        client.settimeout(2)
        try:
            client.connect((host, port))
        except OSError:
            return False
        return True
