# SPDX-License-Identifier: Apache-2.0
"""The netfilter engine's nft table: its rules, its creation, and its comparison with the kernel's.

If the kernel supports it (Linux 6.9) the table belongs to the agent's socket: no other process can
change it, ``nft flush ruleset`` leaves it alone, and it stays when the agent ends. The next agent
takes it over. On older kernels the table is an ordinary one, and the Keeper (Linux 5.12) keeps
established connections alive while the table is missing.
"""

import errno
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from ebpflb.entries.services import CHOSEN_BAND, CHOSEN_LIFT, Chosen
from ebpflb.errors import NodeError
from ebpflb.kernel.netfilter import nft
from ebpflb.kernel.netfilter.nft import Name, Refused, Session, Transaction
from ebpflb.kernel.netlink import (
    Tree,
    attributes,
    encode,
    from_text,
    has_attributes,
    to_number,
    to_text,
)
from ebpflb.model.addresses import Address
from ebpflb.options import Options

# The sets, chains and rules of the netfilter engine's nft table, as netlink attributes.
#
# The program at a device's ingress chooses a backend and writes the choice into the packet's
# priority: a prefix, flags and the backend's id (entries.services.Chosen). The table translates by
# maps of ids:
#
# choose             (nat, prerouting)  a packet with a choice goes to "translate", except from lo
# translate          translates the destination, or drops the packet
# masquerade-marked  (nat, postrouting)  a packet loses its choice; with the masquerade mark it gets
#                    an address of the node
# invalid            (filter, prerouting, if configured)  a segment that conntrack calls invalid
#                    goes to "untranslated"; left out while ``is_liberal``
# untranslated       drops the segments of served endpoints: their clients do not know the
#                    endpoint's address
#
# The numbers are those of include/uapi/linux/netfilter/nf_tables.h.


TABLE = Name("inet", "ebpflb")

MASQUERADE_CHAIN = "masquerade-marked"  # "masquerade" is a keyword of nft(8)


_TCP = 6
_PROTOCOLS = {"TCP": _TCP, "UDP": 17, "SCTP": 132}
_CHOOSE_PRIORITY = -110  # before kube-proxy's chains (-100)
_MASQUERADE_PRIORITY = 90  # before a CNI's masquerade (100), which would leave the mark set
_INVALID_PRIORITY = -190  # after conntrack (-200), before NAT
PREROUTING, INPUT, _POSTROUTING = 0, 1, 4  # NF_INET_*
_ACCEPT, _DROP, _GOTO = 1, 0, -4

_MAP = 0x8  # NFT_SET_MAP
_CLASS_ID, _IPV4, _IPV6, _PORT = 23, 7, 8, 13  # data types of nft(8)
_CONCATENATED = 6  # bits
_HOST_ORDER = bytes([0, 4]) + struct.pack("=I", 1)  # NFTNL_UDATA_SET_KEYBYTEORDER: for nft(8)

_PRIORITY, _MARK, _INPUT_DEVICE, _L3_PROTOCOL, _L4_PROTOCOL = 2, 3, 4, 15, 16  # NFT_META_*
_LO = 1  # LOOPBACK_IFINDEX
_NETWORK_HEADER, _TRANSPORT_HEADER = 1, 2  # NFT_PAYLOAD_*
_EQUAL, NOT_EQUAL, _LESS, _AT_LEAST = 0, 1, 2, 5  # NFT_CMP_*
_RANDOM = 1  # NFT_NG_RANDOM
_TO_NETWORK_ORDER = 1  # NFT_BYTEORDER_HTON
_VERDICT, _REGISTER, _SECOND_REGISTER = 0, 1, 2  # NFT_REG_VERDICT, NFT_REG_1, NFT_REG_2
_CT_STATE, _IS_INVALID = 0, 1  # NFT_CT_STATE, NF_CT_STATE_INVALID_BIT
_ORIGINAL = b"\0"  # IP_CT_DIR_ORIGINAL
_MAPS_ADDRESS, _MAPS_PORT, _FULLY_RANDOM = 0x1, 0x2, 0x10  # NF_NAT_RANGE_*
_FLAGS_BYTE, _SYN = 13, 0x02  # of a TCP header
_UNPRIVILEGED, _LAST_PORT = 1024, 65535
_NODEPORTS = (30000, 32767)  # the usual ones
_COMMENT = 0  # NFTNL_UDATA_RULE_COMMENT


