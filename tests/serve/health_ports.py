# SPDX-License-Identifier: Apache-2.0
"""Health-check node ports of two Services, and their clients."""

from ebpflb.model.addresses import Family
from ebpflb.model.endpoints import HealthCheck
from ebpflb.model.events import Key
from tests.serve.conftest import Reply, ask

WEB, SHOP = Key("default", "web"), Key("default", "shop")
PORT, OTHER = 32000, 32001
V4, V6 = Family.IPV4, Family.IPV6


def checked(port: int = PORT, v4: int = 1, v6: int | None = None) -> HealthCheck:
    return HealthCheck(port, {V4: v4} | ({} if v6 is None else {V6: v6}))


def refused(port: int = PORT, host: str = "127.0.0.1") -> bool:
    try:
        ask("/", port, host)
    except ConnectionRefusedError:
        return True
    return False


def get(path: str = "/", port: int = PORT, host: str = "127.0.0.1", method: str = "GET") -> Reply:
    return ask(path, port, host, method=method)
