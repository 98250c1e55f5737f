# SPDX-License-Identifier: Apache-2.0
"""On which of this machine's addresses NodePorts are served (kube-proxy.md 8).

``option`` is --nodeport-addresses: ("primary",) or a list of CIDRs. Loopback is not decided here:
the datapath serves it to the node's own processes only.
"""

from collections.abc import Iterable

from ebpflb.model import addresses
from ebpflb.model.addresses import Address, Family, Network

PRIMARY = ("primary",)  # the default of nftables mode, and ours


def served_addresses(
    here: Iterable[Address], option: tuple[str, ...], primary: dict[Family, Address]
) -> frozenset[Address]:
    """The interface addresses that serve NodePorts.

    A family that ``option`` does not mention is served on all its addresses, and so is one whose
    primary address is unknown. Raises ValueError for an entry that is not a CIDR.
    """
    allowed = allowed_networks(option, primary)
    return frozenset(
        address
        for address in here
        if not address.is_loopback and _allows(allowed[addresses.family(address)], address)
    )


def health_check_addresses(
    here: Iterable[Address], option: tuple[str, ...], primary: dict[Family, Address]
) -> dict[Family, frozenset[Address]]:
    """Where health-check node ports listen (kube-proxy.md 10); missing families: anywhere.

    Unlike NodePorts they listen on loopback too, if ``option`` contains it. Raises ValueError too.
    """
    restricted = {f: allowed for f, allowed in allowed_networks(option, primary).items() if allowed}
    everywhere = {f for f, allowed in restricted.items() if any(n.prefixlen == 0 for n in allowed)}
    return {
        family: frozenset(each for each in here if any(each in network for network in allowed))
        for family, allowed in restricted.items()
        if family not in everywhere
    }


def allowed_networks(
    option: tuple[str, ...], primary: dict[Family, Address]
) -> dict[Family, list[Network]]:
    """The CIDRs by family; an empty list allows every address."""
    texts = [str(ip) for ip in primary.values()] if option == PRIMARY else list(option)
    parsed = [addresses.parse_network(t if "/" in t else _single(t)) for t in texts]
    return {f: [n for n in parsed if addresses.family(n) == f] for f in Family}


def _single(text: str) -> str:
    return f"{text}/{addresses.parse_address(text).max_prefixlen}"


def _allows(allowed: list[Network], address: Address) -> bool:
    return not allowed or any(address in network for network in allowed)