Ports = tuple[int, int]  # the first and the last one


class TableOptions(NamedTuple):
    """The options of the table.

    ``masquerade_mark`` is one bit of the packet's mark. ``masquerade_ports`` are the ranges from
    which masqueraded flows of unprivileged ports get theirs. ``is_liberal``: conntrack finds no
    invalid segments now, so the chain "invalid" is left out; the sets that it needs stay.
    """

    masquerade_mark: int
    masquerade_ports: tuple[Ports, ...]
    drops_invalid: bool
    sctp: bool
    is_liberal: bool = False


def table_options(options: Options, *, sctp: bool, beside_flows: bool) -> TableOptions:
    """Return the options.

    Masqueraded flows get no port in the usual range of NodePorts, where an answer would look like a
    request; and none of the flow tables' ports if a flow can be in them (``beside_flows``), so that
    no port is given to two connections.
    """
    taken = [_NODEPORTS, options.masquerade_ports] if beside_flows else [_NODEPORTS]
    return TableOptions(
        masquerade_mark=options.masquerade_mark,
        masquerade_ports=tuple(_ports_beside(taken)) or ((_UNPRIVILEGED, _LAST_PORT),),
        drops_invalid=not options.conntrack_wanted.be_liberal,
        sctp=sctp,
    )


def _ports_beside(taken: Iterable[Ports]) -> Iterator[Ports]:
    """Yield the ranges of the unprivileged ports that are not taken."""
    first = _UNPRIVILEGED
    for low, high in [*sorted(taken), (_LAST_PORT + 1, _LAST_PORT + 1)]:
        if first < low:
            yield first, low - 1
        first = max(first, high + 1)


class _Family(NamedTuple):
    version: int
    number: int  # NFPROTO_*
    source_offset: int
    address_size: int
    data_type: int
    port_register: int  # after the address, which begins in _REGISTER; as the kernel dumps it


_FAMILIES = (_Family(4, 2, 12, 4, _IPV4, 9), _Family(6, 10, 8, 16, _IPV6, _SECOND_REGISTER))


class Rule(NamedTuple):
    """``comment`` is unique in the table."""

    chain: str
    comment: str
    expressions: tuple[Tree, ...]
    table: Name = TABLE

    @property
    def tree(self) -> Tree:
        """The attributes, as the kernel takes and dumps them."""
        comment = to_text(f"ebpflb: {self.comment}")
        userdata = bytes([_COMMENT, len(comment)]) + comment
        names = {1: to_text(self.table.table), 2: to_text(self.chain)}
        return {**names, 4: self.expressions, 7: userdata}


def sets(options: TableOptions) -> dict[str, Tree]:
    """Return name -> attributes of sets and maps."""
    return dict(_sets(options))


def _sets(options: TableOptions) -> Iterator[tuple[str, Tree]]:
    """Yield sets without a size: then the kernel's hash table grows with its elements."""
    for family in _FAMILIES:
        endpoint = family.data_type << _CONCATENATED | _PORT, family.address_size + 4
        name = f"backends{family.version}"
        data = {6: to_number(endpoint[0]), 7: to_number(endpoint[1]), 13: _HOST_ORDER}
        yield name, {**set_of(name, (_CLASS_ID, 4), _MAP), **data}
        if options.drops_invalid:
            name = f"endpoints{family.version}"
            yield name, set_of(name, endpoint)


def set_of(name: str, key: tuple[int, int], flags: int = 0, table: Name = TABLE) -> Tree:
    """Return the attributes of a set; ``key`` is the data type and the size in bytes."""
    named = {1: to_text(table.table), 2: to_text(name), 3: to_number(flags)}
    return {**named, 4: to_number(key[0]), 5: to_number(key[1])}


