# SPDX-License-Identifier: Apache-2.0
"""The addresses that a Service lists: the field of each, for warnings, and its text."""

from collections.abc import Iterator

from ebpflb.model import objects


def external_ips(spec: objects.ServiceSpec) -> Iterator[tuple[str, str]]:
    for index, text in enumerate(spec.external_ips or ()):
        yield f"spec.externalIPs[{index}]", text


def ingress_ips(status: objects.ServiceStatus | None) -> Iterator[tuple[str, str]]:
    """Of any spec.type, not of ipMode Proxy: traffic to such IPs goes to the load balancer."""
    balancer = status.load_balancer if status else None
    for index, ingress in enumerate((balancer.ingress if balancer else None) or ()):
        if ingress.ip_mode in (None, "VIP"):
            yield f"status.loadBalancer.ingress[{index}].ip", ingress.ip or ""


def source_ranges(spec: objects.ServiceSpec) -> Iterator[tuple[str, str]]:
    for index, text in enumerate(spec.load_balancer_source_ranges or ()):
        yield f"spec.loadBalancerSourceRanges[{index}]", text.strip()
