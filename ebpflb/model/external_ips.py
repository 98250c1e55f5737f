# SPDX-License-Identifier: Apache-2.0
"""Which of a Service's externalIPs are served.

Everybody who may write a Service can claim any address by spec.externalIPs, and so receive what
this node and its pods send to it (CVE-2020-8554). Kubernetes closes that by an admission plugin
(DenyServiceExternalIPs); here it is closed on the node, for Services that exist already as well.
"""

from dataclasses import dataclass

from ebpflb.model import addresses
from ebpflb.model.addresses import Address, Network


@dataclass(frozen=True)
class ExternalIps:
    """What --external-ips allows; ``networks`` is None where every address is allowed."""

    networks: tuple[Network, ...] | None = None

    def of(self, listed: list[Address], warnings: list[str]) -> list[Address]:
        """Those that are allowed; for each of the others a warning is added."""
        refused = [address for address in listed if not self._allow(address)]
        warnings += [
            f"spec.externalIPs: {ip} is not served: --external-ips={self}" for ip in refused
        ]
        return [address for address in listed if address not in refused]

    def _allow(self, address: Address) -> bool:
        return self.networks is None or any(address in network for network in self.networks)

    def __str__(self) -> str:
        """As --external-ips takes it."""
        if self.networks is None:
            return "all"
        return ",".join(map(str, self.networks)) or "none"


ALL_EXTERNAL_IPS, NO_EXTERNAL_IPS = ExternalIps(), ExternalIps(())


def parse(text: str) -> ExternalIps:
    """``all``, ``none`` or CIDRs of both families, separated by commas. Raises ValueError."""
    words = {str(each): each for each in (ALL_EXTERNAL_IPS, NO_EXTERNAL_IPS)}
    if text in words:
        return words[text]
    parts = [part.strip() for part in text.split(",")]
    try:
        return ExternalIps(tuple(addresses.parse_network(part) for part in parts))
    except ValueError as error:
        raise ValueError(f"neither all nor none nor CIDRs: {error}") from error
