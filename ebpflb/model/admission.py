# SPDX-License-Identifier: Apache-2.0
"""What the operator lets Services do on this node, whatever their authors have written."""

from dataclasses import dataclass

from ebpflb.model.addresses import Network
from ebpflb.model.external_ips import ALL, ExternalIps


@dataclass(frozen=True)
class Admission:
    """``serve_external_ips`` is kube-proxy's gate AllowServiceExternalIPs: without it externalIPs
    are not served, and still count for the policies (kube-proxy.md 1.4). ``nodeport_source_ranges``
    hold for Services without the annotation (see ``nodeport_ranges``).
    """

    serve_external_ips: bool = True
    external_ips: ExternalIps = ALL
    nodeport_source_ranges: tuple[Network, ...] = ()


OF_KUBE_PROXY = Admission()