def chains(options: TableOptions) -> dict[str, Tree]:
    """Return name -> attributes of chains."""
    table = to_text(TABLE.table)
    wanted = {
        "translate": inner_chain(table, "translate"),
        "choose": base_chain(table, "choose", "nat", PREROUTING, _CHOOSE_PRIORITY),
        MASQUERADE_CHAIN: base_chain(
            table, MASQUERADE_CHAIN, "nat", _POSTROUTING, _MASQUERADE_PRIORITY
        ),
    }
    if options.drops_invalid:
        wanted["untranslated"] = inner_chain(table, "untranslated")
    if options.drops_invalid and not options.is_liberal:
        wanted["invalid"] = base_chain(table, "invalid", "filter", PREROUTING, _INVALID_PRIORITY)
    return wanted


def inner_chain(table: bytes, name: str) -> Tree:
    return {1: table, 3: to_text(name)}


def base_chain(table: bytes, name: str, kind: str, hook: int, priority: int) -> Tree:
    """Return a chain that packets pass at a hook (NF_INET_*)."""
    hooked: Tree = {1: to_number(hook), 2: to_number(priority)}
    return {**inner_chain(table, name), 4: hooked, 5: to_number(_ACCEPT), 7: to_text(kind)}


def one_rule_table(
    table: Name, chain: str, kind: str, priority: int, rule: Sequence[Tree], *, flags: int = 0
) -> Transaction:
    """Return the creation of a table with one chain at PREROUTING, and one rule in it."""
    name, made = to_text(table.table), Transaction(table)
    made.add(nft.NEW_TABLE, encode({1: name, 2: to_number(flags)}))
    made.add(nft.NEW_CHAIN, encode(base_chain(name, chain, kind, PREROUTING, priority)))
    made.add(nft.NEW_RULE, encode({1: name, 2: to_text(chain), 4: rule}))
    return made


def rules(options: TableOptions) -> list[Rule]:
    """Return the rules, in their order in each chain."""
    made = *_choice_rules(options), *_masquerade_rules(options), *_invalid_rules(options)
    return [rule for rule in made if not (rule.chain == "invalid" and options.is_liberal)]


def _choice_rules(options: TableOptions) -> Iterator[Rule]:
    mark, rest = options.masquerade_mark, 0xFFFFFFFF & ~options.masquerade_mark
    # No program runs at lo: there a process with CAP_NET_RAW has written the priority.
    elsewhere = _load_meta(_INPUT_DEVICE), compare(_word(_LO), NOT_EQUAL)
    yield Rule("choose", "packets with a choice", (*has_choice(), *elsewhere, goto("translate")))
    marked = _load_meta(_MARK), mask(rest, mark), _set_meta(_MARK)
    masqueraded = mask(Chosen.MASQUERADE), compare(_word(Chosen.MASQUERADE))
    yield Rule("translate", "mark for masquerade", (_load_meta(_PRIORITY), *masqueraded, *marked))
    for bit in (1 << place for place in range(CHOSEN_BAND.bit_length())):
        above = bit << CHOSEN_LIFT
        is_lifted = mask(Chosen.LIFTED | above), compare(_word(Chosen.LIFTED | above))
        lowered = (
            _load_meta(_PRIORITY),
            mask(0xFFFFFFFF & ~(above | bit), bit),
            _set_meta(_PRIORITY),
        )
        yield Rule("translate", f"lower bit {bit}", (_load_meta(_PRIORITY), *is_lifted, *lowered))
    for protocol, number in _protocols(options).items():
        for family in _FAMILIES:
            yield _translation(family, protocol, number)
    yield Rule("translate", "the endpoint was removed", (count(), drop()))


def _protocols(options: TableOptions) -> dict[str, int]:
    """Return the protocols; each has its own rules.

    nft(8) accepts no named set of protocols before a port.
    """
    return {name: it for name, it in _PROTOCOLS.items() if options.sctp or name != "SCTP"}


