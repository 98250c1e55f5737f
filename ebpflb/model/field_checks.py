# SPDX-License-Identifier: Apache-2.0
"""Check single fields: each function returns the value, or raises InvalidObject naming the field.

kube-proxy relies on the API server's validation, but manifests skip it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from ebpflb import errors
from ebpflb.model import objects

# The addresses that a Service lists, each as its field, for warnings, and its text.


def external_ips(listed: Iterable[str]) -> Iterator[tuple[str, str]]:
    for index, text in enumerate(listed):
        yield f"spec.externalIPs[{index}]", text


def ingress_ips(listed: Iterable[objects.LoadBalancerIngress]) -> Iterator[tuple[str, str]]:
    """Yield the load balancer IPs, for any spec.type.

    For ipMode Proxy traffic goes to the load balancer.
    """
    for index, ingress in enumerate(listed):
        if ingress.ip_mode in (None, "VIP"):
            yield f"status.loadBalancer.ingress[{index}].ip", ingress.ip or ""


def source_ranges(listed: Iterable[str]) -> Iterator[tuple[str, str]]:
    for index, text in enumerate(listed):
        yield f"spec.loadBalancerSourceRanges[{index}]", text.strip()


PORTS = range(1, 1 << 16)
LONGEST_LABEL = 63  # characters (RFC 1123)

_Meaning = TypeVar("_Meaning")


def filled(field: str, value: str) -> str:
    if not value:
        raise errors.InvalidObject(field, "is empty")
    return value


def short(field: str, value: str) -> str:
    """A name that is not longer than a label of DNS, as Kubernetes has it for Services and their
    ports, and as the maps can hold it.
    """
    if len(value) > LONGEST_LABEL:
        raise errors.InvalidObject(field, f"longer than {LONGEST_LABEL} characters")
    return value


def within(field: str, value: int, allowed: range) -> int:
    if value not in allowed:
        raise errors.InvalidObject(field, f"{value} is not in {allowed[0]}..{allowed[-1]}")
    return value


def one_of(field: str, value: str, meanings: Mapping[str, _Meaning]) -> _Meaning:
    if value not in meanings:
        raise errors.InvalidObject(field, f'"{value}" is not one of {", ".join(meanings)}')
    return meanings[value]


def parsed(field: str, parse: Callable[[str], _Meaning], text: str) -> _Meaning:
    """Return the parsed text; ``parse`` raises ValueError with a message for the operator."""
    try:
        return parse(text)
    except ValueError as error:
        raise errors.InvalidObject(field, str(error)) from error
