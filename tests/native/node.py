# SPDX-License-Identifier: Apache-2.0
"""A node as the agent would leave it, and the sockets on it.

Everything is spelled as people say it: a frontend is "172.30.0.1:80/udp" (a NodePort
"0.0.0.0:30080"), a backend "10.1.0.1:8080", flags are words.
"""

import itertools
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from socket import htons, ntohs
from typing import Any, NamedTuple

from ebpflb.datapath.layout import VERDICTS
from ebpflb.model.addresses import Address
from ebpflb.plan.entries import Backend, Frontend, Range, Service, Settings
from tests.native.kernel import Kernel

STREAM, DATAGRAM = 1, 2
TCP, UDP, SCTP, MPTCP = 6, 17, 132, 262
PROTOCOLS = {"tcp": TCP, "udp": UDP, "sctp": SCTP}
HOST, POD, OTHER_POD = 0xF00000001, 0xF00000002, 0xF00000003  # cookies have 64 bits
SECOND = 1_000_000_000


def place(text: str) -> tuple[Address, int]:
    """The address and port of "10.1.0.1:8080" or "[fd00::1]:8080"."""
    host, _, port = text.rpartition(":")
    return ip_address(host.strip("[]")), int(port)


def frontend(text: str) -> Frontend:
    where, _, protocol = text.partition("/")
    return Frontend(*place(where), PROTOCOLS[protocol or "tcp"])


class Answer(NamedTuple):
    """What a hook lets happen: where the socket goes, or which error it gets."""

    allowed: bool
    errno: int
    place: str

    def __str__(self) -> str:
        return self.place if self.allowed else f"errno {self.errno}"


class Node:
    """Maps filled as the agent fills them."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.ids: dict[tuple[int, str], int] = {}
        self.blocks: dict[int, Range] = {}
        self.next_slot = 0
        self.cookies = itertools.count(1 << 40)
        kernel.put("settings", 0, Settings(HOST, 0, frozenset({"guard_nodeports"})))

    def owns(self, *addresses: str) -> None:
        """Addresses of this node that serve NodePorts."""
        for address in addresses:
            self.kernel.put("node_addresses", ip_address(address), 1)

    def publish(
        self,
        service: int,
        frontends: Mapping[str, str] | Sequence[str],
        *,
        cluster: Sequence[str] = (),
        local: Sequence[str] = (),
        leaving: Sequence[str] = (),
        affinity: int = 0,
    ) -> None:
        """A service, or what became of it: a new block, then its frontends, then the old block.

        ``leaving`` backends are in no list and serve the flows they have.
        """
        block = self._fill_block(service, cluster, local, leaving)
        in_cluster = Range(block.base, len(cluster))
        in_local = Range(block.base + len([b for b in cluster if b not in local]), len(local))
        flags = frontends if isinstance(frontends, Mapping) else dict.fromkeys(frontends, "")
        some = {"endpoints"} if cluster or local else set()
        for text, words in flags.items():
            kinds = frozenset(words.split()) | some
            at = frontend(text)
            entry = Service(at, service, kinds, affinity, block.size, in_cluster, in_local)
            self.kernel.put("services", at, entry)
        self._clear(self.blocks.get(service, Range(0, 0)))
        self.blocks[service] = block

    def withdraw(self, service: int, *frontends: str) -> None:
        for text in frontends:
            self.kernel.drop("services", frontend(text))
        self._clear(self.blocks.pop(service))

    def backend_id(self, service: int, text: str) -> int:
        """A backend keeps its id as long as the test runs."""
        return self.ids.setdefault((service, text), len(self.ids) + 1)

    def socket(self, protocol: str | int = "tcp", *, netns: int = POD) -> "Socket":
        number = PROTOCOLS.get(protocol, protocol) if isinstance(protocol, str) else protocol
        return Socket(self, int(number), netns, next(self.cookies))

    def counted(self) -> dict[str, int]:
        """The verdicts so far, those that happened."""
        counts = {word: self.kernel.get("verdicts", n) for n, word in VERDICTS.items()}
        return {word: count for word, count in counts.items() if count}

    def opened_closed(self, service: int, text: str) -> tuple[int, int]:
        return tuple(self.kernel.get("backend_stats", self.backend_id(service, text)))

    def _fill_block(
        self, service: int, cluster: Sequence[str], local: Sequence[str], leaving: Sequence[str]
    ) -> Range:
        both = [b for b in cluster if b in local]
        order = [b for b in cluster if b not in local] + both
        order += [b for b in local if b not in cluster] + list(leaving)
        base, self.next_slot = self.next_slot, self.next_slot + len(order)
        for slot, text in enumerate(order, base):
            lists = {"cluster": cluster, "local": local}
            flags = frozenset(word for word, members in lists.items() if text in members)
            number = self.backend_id(service, text)
            self.kernel.put("slots", slot, Backend(*place(text), flags, number, service))
            self.kernel.put("members", number, slot)
        return Range(base, len(order))

    def _clear(self, block: Range) -> None:
        for slot in range(block.base, block.base + block.size):
            self.kernel.tables["slots"].update(slot.to_bytes(4, "little"), bytes(32))


class Socket:
    """A socket of an application; each method is the system call's hook."""

    def __init__(self, node: Node, protocol: int, netns: int, cookie: int) -> None:
        self.kernel = node.kernel
        self.protocol = protocol
        self.type = STREAM if protocol in (TCP, MPTCP, SCTP) else DATAGRAM
        self.netns = netns
        self.cookie = cookie

    def connect(self, to: str) -> Answer:
        return self._address_hook("connect", to)

    def sendmsg(self, to: str) -> Answer:
        return self._address_hook("sendmsg", to)

    def getpeername(self, real: str) -> str:
        """What the application sees where the kernel knows ``real``."""
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
