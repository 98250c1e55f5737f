# SPDX-License-Identifier: Apache-2.0
"""The ports of an address that an operator chose: opened at once, or as soon as it is free."""

import asyncio
import errno
import logging
import socket

from ebpflb.errors import NodeError
from ebpflb.model.addresses import Family
from ebpflb.serve.listener import Listener

log = logging.getLogger(__name__)

LISTEN_RETRY_SECONDS = 5.0  # kube-proxy.md 13.1
BACKLOG = 128

_FAMILIES = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}


def split(address: str) -> tuple[str, int]:
    """HOST:PORT, where an IPv6 host is in brackets. Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def listening(host: str, port: int) -> socket.socket:
    """Raises OSError. 0.0.0.0 and [::] are both families, as for kube-proxy, if both exist."""
    if host in ("", "0.0.0.0", "::"):
        try:
            return _listening("::", port, socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if host == "::" or error.errno != errno.EAFNOSUPPORT:
                raise
    return listening_alone(host, port, Family.IPV6 if ":" in host else Family.IPV4)


def listening_alone(host: str, port: int, family: Family) -> socket.socket:
    """In this family and no other. Raises OSError."""
    return _listening(host, port, _FAMILIES[family])


def _listening(host: str, port: int, family: int, **options: bool) -> socket.socket:
    return socket.create_server((host, port), family=family, backlog=BACKLOG, **options)


class Port:
    """``address`` is HOST:PORT; with "" there is no such port.

    Where it ``must`` be had, failing to get it is an error; otherwise it is tried again every
    ``retry`` seconds.
    """

    def __init__(
        self,
        name: str,
        address: str,
        listener: Listener,
        *,
        must: bool = False,
        retry: float = LISTEN_RETRY_SECONDS,
    ) -> None:
        self.name, self.address = name, address
        self._listener, self._must, self._retry = listener, must, retry
        self._said = ""
        self._trying: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Raises NodeError, naming the address and the reason, where the port must be had."""
        if self.address and not await self._attempt():
            self._trying = asyncio.create_task(self._keep_trying())

    async def close(self) -> None:
        if self._trying:
            self._trying.cancel()
        await self._listener.close()

    async def _attempt(self) -> bool:
        try:
            found = listening(*split(self.address))
        except (OSError, ValueError, OverflowError) as error:
            self._fail(getattr(error, "strerror", None) or str(error))
            return False
        await self._listener.open(found)
        log.info("%s on %s", self.name, self.address)
        return True

    async def _keep_trying(self) -> None:
        while True:
            await asyncio.sleep(self._retry)
            if await self._attempt():
                return

    def _fail(self, reason: str) -> None:
        if self._must:
            raise NodeError(f"{self.name} cannot listen on {self.address}: {reason}")
        if reason != self._said:
            log.error(
                "%s on %s: %s; trying again every %g s",
                self.name,
                self.address,
                reason,
                self._retry,
            )
        self._said = reason
