# SPDX-License-Identifier: Apache-2.0
"""Whether a service is up, as Kubernetes' e2e tests mean it (kube-proxy.md 18)."""

import pytest

from ebpflb.lab.sockets import CALL_SECONDS, Sockets
from tests.kit import requests
from tests.kit.cluster import VIP
from tests.kit.requests import Send


def up(sockets: Sockets, *pods: str, host: str = VIP, port: int = 80) -> None:
    """These endpoints answer, and no others."""
    assert requests.backends(sockets, host, port=port).keys() == set(pods)


def down(sockets: Sockets, host: str = VIP, port: int = 80, send: Send = requests.tcp) -> None:
    """Every request is refused: the e2e tests accept nothing else as "down"."""
    with pytest.raises(ConnectionRefusedError):
        send(sockets, host, port)


def reaches(sockets: Sockets, host: str, port: int, *, is_up: bool = True) -> bool:
    """Whether a connection comes about; only one that ``is_up`` is waited for long."""
    with requests.tcp_socket(sockets, host) as client:
        client.settimeout(CALL_SECONDS if is_up else 2.0)
        try:
            client.connect((host, port))
        except OSError:
            return False
        return True
