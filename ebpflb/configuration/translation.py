# SPDX-License-Identifier: Apache-2.0
"""KubeProxyConfiguration -> what the agent does, as fields of ``ebpflb.options.Options``."""

from pathlib import Path
from typing import Any

from ebpflb.configuration.fields import KubeProxyConfiguration
from ebpflb.configuration.validation import cluster_cidrs
from ebpflb.model import nodeports
from ebpflb.model.addresses import Address, parse_address, parse_network
from ebpflb.model.locality import Detector, Mode
from ebpflb.options import ConntrackOptions

EXTERNAL_IPS = "AllowServiceExternalIPs"  # the one gate that matters (kube-proxy.md 1.4)


def translate(found: KubeProxyConfiguration) -> dict[str, Any]:
    """Takes for granted that the configuration is valid."""
    kubeconfig = found.client_connection.kubeconfig
    return {
        "kubeconfig": Path(kubeconfig) if kubeconfig else None,
        "nodeport_addresses": found.node_port_addresses or nodeports.PRIMARY,
        "detector": detector(found),
        "masquerade_all": found.masquerade_all,
        "bind_address": bind_address(found),
        "bind_address_hard_fail": found.bind_address_hard_fail,
        "healthz_address": found.healthz_bind_address,
        "metrics_address": found.metrics_bind_address,
        "profiling": found.enable_profiling,
        "sync_period": found.of_mode.sync_period.seconds,
        "min_sync_period": found.of_mode.min_sync_period.seconds,
        "serve_external_ips": found.feature_gates.get(EXTERNAL_IPS, True),
        "conntrack": conntrack(found),
        "oom_score_adj": found.oom_score_adj,
        "mode": found.mode,
        "configuration": found,
    }


def bind_address(found: KubeProxyConfiguration) -> Address | None:
    """None where it does not say which (kube-proxy.md 17)."""
    address = parse_address(found.bind_address)
    return None if address.is_unspecified else address


def detector(found: KubeProxyConfiguration) -> Detector:
    """What the other modes go by is left out: kube-proxy does not look at it either."""
    mode = Mode(found.detect_local_mode)
    goes_by_address = mode is Mode.CLUSTER_CIDR and found.cluster_cidr
    texts = cluster_cidrs(found) if goes_by_address else ()
    return Detector(
        mode,
        tuple(parse_network(text) for text in texts),
        found.detect_local.bridge_interface,
        found.detect_local.interface_name_prefix,
    )


def conntrack(found: KubeProxyConfiguration) -> ConntrackOptions:
    """Whole seconds, as the kernel has them."""
    said = found.conntrack
    return ConntrackOptions(
        max_per_core=said.max_per_core,
        least=said.min,
        established=said.tcp_established_timeout.whole_seconds,
        close_wait=said.tcp_close_wait_timeout.whole_seconds,
        be_liberal=said.tcp_be_liberal,
        udp=said.udp_timeout.whole_seconds,
        udp_stream=said.udp_stream_timeout.whole_seconds,
    )


def idle_gates(found: KubeProxyConfiguration) -> list[str]:
    """The feature gates that are set, and without effect here."""
    return sorted(name for name in found.feature_gates if name != EXTERNAL_IPS)
