# SPDX-License-Identifier: Apache-2.0
"""The addresses that the operator chose: listened on at once, or as soon as they are free."""

import asyncio
import errno
import logging
import os
import socket

from ebpflb.errors import NodeError, in_words
from ebpflb.model.addresses import Family
from ebpflb.serve.listener import Listener, run_beside

log = logging.getLogger(__name__)

LISTEN_RETRY_SECONDS = 5.0  # kube-proxy.md 13.1
BACKLOG = 128

_FAMILIES = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}


def split_host_port(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; an IPv6 host is in brackets. Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. 0.0.0.0 and :: mean both families if the node has both, as in kube-proxy.

    Raises OSError.
    """
    if host in ("", "0.0.0.0", "::"):
        try:
            return _listen("::", port, socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if host == "::" or error.errno != errno.EAFNOSUPPORT:
                raise
    return listen_in_family(host, port, Family.IPV6 if ":" in host else Family.IPV4)


def listen_in_family(host: str, port: int, family: Family) -> socket.socket:
    """A listening socket of this family alone. Raises OSError."""
    return _listen(host, port, _FAMILIES[family])


def _listen(host: str, port: int, family: int, **options: bool) -> socket.socket:
    return socket.create_server((host, port), family=family, backlog=BACKLOG, **options)


def _reason(error: Exception) -> str:
    """The kernel's error; Python adds words of its own, and the address once more."""
    if isinstance(error, OSError) and error.errno and error.errno > 0:
        return os.strerror(error.errno)
    return in_words(error)


def level_of(error: Exception) -> int:
    """Of the log: beside a kube-proxy that is to be replaced its ports are taken, as expected."""
    is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    return logging.WARNING if is_taken else logging.ERROR


class Port:
    """The port of ``address`` (HOST:PORT; there is none if it is empty).

    If it is ``required``, a failure to listen is an error; otherwise it is tried again every
    ``retry`` seconds.
    """

    def __init__(
        self,
        name: str,
        address: str,
        listener: Listener,
        *,
        required: bool = False,
        retry: float = LISTEN_RETRY_SECONDS,
    ) -> None:
        self.name, self.address = name, address
        self._listener, self._required, self._retry = listener, required, retry
        self.error = ""  # why it is not open
        self._retrying: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Raises NodeError with the address and the reason if the port is required."""
        if self.address and not await self._try_open():
            self._retrying = run_beside(self._retry_until_open())

    async def close(self) -> None:
        if self._retrying:
            self._retrying.cancel()
        await self._listener.close()

    async def _try_open(self) -> bool:
        try:
            listening = listen(*split_host_port(self.address))
        except (OSError, ValueError, OverflowError) as error:
            self._fail(_reason(error), level_of(error))
            return False
        await self._listener.open(listening)
        self.error = ""
        log.info("%s on %s", self.name, self.address)
        return True

    async def _retry_until_open(self) -> None:
        while True:
            await asyncio.sleep(self._retry)
            if await self._try_open():
                return

    def _fail(self, reason: str, level: int) -> None:
        if self._required:
            raise NodeError(f"{self.name} cannot listen on {self.address}: {reason}")
        if reason != self.error:
            log.log(
                level,
                "%s on %s: %s; trying again every %g s",
                self.name,
                self.address,
                reason,
                self._retry,
            )
        self.error = reason
