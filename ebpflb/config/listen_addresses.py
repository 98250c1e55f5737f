# SPDX-License-Identifier: Apache-2.0
"""healthzBindAddress and metricsBindAddress: ADDRESS:PORT (kube-proxy.md 13, 15)."""

from collections.abc import Mapping, Set

from ebpflb.config.fields import (
    HEALTHZ_PORT,
    METRICS_PORT,
    KubeProxyConfiguration,
    replace_at,
    value_at,
)
from ebpflb.model.addresses import Address, parse_address

_PORTS = range(1, 1 << 16)


# By path: the default address if bindAddress is IPv4, if it is IPv6, and the default port.
_DEFAULTS = {
    "healthzBindAddress": ("0.0.0.0", "::", HEALTHZ_PORT),
    "metricsBindAddress": ("127.0.0.1", "::1", METRICS_PORT),
}


LISTEN_FIELDS = tuple(_DEFAULTS)


def complete_listen_address(
    config: KubeProxyConfiguration, explicit: Set[str], ports: Mapping[str, int] | None = None
) -> KubeProxyConfiguration:
    """Complete both addresses.

    ``explicit``: the paths that the operator has set; the others get the default of bindAddress's
    family. ``ports``: by path, the port for an address without one, instead of the default port.
    """
    ipv6 = _is_ipv6(config.bind_address)
    for path, (v4, v6, port) in _DEFAULTS.items():
        address = value_at(config, path) if path in explicit else v6 if ipv6 else v4
        port = (ports or {}).get(path) or port
        config = replace_at(config, path, with_port(address, port))
    return config


def with_port(text: str, port: int) -> str:
    """Add the port to an address without one; other text is returned unchanged."""
    try:
        address = parse_address(text)
    except ValueError:
        return text
    return f"[{text}]:{port}" if address.version == 6 else f"{text}:{port}"


def parse_listen_address(text: str) -> tuple[Address, int]:
    """Parse ADDRESS:PORT or [ADDRESS]:PORT. Raises ValueError, with a message for the operator."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon:
        raise ValueError(f'"{text}" is not ADDRESS:PORT such as 0.0.0.0:10256')
    if not (port.isascii() and port.isdigit() and int(port) in _PORTS):
        raise ValueError(f'"{port}" is not a port from {_PORTS[0]} to {_PORTS[-1]}')
    return parse_address(host), int(port)


def _is_ipv6(text: str) -> bool:
    try:
        return parse_address(text).version == 6
    except ValueError:
        return False
