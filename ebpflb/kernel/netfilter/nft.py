# SPDX-License-Identifier: Apache-2.0
"""Tables of nftables in this network namespace, and transactions that change one, by netlink."""

import errno
import os
import socket
import struct
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import NamedTuple, TypeVar

from ebpflb.errors import NodeError, instead_of_os_error
from ebpflb.kernel.netlink import (
    ACK,
    DUMP,
    ERROR,
    NETFILTER,
    REQUEST,
    attributes,
    error_number,
    from_text,
    packed,
    parts,
    split,
    text,
)

# Read an nft table, and change it in transactions: all at once, or not at all.
#
# The layout of messages is that of include/uapi/linux/netfilter/nf_tables.h.


# NFT_MSG_*
NEW_TABLE, GET_TABLE, DELETE_TABLE, NEW_CHAIN, GET_CHAIN, DELETE_CHAIN = 0, 1, 2, 3, 4, 5
NEW_RULE, GET_RULE, DELETE_RULE, NEW_SET, GET_SET, DELETE_SET = 6, 7, 8, 9, 10, 11
NEW_ELEMENTS, GET_ELEMENTS, DELETE_ELEMENTS = 12, 13, 14
GET_GENERATION = 16
NEW_FLOWTABLE, GET_FLOWTABLE = 22, 23

_SUBSYSTEM = 10  # NFNL_SUBSYS_NFTABLES
_BEGIN, _END = 0x10, 0x11  # NFNL_MSG_BATCH_*
_ADD = 0xC00  # NLM_F_CREATE | NLM_F_APPEND
_FAMILY = struct.Struct(">BBH")  # struct nfgenmsg
_BUFFER_SIZE = 1 << 18
_SOCKET_BUFFER = 1 << 22  # a whole set of frontends is one transaction
_SEND_BUFFER, _RECEIVE_BUFFER = 32, 33  # SO_SNDBUFFORCE, SO_RCVBUFFORCE
_SOL_NETLINK, _SHORT_ERRORS = 270, 10  # NETLINK_CAP_ACK: errors do not repeat the request
_MOST_DUMPS = 10  # attempts to read a list without a change meanwhile


TABLE_FAMILIES = {"inet": 1, "ip": 2, "ip6": 10}
_FAMILIES = {**TABLE_FAMILIES, "arp": 3, "netdev": 5, "bridge": 7}


class Name(NamedTuple):
    """The name of a table."""

    family: str
    table: str

    def __str__(self) -> str:
        return f"table {self.family} {self.table}"


class Refused(NodeError):
    """The kernel refused a change; ``number`` is the errno."""

    def __init__(self, table: Name, number: int) -> None:
        self.number, self.reason = number, os.strerror(number)
        super().__init__(f"{table}: {self.reason}")


class Interrupted(Refused):
    """A list was changed while it was read: entries may be missing, or appear twice."""


class Session:
    """A socket for transactions: only this socket can change the tables that it owns.

    Threads can share a session. ``close`` gives up the ownership of tables.
    """

    def __init__(self) -> None:
        """Open the socket. Raises NodeError."""
        with instead_of_os_error("nf_tables"):
            self._socket = open_nf_tables()
        self._lock = threading.Lock()

    def close(self) -> None:
        self._socket.close()

    def send_batch(self, data: bytes, last: int) -> int:
        """Send the messages; return the first refused message's errno, or 0. Raises OSError."""
        with self._lock:
            self._drop_replies()
            self._socket.send(data)
            return _first_refusal(self._socket, last)

    def _drop_replies(self) -> None:
        """Drop the errors of further messages that follow a refusal."""
        try:
            while True:
                self._socket.recv(_BUFFER_SIZE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return


class Transaction:
    """Messages about one table, in the order in which they are added."""

    def __init__(self, table: Name) -> None:
        self._table = table
        self._messages: list[tuple[int, bytes]] = []

    def __bool__(self) -> bool:
        return bool(self._messages)

    def add(self, kind: int, *attributes: bytes) -> None:
        """Add a message; an object that already exists is no error."""
        self._messages.append((kind, b"".join(attributes)))

    def commit(self, session: Session | None = None) -> None:
        """Send the messages, by a new socket unless a session is given.

        Raises Refused, and NodeError if there is no nf_tables.
        """
        family, last = TABLE_FAMILIES[self._table.family], len(self._messages)
        data = [_message(_BEGIN, REQUEST, 0, 0, b"", resource=_SUBSYSTEM)]
        for sequence, (kind, contents) in enumerate(self._messages, start=1):
            flags = REQUEST | _ADD | (ACK if sequence == last else 0)
            data.append(_message(_SUBSYSTEM << 8 | kind, flags, sequence, family, contents))
        data.append(_message(_END, REQUEST, last + 1, 0, b"", resource=_SUBSYSTEM))
        try:
            if session:
                refusal = session.send_batch(b"".join(data), last)
            else:
                with closing(Session()) as own:
                    refusal = own.send_batch(b"".join(data), last)
        except OSError as error:
            raise Refused(self._table, error.errno or errno.EIO) from error
        if refusal:
            raise Refused(self._table, refusal)


def dump(table: Name, kind: int, *attributes: bytes) -> list[bytes]:
    """Return the attributes of each object that the kernel lists; empty if there is no such table.

    A list that was changed while it was read is read again. Raises Refused; Interrupted if the list
    was changed each time.
    """
    for _ in range(_MOST_DUMPS - 1):
        with suppress(Interrupted):
            return [item for part in dump_parts(table, kind, *attributes) for item in part]
    return [item for part in dump_parts(table, kind, *attributes) for item in part]


def own_elements(table: Name, name: str) -> list[bytes]:
    """Return the messages with a set's elements; the table is one that only ebpflb changes.

    Transactions about other tables interrupt the list, but leave it complete. Raises Refused.
    """
    messages: list[bytes] = []
    names = text(1, table.table), text(2, name)
    with suppress(Interrupted):
        for part in dump_parts(table, GET_ELEMENTS, *names):
            messages += part
    return messages


def dump_parts(table: Name, kind: int, *attributes: bytes) -> Generator[list[bytes], None, None]:
    """Yield the result of ``dump`` in parts of at most 32 KiB, as the kernel sends them.

    Raises Refused; Interrupted after the last part if anything was changed meanwhile.
    """
    family = _FAMILIES[table.family]
    request = _message(_SUBSYSTEM << 8 | kind, REQUEST | DUMP, 1, family, b"".join(attributes))
    try:
        with open_nf_tables() as kernel:
            kernel.send(request)
            yield from _listed(kernel)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EOPNOTSUPP, errno.EINVAL):
            return
        kind_of_error = Interrupted if error.errno == errno.EINTR else Refused
        raise kind_of_error(table, error.errno or errno.EIO) from error


