# SPDX-License-Identifier: Apache-2.0
"""All Services with their load balancer addresses, as the API server has them now; and how one
writes an address into a Service's status.

Everything is read from the store, not from a copy: whoever gives addresses away must know them all.
A status is written only if the Service is still the one that was read.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import msgspec
from msgspec import Raw, Struct

from ebpflb.cluster import decoding
from ebpflb.model import objects
from ebpflb.model.addresses import Address
from ebpflb.model.events import Key, Kind
from ebpflb.model.objects import Annotated, Metadata
from ebpflb.model.pools import BALANCER, Claim, read_claim, vip

if TYPE_CHECKING:
    from ebpflb.cluster.api import Server

_PAGE = {"limit": "500"}  # without a version: the newest one
_NAMESPACES = "/api/v1/namespaces"
_MERGE = "application/merge-patch+json"


class _ServiceMetadata(Annotated, frozen=True, gc=False, rename="camel"):
    uid: str = ""
    resource_version: str = ""


class Ingress(objects.LoadBalancerIngress, frozen=True, rename="camel", omit_defaults=True):
    """All of an entry of status.loadBalancer.ingress, to write it back as it was."""

    hostname: str | None = None
    ports: list[dict[str, Any]] | None = None


class _LoadBalancerStatus(Struct, frozen=True):
    ingress: list[Ingress] | None = None


class _Status(Struct, frozen=True, rename="camel"):
    load_balancer: _LoadBalancerStatus | None = None


class _Service(objects.Service, frozen=True, gc=False):
    metadata: _ServiceMetadata
    status: _Status | None = None  # type: ignore[assignment]


class _Namespace(Struct, frozen=True):
    metadata: Metadata


_services = msgspec.json.Decoder(_Service)
_namespaces = msgspec.json.Decoder(_Namespace)


class Other(NamedTuple):
    """A Service that asks the pools for nothing: its status, and its resourceVersion.

    ``may_have``: whether a Service of its type may have any address.
    """

    ingress: Sequence[Ingress]
    version: str
    may_have: bool

    @property
    def held(self) -> set[Address]:
        return {address for each in self.ingress if (address := vip(each))}

    def without(self, ips: Collection[Address]) -> list[Ingress]:
        """Return what is left of its status when it gives these addresses back."""
        return [it for it in self.ingress if vip(it) not in ips] if self.may_have else []


class Found(NamedTuple):
    """``labels``: of the namespaces, by name; empty if they were not asked for."""

    claims: list[Claim]
    others: dict[Key, Other]  # those with an address
    labels: Mapping[str, dict[str, str]]


def read(server: "Server", *, with_namespaces: bool) -> Found:
    """Return all Services; one that cannot be decoded has nothing. Raises ClusterError."""
    found = Found([], {}, _labels(server) if with_namespaces else {})
    for item in _items(server, Kind.SERVICE):
        try:
            service = _services.decode(item)
        except decoding.DECODE_ERRORS:
            continue
        meta = service.metadata
        if claim := read_claim(service, meta.uid, meta.resource_version):
            found.claims.append(claim)
        elif listed := _ingress(service):
            other = Other(listed, meta.resource_version, service.spec.type == BALANCER)
            found.others[Key(meta.namespace, meta.name)] = other
    return found


def _ingress(service: _Service) -> Sequence[Ingress]:
    status = service.status and service.status.load_balancer
    return (status and status.ingress) or ()


def _labels(server: "Server") -> dict[str, dict[str, str]]:
    found = {}
    for item in _items(server, _NAMESPACES):
        try:
            meta = _namespaces.decode(item).metadata
        except decoding.DECODE_ERRORS as error:
            raise decoding.invalid_object(error) from error
        found[meta.name] = meta.labels or {}
    return found


def _items(server: "Server", kind: Kind | str) -> Iterator[Raw]:
    query: dict[str, str] = _PAGE
    while True:
        items: list[Raw] = []
        metadata = decoding.read_list(server.page(kind, query), items.append)
        yield from items
        if not metadata.token:
            return
        query = _PAGE | {"continue": metadata.token}


def write(server: "Server", key: Key, version: str, ingress: Sequence[Ingress]) -> None:
    """Set the addresses in the status of a Service, if it still has this resourceVersion.

    Raises ClusterError, or RequestRejected if it has changed, is gone, or may not be written.
    """
    body = {
        "metadata": {"resourceVersion": version},
        "status": {"loadBalancer": {"ingress": ingress or None}},
    }
    namespace, name = (quote(each, safe="") for each in key)
    path = f"/api/v1/namespaces/{namespace}/services/{name}/status"
    server.patch(path, _MERGE, msgspec.json.encode(body))