def _translation(family: _Family, protocol: str, number: int) -> Rule:
    backends = look_up(f"backends{family.version}", _REGISTER)
    found = _load_meta(_PRIORITY), mask(Chosen.ID), backends
    comment = f"translate {protocol} IPv{family.version}"
    return Rule("translate", comment, (*_is_protocol(number), *found, _translate(family)))


def _masquerade_rules(options: TableOptions) -> Iterator[Rule]:
    mark, rest = options.masquerade_mark, 0xFFFFFFFF & ~options.masquerade_mark
    marked = _load_meta(_MARK), mask(mark), compare(_word(mark))
    clear = _load_meta(_MARK), mask(rest), _set_meta(_MARK)
    yield Rule(MASQUERADE_CHAIN, "the choice has done its work", (*has_choice(), *set_priority(0)))
    source_port = _load_payload(_TRANSPORT_HEADER, 0, 2)
    unprivileged = source_port, compare(_port(_UNPRIVILEGED), _AT_LEAST)
    for protocol, number in _protocols(options).items():
        packets = *marked, *_is_protocol(number), *unprivileged
        for ports, draw in _drawn(options.masquerade_ports):
            comment = "masquerade unprivileged {} ports to {}-{}".format(protocol, *ports)
            yield Rule(MASQUERADE_CHAIN, comment, (*packets, *draw, *clear, *_masquerade(ports)))
    other = expression("masq", {1: to_number(_FULLY_RANDOM)})
    yield Rule(MASQUERADE_CHAIN, "masquerade other packets", (*marked, *clear, other))


def _drawn(ranges: Sequence[Ports]) -> Iterator[tuple[Ports, tuple[Tree, ...]]]:
    """Yield each range of ports, and the expressions that give it its share of the flows."""
    left = sum(last - first + 1 for first, last in ranges)
    for first, last in ranges:
        size = last - first + 1
        yield (first, last), _draw(size, left) if size < left else ()
        left -= size


def _draw(size: int, limit: int) -> tuple[Tree, ...]:
    """Compare a random number below ``limit`` with ``size``; the kernel compares bytes."""
    number = {1: to_number(_REGISTER), 2: to_number(limit), 3: to_number(_RANDOM)}
    below = compare(struct.pack(">I", size), _LESS)
    return expression("numgen", number), to_network_order(4), below


def _masquerade(ports: Ports) -> tuple[Tree, ...]:
    content = {
        1: to_number(_FULLY_RANDOM | _MAPS_PORT),
        2: to_number(_REGISTER),
        3: to_number(_SECOND_REGISTER),
    }
    registers = zip((_REGISTER, _SECOND_REGISTER), ports, strict=True)
    loads = (_load_value(register, _port(port)) for register, port in registers)
    return (*loads, expression("masq", content))


def _invalid_rules(options: TableOptions) -> Iterator[Rule]:
    if not options.drops_invalid:
        return
    yield Rule(
        "invalid",
        "invalid TCP segments, except SYN and SYN/ACK",
        (
            *(LOAD_CT_STATE, mask(_IS_INVALID), compare(_word(0), NOT_EQUAL)),
            *_is_protocol(_TCP),
            _load_payload(_TRANSPORT_HEADER, _FLAGS_BYTE, 1),
            *(_bitwise(bytes([_SYN]), b"\0"), compare(b"\0")),
            goto("untranslated"),
        ),
    )
    for family in _FAMILIES:
        yield Rule(
            "untranslated",
            f"a client would get an endpoint's segment untranslated, IPv{family.version}",
            (
                *(_load_meta(_L3_PROTOCOL), compare(bytes([family.number]))),
                _load_payload(_NETWORK_HEADER, family.source_offset, family.address_size),
                _load_payload(_TRANSPORT_HEADER, 0, 2, family.port_register),
                look_up(f"endpoints{family.version}"),
                *(count(), drop()),
            ),
        )


