# SPDX-License-Identifier: Apache-2.0
"""What the operator chose for Services on this node; some of it they may choose themselves."""

from dataclasses import dataclass

from ebpflb.model import external_ips, scheduler, served_services
from ebpflb.model.addresses import Network
from ebpflb.model.external_ips import ExternalIps
from ebpflb.model.served_services import ServedServices


@dataclass(frozen=True)
class Admission:
    """``serve_external_ips`` is kube-proxy's gate AllowServiceExternalIPs: without it externalIPs
    are not served, and still count for the policies (kube-proxy.md 1.4). ``nodeport_source_ranges``
    and ``scheduler`` hold for Services without the annotation (see ``nodeport_ranges`` and
    ``scheduler``). Services that are not ``served`` are another proxy's.
    """

    serve_external_ips: bool = True
    external_ips: ExternalIps = external_ips.ALL_EXTERNAL_IPS
    nodeport_source_ranges: tuple[Network, ...] = ()
    served: ServedServices = served_services.ALL_SERVICES
    scheduler: str = scheduler.RANDOM


OF_KUBE_PROXY = Admission()
