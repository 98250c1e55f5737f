# SPDX-License-Identifier: Apache-2.0
"""Where to listen: HOST:PORT as the file and the flags have it (kube-proxy.md 13, 15)."""

from collections.abc import Mapping, Set

from ebpflb.configuration.fields import (
    HEALTHZ_PORT,
    METRICS_PORT,
    KubeProxyConfiguration,
    replaced,
    value_at,
)
from ebpflb.model.addresses import Address, parse_address

_PORTS = range(1, 1 << 16)

# What is listened at if bindAddress is of the family, and on which port.
_DEFAULTS = {
    "healthzBindAddress": ("0.0.0.0", "::", HEALTHZ_PORT),
    "metricsBindAddress": ("127.0.0.1", "::1", METRICS_PORT),
}
PATHS = tuple(_DEFAULTS)


def complete(
    found: KubeProxyConfiguration, said: Set[str], ports: Mapping[str, int] | None = None
) -> KubeProxyConfiguration:
    """Those of the two addresses that are ``said``, by their paths, get a port if they lack one:
    of ``ports``, or the usual one. The others are of the family of bindAddress.
    """
    six = _is_v6(found.bind_address)
    for path, (v4, v6, port) in _DEFAULTS.items():
        given = value_at(found, path) if path in said else v6 if six else v4
        found = replaced(found, path, with_port(given, (ports or {}).get(path) or port))
    return found


def with_port(text: str, port: int) -> str:
    """An address alone gets the port; anything else is left as it is."""
    try:
        address = parse_address(text)
    except ValueError:
        return text
    return f"[{text}]:{port}" if address.version == 6 else f"{text}:{port}"


def parse(text: str) -> tuple[Address, int]:
    """Raises ValueError, fit to be shown, for anything but ADDRESS:PORT or [ADDRESS]:PORT."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon:
        raise ValueError(f'"{text}" is not ADDRESS:PORT')
    if not (port.isascii() and port.isdigit() and int(port) in _PORTS):
        raise ValueError(f'"{port}" is no port')
    return parse_address(host), int(port)


def _is_v6(text: str) -> bool:
    try:
        return parse_address(text).version == 6
    except ValueError:
        return False