def to_port(protocol: int, to: Address, source_port: int, port: int) -> tuple[Tree, ...]:
    """Match packets of a protocol (IPPROTO_*) to an address, with these ports."""
    family = _FAMILIES[to.version == 6]
    at = family.source_offset + family.address_size
    return (
        *(_load_meta(_L3_PROTOCOL), compare(bytes([family.number]))),
        *_is_protocol(protocol),
        *(_load_payload(_NETWORK_HEADER, at, family.address_size), compare(to.packed)),
        *(_load_payload(_TRANSPORT_HEADER, 0, 4), compare(_port(source_port) + _port(port))),
    )


def has_choice() -> tuple[Tree, ...]:
    """Match packets for which the program at ingress has chosen a backend."""
    return _load_meta(_PRIORITY), mask(Chosen.MASK), compare(_word(Chosen.PREFIX))


def count() -> Tree:
    return expression("counter", {})


def drop() -> Tree:
    return _verdict({1: to_number(_DROP)})


def set_priority(value: int) -> tuple[Tree, ...]:
    """Write a number into the packet's priority, as the program at ingress does."""
    return _load_value(_REGISTER, _word(value)), _set_meta(_PRIORITY)


def _is_protocol(number: int) -> tuple[Tree, ...]:
    return _load_meta(_L4_PROTOCOL), compare(bytes([number]))


def _translate(family: _Family) -> Tree:
    return expression(
        "nat",
        {
            1: to_number(1),  # NFT_NAT_DNAT
            2: to_number(family.number),
            **{kind: to_number(_REGISTER) for kind in (3, 4)},
            **{kind: to_number(family.port_register) for kind in (5, 6)},
            7: to_number(_MAPS_ADDRESS | _MAPS_PORT),
        },
    )


def expression(name: str, content: Tree) -> Tree:
    return {1: to_text(name), 2: content}


def _word(value: int) -> bytes:
    return struct.pack("=I", value)


def _port(value: int) -> bytes:
    return struct.pack(">H", value)


def load_ct(key: int, register: int = _REGISTER, *, original: bool = False) -> Tree:
    """Load a part of a conntrack entry (NFT_CT_*), of its original direction if it has two."""
    direction = {3: _ORIGINAL} if original else {}
    return expression("ct", {1: to_number(register), 2: to_number(key), **direction})


LOAD_CT_STATE = load_ct(_CT_STATE)


def to_network_order(size: int) -> Tree:
    """Convert a number, so that its bytes can be compared."""
    registers = {1: to_number(_REGISTER), 2: to_number(_REGISTER)}
    order = {3: to_number(_TO_NETWORK_ORDER), 4: to_number(size), 5: to_number(size)}
    return expression("byteorder", {**registers, **order})


def _load_meta(key: int) -> Tree:
    return expression("meta", {1: to_number(_REGISTER), 2: to_number(key)})


def _set_meta(key: int) -> Tree:
    return expression("meta", {2: to_number(key), 3: to_number(_REGISTER)})


def _load_payload(base: int, offset: int, size: int, register: int = _REGISTER) -> Tree:
    return expression(
        "payload",
        {1: to_number(register), 2: to_number(base), 3: to_number(offset), 4: to_number(size)},
    )


def _load_value(register: int, value: bytes) -> Tree:
    return expression("immediate", {1: to_number(register), 2: {1: value}})


def mask(mask: int, xor: int = 0) -> Tree:
    return _bitwise(_word(mask), _word(xor))


def _bitwise(mask: bytes, xor: bytes) -> Tree:
    registers: Mapping[int, bytes] = {1: to_number(_REGISTER), 2: to_number(_REGISTER)}
    return expression("bitwise", {**registers, 3: to_number(len(mask)), 4: {1: mask}, 5: {1: xor}})


def compare(value: bytes, operation: int = _EQUAL) -> Tree:
    return expression("cmp", {1: to_number(_REGISTER), 2: to_number(operation), 3: {1: value}})


def look_up(name: str, target: int | None = None) -> Tree:
    result = {} if target is None else {3: to_number(target)}
    return expression("lookup", {1: to_text(name), 2: to_number(_REGISTER), **result})


def goto(chain: str) -> Tree:
    return _verdict({1: to_number(_GOTO), 2: to_text(chain)})


