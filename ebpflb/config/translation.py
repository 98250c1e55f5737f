# SPDX-License-Identifier: Apache-2.0
"""KubeProxyConfiguration -> the agent's behaviour, as fields of ``ebpflb.options.Options``."""

from pathlib import Path
from typing import Any

from ebpflb.config.fields import IPVS, KubeProxyConfiguration
from ebpflb.config.validation import cluster_cidrs
from ebpflb.model import annotations, devices
from ebpflb.model.addresses import Address, Duration, parse_address, parse_network
from ebpflb.model.devices import LocalDetector, LocalMode
from ebpflb.model.packet_path import KERNEL_UDP_STREAM_TIMEOUT
from ebpflb.options import ConntrackOptions

EXTERNAL_IPS = "AllowServiceExternalIPs"  # the only feature gate with an effect (kube-proxy.md 1.4)


def translate(config: KubeProxyConfiguration) -> dict[str, Any]:
    """Translate a valid configuration."""
    kubeconfig = config.client_connection.kubeconfig
    return {
        "kubeconfig": Path(kubeconfig) if kubeconfig else None,
        "nodeport_addresses": config.node_port_addresses or devices.PRIMARY,
        "detector": detector(config),
        "masquerade_all": config.masquerade_section.masquerade_all,
        "masquerade_mark": 1 << config.masquerade_section.masquerade_bit,
        "bind_address": bind_address(config),
        "bind_address_hard_fail": config.bind_address_hard_fail,
        "healthz_address": config.healthz_bind_address,
        "metrics_address": config.metrics_bind_address,
        "profiling": config.enable_profiling,
        "sync_period": config.mode_section.sync_period.seconds,
        "min_sync_period": config.mode_section.min_sync_period.seconds,
        "serve_external_ips": config.feature_gates.get(EXTERNAL_IPS, True),
        "conntrack": conntrack(config),
        "oom_score_adj": config.oom_score_adj,
        "scheduler": default_scheduler(config),
        "configuration": config,
    }


def default_scheduler(config: KubeProxyConfiguration) -> str:
    """Return the default of --scheduler; kube-proxy has schedulers only in mode ipvs."""
    if config.mode != "ipvs":
        return annotations.RANDOM
    return annotations.BY_IPVS.get(config.ipvs.scheduler, annotations.RANDOM)


def unknown_schedulers(config: KubeProxyConfiguration) -> list[str]:
    """Return the kernel's scheduler in the configuration, if it is used and ours has no match."""
    name = config.ipvs.scheduler
    return [name] if config.mode == "ipvs" and name not in annotations.BY_IPVS else []


def bind_address(config: KubeProxyConfiguration) -> Address | None:
    """Return the address.

    None if unspecified: then the Node's addresses decide (kube-proxy.md 17).
    """
    address = parse_address(config.bind_address)
    return None if address.is_unspecified else address


def detector(config: KubeProxyConfiguration) -> LocalDetector:
    """Return the detector.

    clusterCIDR is left out in modes that do not use it, because it may be invalid there.
    """
    mode = LocalMode(config.detect_local_mode)
    uses_cidrs = mode is LocalMode.CLUSTER_CIDR and config.cluster_cidr
    texts = cluster_cidrs(config) if uses_cidrs else ()
    return LocalDetector(
        mode,
        tuple(parse_network(text) for text in texts),
        config.detect_local.bridge_interface,
        config.detect_local.interface_name_prefix,
    )


def conntrack(config: KubeProxyConfiguration) -> ConntrackOptions:
    """Return the options in whole seconds, as the kernel's settings.

    In mode ipvs no connection is forgotten sooner than by IPVS with its timeouts (kube-proxy.md
    15).
    """
    section, ipvs = config.conntrack, config.ipvs if config.mode == "ipvs" else IPVS()
    return ConntrackOptions(
        max_per_core=section.max_per_core,
        min_total=section.min,
        established=_longer(section.tcp_established_timeout, ipvs.tcp_timeout, 5 * 24 * 3600),
        close_wait=_longer(section.tcp_close_wait_timeout, ipvs.tcp_fin_timeout, 60),
        be_liberal=section.tcp_be_liberal is True,
        udp=section.udp_timeout.whole_seconds,
        udp_stream=_longer(section.udp_stream_timeout, ipvs.udp_timeout, KERNEL_UDP_STREAM_TIMEOUT),
        follows_rules=section.tcp_be_liberal == "auto",
    )


def _longer(own: Duration, ipvs: Duration, kernel: int) -> int:
    """Return the longer timeout in seconds; 0 keeps the kernel's, if that is the longest."""
    seconds = own.whole_seconds
    return seconds if ipvs.whole_seconds <= (seconds or kernel) else ipvs.whole_seconds


def ignored_gates(config: KubeProxyConfiguration) -> list[str]:
    """Return the feature gates in the configuration that have no effect here."""
    return sorted(name for name in config.feature_gates if name != EXTERNAL_IPS)
