# SPDX-License-Identifier: Apache-2.0
"""A node with the agent's maps, and its sockets."""

import itertools
from ipaddress import IPv4Address, IPv6Address
from socket import htons, ntohs
from typing import Any, NamedTuple

from ebpflb.entries.flows import STREAM_AFTER
from ebpflb.entries.services import Settings
from ebpflb.kernel.maps.layout import VERDICTS
from ebpflb.model.addresses import Address
from tests.native.kernel import Kernel
from tests.publishing import PROTOCOLS, Publisher, frontend, place

STREAM, DATAGRAM = 1, 2
ESTABLISHED, CLOSED = 1, 7
TCP, UDP, SCTP, MPTCP = 6, 17, 132, 262
HOST, POD, OTHER_POD = 0xF00000001, 0xF00000002, 0xF00000003  # cookies have 64 bits
SECOND = 1_000_000_000


class Answer(NamedTuple):
    """The result of a hook: the socket's destination, or its error."""

    allowed: bool
    errno: int
    place: str

    def __str__(self) -> str:
        return self.place if self.allowed else f"errno {self.errno}"


class NativeNode(Publisher):
    """Maps filled as the agent fills them."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel
        self.cookies = itertools.count(1 << 40)
        self.settings("guard_nodeports")

    def settings(self, *flags: str, **fields: Any) -> None:
        made = Settings(HOST, 0, frozenset(flags), stream_after=STREAM_AFTER, **fields)
        self.put("settings", 0, made)

    def put(self, name: str, key: Any, value: Any) -> None:
        self.kernel.put(name, key, value)

    def withdraw(self, service: int, *frontends: str) -> None:
        for text in frontends:
            self.kernel.drop("services", frontend(text))
        self._clear(self.blocks.pop(service))

    def socket(self, protocol: str | int = "tcp", *, netns: int = POD) -> "Socket":
        number = PROTOCOLS.get(protocol, protocol) if isinstance(protocol, str) else protocol
        return Socket(self, int(number), netns, next(self.cookies))

    def counted(self) -> dict[str, int]:
        """Return the verdicts counted so far, without zeros."""
        counts = {word: self.kernel.get("verdicts", n) for n, word in VERDICTS.items()}
        return {word: count for word, count in counts.items() if count}

    def opened_closed(self, service: int, text: str) -> tuple[int, int]:
        return tuple(self.kernel.get("backend_stats", self.backend_id(service, text)))


class Socket:
    """A socket of an application; each method calls the hook of the system call with its name."""

    def __init__(self, node: NativeNode, protocol: int, netns: int, cookie: int) -> None:
        self.kernel = node.kernel
        self.protocol = protocol
        self.type = STREAM if protocol in (TCP, MPTCP, SCTP) else DATAGRAM
        self.netns = netns
        self.cookie = cookie
        self.state = CLOSED

    def connect(self, to: str) -> Answer:
        answer = self._address_hook("connect", to)
        self.state = ESTABLISHED if answer.allowed else self.state
        return answer

    def disconnect(self) -> None:
        """Call connect() with AF_UNSPEC, which no hook sees."""
        self.state = CLOSED

    def sendmsg(self, to: str) -> Answer:
        return self._address_hook("sendmsg", to)

    def getpeername(self, real: str) -> str:
        """Return the peer that the application sees if the kernel knows ``real``."""
        return self._address_hook("getpeername", real).place

    def recvmsg(self, real: str) -> str:
        return self._address_hook("recvmsg", real).place

    def bind(self, at: str) -> Answer:
        address, port = place(at)
        context = self._context("struct bpf_sock *")
        self._put_address(context, "src", address)
        context.src_port = port
        return self._answer(self._run(f"post_bind{address.version}", context), at)

    def release(self) -> None:
        assert self._run("sock_release", self._context("struct bpf_sock *")) == 1

    def _address_hook(self, hook: str, where: str) -> Answer:
        address, port = place(where)
        context = self._context("struct bpf_sock_addr *")
        self._put_address(context, "user", address)
        context.user_port = htons(port)
        itself = self.kernel.ffi.new("struct bpf_sock *", {"state": self.state})
        context.sk = itself
        allowed = self._run(f"{hook}{address.version}", context)
        return self._answer(allowed, self._place_in(context, address.version))

    def _context(self, kind: str) -> Any:
        return self.kernel.ffi.new(kind, {"type": self.type, "protocol": self.protocol})

    def _put_address(self, context: Any, prefix: str, address: Address) -> None:
        words = memoryview(address.packed).cast("I")
        if address.version == 4:
            setattr(context, f"{prefix}_ip4", words[0])
        else:
            setattr(context, f"{prefix}_ip6", list(words))

    def _place_in(self, context: Any, version: int) -> str:
        port = ntohs(context.user_port)
        if version == 4:
            return f"{IPv4Address(context.user_ip4.to_bytes(4, 'little'))}:{port}"
        packed = b"".join(word.to_bytes(4, "little") for word in context.user_ip6)
        mapped = IPv6Address(packed).ipv4_mapped
        return f"[::ffff:{mapped}]:{port}" if mapped else f"[{IPv6Address(packed)}]:{port}"

    def _run(self, hook: str, context: Any) -> int:
        return self.kernel.run(hook, context, netns=self.netns, cookie=self.cookie)

    def _answer(self, allowed: int, where: str) -> Answer:
        assert allowed in (0, 1)
        return Answer(bool(allowed), -self.kernel.retval, where)