def _verdict(content: Tree) -> Tree:
    return expression("immediate", {1: to_number(_VERDICT), 2: {2: content}})


KEEPER = nft.Name("inet", "ebpflb-keep")
CANARY = nft.Name("inet", "ebpflb-canary")  # of probe.py; an agent that is killed may leave it
_KEEPER_PRIORITY = -100
_DORMANT, OWNER, PERSIST = 0x1, 0x2, 0x4  # NFT_TABLE_F_*
_NAME = to_text(TABLE.table)


class NetfilterTable:
    """The table, in the network namespace of the thread that creates this object.

    ``session`` is the socket that may write to the table; ``is_owned`` says whether only it may.
    """

    flags: Sequence[int] = (OWNER | PERSIST, 0)  # to try: whether the session owns the table

    def __init__(self, options: TableOptions) -> None:
        """Raises NodeError."""
        self.options, self.session = options, Session()
        self.is_owned = False
        self._sets, self._chains, self._rules = sets(options), chains(options), rules(options)

    def set_options(self, options: TableOptions) -> None:
        """Set other ``masquerade_ports`` or ``is_liberal`` for what ``build`` writes."""
        self.options, self._chains, self._rules = options, chains(options), rules(options)

    def close(self) -> None:
        """Close the session.

        The table stays, and from now on another process can own or change it.
        """
        self.session.close()

    def build(self) -> bool:
        """Create the whole table; return whether all elements of maps were kept.

        One transaction replaces all chains and rules. Intact maps keep their elements. Raises
        NodeError.
        """
        existing = _read()
        intact = {n for n, tree in self._sets.items() if _is_intact(existing.sets, n, tree)}
        # An existing table may have flags that cannot be changed.
        ways = (intact,) if existing.flags is None else (intact, None)
        for flags, kept in ((flags, kept) for flags in self.flags for kept in ways):
            try:
                self._replace(existing, kept, flags)
            except Refused as error:
                refused = error
            else:
                self.is_owned = bool(flags)
                return kept is not None and self._sets.keys() <= kept
        raise NodeError(_advice(refused)) from refused

    def _replace(self, existing: "_Existing", kept: set[str] | None, flags: int) -> None:
        """Replace the table's content, except the sets named in ``kept``.

        With None the table itself is replaced. Raises Refused.
        """
        change = Transaction(TABLE)
        if kept is None:
            change.add(nft.DELETE_TABLE, encode({1: _NAME}))
        change.add(nft.NEW_TABLE, encode({1: _NAME, 2: to_number(flags)}))
        if kept is not None and existing.flags not in (None, flags):
            change.commit(self.session)  # the kernel takes no chains with a change of the flags
            change = Transaction(TABLE)
        if kept is not None:
            for chain in existing.chains:
                change.add(nft.DELETE_RULE, encode({1: _NAME, 2: to_text(chain)}))
            for chain in existing.chains:
                change.add(nft.DELETE_CHAIN, encode({1: _NAME, 3: to_text(chain)}))
            for old in existing.sets.keys() - kept:
                change.add(nft.DELETE_SET, encode({1: _NAME, 2: to_text(old)}))
        for place, (name, tree) in enumerate(self._sets.items(), start=1):
            if name not in (kept or ()):
                change.add(nft.NEW_SET, encode({**tree, 10: to_number(place)}))
        for tree in self._chains.values():
            change.add(nft.NEW_CHAIN, encode(tree))
        for rule in self._rules:
            change.add(nft.NEW_RULE, encode(rule.tree))
        change.commit(self.session)

    def differences(self) -> list[str]:
        """Return the missing or changed parts of the table, in words.

        Any process can call this. The elements of maps are not compared. Raises NodeError.
        """
        existing = _read()
        if existing.flags is None:
            return ["the table is missing"]
        words = list(_compare("map or set", self._sets, existing.sets))
        words += _compare("chain", self._chains, existing.chains)
        for chain in self._chains:
            wanted = [rule for rule in self._rules if rule.chain == chain]
            words += _compare_rules(chain, wanted, existing.rules.get(chain, []))
        if existing.flags & _DORMANT:
            words.append("the table is switched off (dormant)")
        if self.is_owned and not existing.flags & OWNER:
            words.append("the table does not belong to this agent any more")
        return words