def get(table: Name, kind: int, requests: Sequence[bytes]) -> list[bytes | None]:
    """Return the attributes of each object requested by name; None if it does not exist.

    Raises Refused.
    """
    family = TABLE_FAMILIES[table.family]
    data = (_message(_SUBSYSTEM << 8 | kind, REQUEST, n, family, r) for n, r in enumerate(requests))
    replies: dict[int, bytes | None] = {}
    try:
        with open_nf_tables() as kernel:
            kernel.send(b"".join(data))
            while len(replies) < len(requests):
                received = kernel.recv(_BUFFER_SIZE)
                for answer, _, sequence, begin, end in split(received):
                    is_error = answer == ERROR
                    if is_error and error_number(received, begin) != errno.ENOENT:
                        raise Refused(table, error_number(received, begin))
                    found = received[begin + _FAMILY.size : end]
                    replies[sequence] = None if is_error else found
    except OSError as error:
        raise Refused(table, error.errno or errno.EIO) from error
    return [replies[n] for n in range(len(requests))]


def open_nf_tables() -> socket.socket:
    kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETFILTER)
    for option in (_SEND_BUFFER, _RECEIVE_BUFFER):
        kernel.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)
    kernel.setsockopt(_SOL_NETLINK, _SHORT_ERRORS, 1)
    return kernel


def _message(
    kind: int, flags: int, sequence: int, family: int, attributes: bytes, *, resource: int = 0
) -> bytes:
    return packed(kind, flags, _FAMILY.pack(family, 0, resource) + attributes, sequence)


def _first_refusal(kernel: socket.socket, last: int) -> int:
    """Return the errno of the first refused message; 0 after the last one's acknowledgement.

    Raises OSError.
    """
    while True:
        data = kernel.recv(_BUFFER_SIZE)
        for kind, _, sequence, begin, _ in split(data):
            result = error_number(data, begin) if kind == ERROR else 0
            if result or sequence == last:
                return result


def _listed(kernel: socket.socket) -> Iterator[list[bytes]]:
    """Yield the parts of a list. Raises OSError."""
    generations: set[int] = set()
    for data, places in parts(kernel, _BUFFER_SIZE):
        generations |= {_FAMILY.unpack_from(data, at)[2] for at, _ in places}  # its low half
        yield [data[begin + _FAMILY.size : end] for begin, end in places]
    if len(generations) > 1:
        raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))


# Numbers of attributes: NFTA_TABLE_NAME, NFTA_CHAIN_*, NFTA_RULE_*, NFTA_HOOK_*, NFTA_GEN_ID.
_TABLE, _CHAIN_NAME, _CHAIN_HOOK, _RULE_CHAIN, _RULE_HANDLE = 1, 3, 4, 2, 3
_TABLE_FLAGS, _DORMANT = 2, 1  # NFTA_TABLE_FLAGS, NFT_TABLE_F_DORMANT
_HOOK_NUMBER, _HOOK_PRIORITY, _GENERATION = 1, 2, 1
_PREROUTING, _FORWARD = 0, 2  # NF_INET_*
CONNTRACK = -200  # NF_IP_PRI_CONNTRACK
NO_SUCH_THING = {errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT}

