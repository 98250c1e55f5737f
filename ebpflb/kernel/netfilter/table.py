# SPDX-License-Identifier: Apache-2.0
"""The netfilter engine's nft table: create it, and compare it with the kernel's.

If the kernel supports it (Linux 6.9) the table belongs to the agent's socket: no other process can
change it, ``nft flush ruleset`` leaves it alone, and it stays when the agent ends. The next agent
takes it over. On older kernels the table is an ordinary one, and the Keeper (Linux 5.12) keeps
established connections alive while the table is missing.
"""

import errno
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from ebpflb.errors import NodeError
from ebpflb.kernel.netfilter import nft
from ebpflb.kernel.netfilter.rules import (
    LOAD_CT_STATE,
    TABLE,
    Rule,
    TableOptions,
    chains,
    one_rule_table,
    rules,
    sets,
)
from ebpflb.kernel.netfilter.transaction import (
    DELETE_CHAIN,
    DELETE_RULE,
    DELETE_SET,
    DELETE_TABLE,
    GET_CHAIN,
    GET_RULE,
    GET_SET,
    GET_TABLE,
    NEW_CHAIN,
    NEW_RULE,
    NEW_SET,
    NEW_TABLE,
    Refused,
    Session,
    Transaction,
    dump,
)
from ebpflb.kernel.netlink import Tree, attributes, encode, has_attributes, to_number, to_text

KEEPER = nft.Name("inet", "ebpflb-keep")
CANARY = nft.Name("inet", "ebpflb-canary")  # of arrivals.py; an agent that is killed may leave it
_KEEPER_PRIORITY = -100
_DORMANT, OWNER, PERSIST = 0x1, 0x2, 0x4  # NFT_TABLE_F_*
_NAME = to_text(TABLE.table)


class NetfilterTable:
    """The table, in the network namespace of the thread that creates this object.

    ``session`` is the socket that may write to the table; ``is_owned`` says whether only it may.
    """

    def __init__(self, options: TableOptions, *, owns: bool = True) -> None:
        """With ``owns`` the table belongs to the session if the kernel supports it.

        Raises NodeError.
        """
        self.options, self.session = options, Session()
        self.is_owned = False
        self._flags = (OWNER | PERSIST, 0) if owns else (0,)
        self._sets, self._chains, self._rules = sets(options), chains(options), rules(options)

    def set_ports(self, options: TableOptions) -> None:
        """Let ``build`` write the rules of options with other ``masquerade_ports``."""
        self.options, self._rules = options, rules(options)

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
        for flags, kept in ((flags, kept) for flags in self._flags for kept in ways):
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
            change.add(DELETE_TABLE, encode({1: _NAME}))
        change.add(NEW_TABLE, encode({1: _NAME, 2: to_number(flags)}))
        if kept is not None and existing.flags not in (None, flags):
            change.commit(self.session)  # the kernel takes no chains with a change of the flags
            change = Transaction(TABLE)
        if kept is not None:
            for chain in existing.chains:
                change.add(DELETE_RULE, encode({1: _NAME, 2: to_text(chain)}))
            for chain in existing.chains:
                change.add(DELETE_CHAIN, encode({1: _NAME, 3: to_text(chain)}))
            for old in existing.sets.keys() - kept:
                change.add(DELETE_SET, encode({1: _NAME, 2: to_text(old)}))
        for place, (name, tree) in enumerate(self._sets.items(), start=1):
            if name not in (kept or ()):
                change.add(NEW_SET, encode({**tree, 10: to_number(place)}))
        for tree in self._chains.values():
            change.add(NEW_CHAIN, encode(tree))
        for rule in self._rules:
            change.add(NEW_RULE, encode(rule.tree))
        change.commit(self.session)

    def is_intact(self) -> bool:
        """Whether the table is complete, except for the elements of maps. Raises NodeError."""
        return not self.differences()

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
    if flags := [attributes(it)[2] for it in dump(TABLE, GET_TABLE) if attributes(it)[1] == _NAME]:
        existing.flags = int.from_bytes(flags[0], "big")
        existing.sets = _list(GET_SET, 2)
        existing.chains = _list(GET_CHAIN, 3)
        for rule in dump(TABLE, GET_RULE, encode({1: _NAME})):
            existing.rules.setdefault(_text(attributes(rule)[2]), []).append(rule)
    return existing


def _list(kind: int, name_kind: int) -> dict[str, bytes]:
    messages = ((attributes(it), it) for it in dump(TABLE, kind, encode({1: _NAME})))
    return {_text(found[name_kind]): it for found, it in messages if found[1] == _NAME}


def _text(content: bytes) -> str:
    return content.rstrip(b"\0").decode(errors="replace")


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
    if len(existing) == len(trees) and all(map(has_attributes, existing, trees)):
        return
    places = []
    for rule in wanted:
        at = [n for n, data in enumerate(existing) if has_attributes(data, rule.tree)]
        places += at
        if not at:
            yield f'chain {chain}: the rule "{rule.comment}" is missing or was changed'
    if len(existing) > len(places):
        yield f"chain {chain}: rules were added or changed"
    if places != sorted(places):
        yield f"chain {chain}: the order of the rules was changed"


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
        removal = Transaction(name)
        removal.add(DELETE_TABLE, encode({1: to_text(name.table)}))
        try:
            removal.commit()
        except Refused as error:
            if error.number not in nft.NO_SUCH_THING:
                raise NodeError(_advice(error)) from error