class _Existing(Struct):
    """The kernel's state; ``flags`` is None if there is no table."""

    flags: int | None = None
    sets: dict[str, bytes] = {}
    chains: dict[str, bytes] = {}
    rules: dict[str, list[bytes]] = {}  # of each chain, in order


def _read() -> _Existing:
    """Read the kernel's state. Raises NodeError."""
    existing = _Existing()
    if flags := [
        attributes(it)[2] for it in nft.dump(TABLE, nft.GET_TABLE) if attributes(it)[1] == _NAME
    ]:
        existing.flags = int.from_bytes(flags[0], "big")
        existing.sets = _list(nft.GET_SET, 2)
        existing.chains = _list(nft.GET_CHAIN, 3)
        for rule in nft.dump(TABLE, nft.GET_RULE, encode({1: _NAME})):
            existing.rules.setdefault(from_text(attributes(rule)[2]), []).append(rule)
    return existing


def _list(kind: int, name_kind: int) -> dict[str, bytes]:
    messages = ((attributes(it), it) for it in nft.dump(TABLE, kind, encode({1: _NAME})))
    return {from_text(found[name_kind]): it for found, it in messages if found[1] == _NAME}


def _is_intact(existing: Mapping[str, bytes], name: str, wanted: Tree) -> bool:
    return name in existing and has_attributes(existing[name], wanted)


def _compare(what: str, wanted: Mapping[str, Tree], existing: Mapping[str, bytes]) -> Iterator[str]:
    for name, tree in wanted.items():
        if name not in existing:
            yield f"{what} {name} is missing"
        elif not has_attributes(existing[name], tree):
            yield f"{what} {name} was changed"
    yield from (f"{what} {name} was added" for name in existing if name not in wanted)


def _compare_rules(chain: str, wanted: Sequence[Rule], existing: list[bytes]) -> Iterator[str]:
    trees = [rule.tree for rule in wanted]
    if len(existing) != len(trees) or not all(map(has_attributes, existing, trees)):
        yield f"chain {chain}: rules were removed, added, changed or moved"


def _advice(refused: Refused) -> str:
    if refused.number == errno.EPERM:
        return f"{refused}: another process owns the table, or CAP_NET_ADMIN is missing"
    if refused.number in nft.NO_SUCH_THING:
        modules = "nft_chain_nat nft_nat nft_masq nft_ct nft_hash nft_numgen"
        return f"{refused}: the kernel has no NAT by nf_tables: modprobe -a {modules}"
    return str(refused)


class Keeper:
    """A table that only keeps the hooks of conntrack and NAT: for kernels before 6.9.

    It belongs to this object's socket, so ``nft flush ruleset`` leaves it alone and connections
    stay established until the NetfilterTable is created again. The kernel removes it at ``close``,
    or when the process ends.
    """

    def __init__(self) -> None:
        self._session: Session | None = None

    def open(self) -> bool:
        """Create the table unless it exists; return whether the kernel can. Raises NodeError."""
        if self._session:
            return True
        session, rule = Session(), [LOAD_CT_STATE]
        made = one_rule_table(KEEPER, "keep", "nat", _KEEPER_PRIORITY, rule, flags=OWNER)
        try:
            made.commit(session)
        except Refused as error:
            session.close()
            if error.number in nft.NO_SUCH_THING:
                return False
            raise
        self._session = session
        return True

    def close(self) -> None:
        """Close the socket; the kernel removes the table with it."""
        if self._session:
            self._session.close()
            self._session = None


def remove() -> None:
    """Remove the engine's tables from this network namespace.

    Raises NodeError, also if a running agent owns the table.
    """
    for name in (TABLE, KEEPER, CANARY):
        try:
            nft.delete(name)
        except Refused as error:
            if error.number not in nft.NO_SUCH_THING:
                raise NodeError(_advice(error)) from error
