# SPDX-License-Identifier: Apache-2.0
"""Reads the sets that `ipset save` prints, as far as rules of iptables match destinations by them.

What cannot be read makes a rule that matches the set one that cannot be compared.
"""

from collections.abc import Iterator

from ebpflb.diagnose.firewall.matches import (
    AnyMatch,
    AnyOf,
    Match,
    Ranges,
    Unknown,
    address_range,
    port_range,
)
from ebpflb.diagnose.firewall.nft_match import PROTOCOL_NUMBERS

_MOST_EXCEPTIONS = 100  # in one set
_FIELDS = {"ip": "address", "net": "address", "port": "port"}


class Sets:
    """Sets are parsed when a rule asks for them, and once for all rules."""

    def __init__(self, saved: str = "") -> None:
        self._dimensions: dict[str, list[str]] = {}
        self._members: dict[str, list[str]] = {}
        self._parsed: dict[tuple[str, str, bool], AnyMatch] = {}
        for line in saved.splitlines():
            command, name, rest = (*line.split(" ", 2), "", "")[:3]
            if command == "create":
                self._dimensions[name] = rest.partition(" ")[0].partition(":")[2].split(",")
                self._members[name] = []
            elif command == "add" and name in self._members:
                self._members[name].append(rest)

    def match(self, name: str, directions: str, negated: bool) -> AnyMatch | None:
        """Of "--match-set NAME DIRECTIONS"; None for a set that matches no destination.

        Raises ValueError for one that is not known, or has members of another form.
        """
        key = name, directions, negated
        if "dst" not in directions.split(","):
            return None
        if key not in self._parsed:
            self._parsed[key] = self._parse(name, directions.split(","), negated)
        return self._parsed[key]

    def _parse(self, name: str, directions: list[str], negated: bool) -> AnyMatch:
        kinds, members = self._dimensions.get(name, ["unknown"]), self._members.get(name, [])
        if kinds == ["set"]:
            return self._listed(members, ",".join(directions), negated)
        asked = dict(enumerate(zip(kinds, directions, strict=False)))
        wanted = [at for at, (kind, way) in asked.items() if way == "dst" and kind in _FIELDS]
        excepted = sum("nomatch" in _options(member) for member in members)
        if not wanted or (excepted and kinds != ["net"]) or excepted > _MOST_EXCEPTIONS:
            return Unknown(f"ipset {name}")
        if excepted:
            return Match("address", Ranges(_with_exceptions(members)), negated)
        found = [tuple(_member(member, kinds, wanted)) for member in members]
        if len(wanted) == 1 and all(len(choice) == 1 for choice in found):
            pairs = (pair for (match,) in found for pair in match.ranges.pairs)
            return Match(_FIELDS[kinds[wanted[0]]], Ranges(pairs), negated)
        return AnyOf(tuple(found), negated)

    def _listed(self, members: list[str], directions: str, negated: bool) -> AnyMatch:
        """Any set of a list: those of more dimensions than directions match nothing."""
        choices: list[tuple[Match, ...]] = []
        for name in (member.split()[0] for member in members):
            if len(self._dimensions.get(name, [])) > len(directions.split(",")):
                continue
            found = self.match(name, directions, False)
            if not isinstance(found, Match | AnyOf):
                return Unknown(f"ipset {name}")
            choices += found.choices if isinstance(found, AnyOf) else [(found,)]
        return AnyOf(tuple(choices), negated)


def _options(member: str) -> list[str]:
    """What follows a member but its comment."""
    return member.partition('"')[0].split()[1:]


def _with_exceptions(members: list[str]) -> list[tuple[int, int]]:
    """What is matched where the narrowest network decides that an address is in."""
    networks = [(address_range(member.split()[0]), _options(member)) for member in members]
    pairs: list[tuple[int, int]] = []
    for (first, last), options in sorted(networks, key=lambda each: each[0][0] - each[0][1]):
        if "nomatch" in options:
            before = [(start, min(end, first - 1)) for start, end in pairs if start < first]
            pairs = before + [(max(start, last + 1), end) for start, end in pairs if end > last]
        else:
            pairs.append((first, last))
    return pairs


def _member(text: str, kinds: list[str], wanted: list[int]) -> Iterator[Match]:
    parts = text.partition(" ")[0].split(",")
    for at in wanted:
        part = parts[at]
        if kinds[at] != "port":
            yield Match("address", Ranges([address_range(part)]))
            continue
        protocol, colon, ports = part.rpartition(":")
        if colon:
            number = PROTOCOL_NUMBERS[protocol]
            yield Match("protocol", Ranges([(number, number)]))
        yield Match("port", Ranges([port_range(ports)]))