_T = TypeVar("_T")


def tables() -> set[Name]:
    """Return the tables of the families ip, ip6 and inet. Raises NodeError."""
    return {
        Name(family, from_text(attributes(table)[_TABLE]))
        for family in TABLE_FAMILIES
        for table in _dump(Name(family, ""), GET_TABLE)
    }


def tables_in_force() -> set[Name]:
    """Return the tables of every family but the dormant ones, whose chains see no packets. Raises
    NodeError.
    """
    return {
        Name(family, from_text(found[_TABLE]))
        for family in _FAMILIES
        for found in map(attributes, _dump(Name(family, ""), GET_TABLE))
        if not int.from_bytes(found.get(_TABLE_FLAGS, b"")) & _DORMANT
    }


def raw_tables() -> set[Name]:
    """Return the tables with a chain in PREROUTING before conntrack. Raises NodeError."""
    return _tables_at(lambda hook, priority: hook == _PREROUTING and priority < CONNTRACK)


def forward_tables() -> set[Name]:
    """Return the tables with a chain in FORWARD. Raises NodeError."""
    return _tables_at(lambda hook, _: hook == _FORWARD)


def request_tables() -> set[Name]:
    """Return the tables with a chain in PREROUTING or FORWARD. Raises NodeError."""
    return _tables_at(lambda hook, _: hook in (_PREROUTING, _FORWARD))


def _tables_at(is_there: Callable[[int, int], bool]) -> set[Name]:
    return {
        Name(family, from_text(found[_TABLE]))
        for family in TABLE_FAMILIES
        for found in map(attributes, _dump(Name(family, ""), GET_CHAIN))
        if _CHAIN_HOOK in found and is_there(*_place(attributes(found[_CHAIN_HOOK])))
    }


def _place(hook: Mapping[int, bytes]) -> tuple[int, int]:
    """Return the number of a base chain's hook, and its priority."""
    priority = int.from_bytes(hook[_HOOK_PRIORITY], signed=True)
    return int.from_bytes(hook[_HOOK_NUMBER]), priority


def rules(names: Iterable[Name]) -> set[tuple[Name, bytes]]:
    """Return the handles of the rules in these tables; a new rule has a new one.

    Raises NodeError.
    """
    return {
        (name, found[_RULE_HANDLE])
        for name in names
        for found in map(attributes, _dump(name, GET_RULE, text(_TABLE, name.table)))
        if from_text(found[_TABLE]) == name.table
    }


def generation() -> bytes:
    """Return a number that changes with each transaction; empty without nf_tables.

    Raises NodeError.
    """
    ask = Name("inet", "")
    none: list[bytes | None] = []
    found = _query(lambda: get(ask, GET_GENERATION, [b""]), none)
    return attributes(found[0])[_GENERATION] if found and found[0] else b""


def has_chain(name: Name, chain: str) -> bool:
    """Whether the table has the chain. Raises NodeError."""
    request = text(_TABLE, name.table) + text(_CHAIN_NAME, chain)
    return any(_query(lambda: get(name, GET_CHAIN, [request]), []))


def exists(name: Name) -> bool:
    """Whether the table exists. Raises NodeError."""
    return name in tables()


def has_rule(name: Name, chain: str) -> bool:
    """Whether the table has this chain and a rule in it. Raises NodeError."""
    wanted = text(_TABLE, name.table), text(_RULE_CHAIN, chain)
    rules = map(attributes, _dump(name, GET_RULE, *wanted))
    places = ((from_text(it[_TABLE]), from_text(it[_RULE_CHAIN])) for it in rules)
    return (name.table, chain) in places


def chains(name: Name) -> set[str]:
    """Return the names of the table's chains. Raises NodeError."""
    found = map(attributes, _dump(name, GET_CHAIN))
    return {from_text(it[_CHAIN_NAME]) for it in found if from_text(it[_TABLE]) == name.table}


def _dump(name: Name, kind: int, *wanted: bytes) -> list[bytes]:
    return _query(lambda: dump(name, kind, *wanted), [])


def _query(ask: Callable[[], _T], nothing: _T) -> _T:
    """Return the kernel's answer; nothing if there is no such table or chain, or no nf_tables."""
    try:
        return ask()
    except Refused as error:
        if error.number in NO_SUCH_THING:
            return nothing
        raise NodeError(f"nf_tables: {error.reason}") from error


def delete(name: Name) -> None:
    """Delete the table with its content, at once; a missing table is no error. Raises NodeError."""
    change = Transaction(name)
    change.add(DELETE_TABLE, text(_TABLE, name.table))
    try:
        change.commit()
    except Refused as error:
        if error.number != errno.ENOENT:
            raise
