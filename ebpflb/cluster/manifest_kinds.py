# SPDX-License-Identifier: Apache-2.0
"""Which kind of object a manifest defines, and whether its name is misspelt.

Objects of other kinds are none of ours, and skipped. But in the API groups that hold our kinds all
kinds are known, so what is not one of them is a mistake, and would be ignored in silence.
"""

from difflib import get_close_matches

from ebpflb.errors import InvalidObject
from ebpflb.model.events import Kind

KINDS = {
    ("v1", "Service"): Kind.SERVICE,
    ("discovery.k8s.io/v1", "EndpointSlice"): Kind.ENDPOINT_SLICE,
    ("v1", "Node"): Kind.NODE,
    ("networking.k8s.io/v1", "ServiceCIDR"): Kind.SERVICE_CIDR,
}
# The others of these groups, in Kubernetes 1.36.
_OTHERS = {
    "v1": "Binding ComponentStatus ConfigMap Endpoints Event LimitRange List Namespace"
    " PersistentVolume PersistentVolumeClaim Pod PodTemplate ReplicationController ResourceQuota"
    " Secret ServiceAccount",
    "discovery.k8s.io/v1": "",
    "networking.k8s.io/v1": "Ingress IngressClass IPAddress NetworkPolicy",
}
_VERSIONS = {kind: version for version, kind in KINDS}
_GROUPS = {version.rpartition("/")[0] for version in _OTHERS}


def read(api_version: str, kind: str) -> Kind | None:
    """None for a kind of others. Raises InvalidObject if one of ours seems to be meant."""
    found = KINDS.get((api_version, kind))
    if found or kind in _OTHERS.get(api_version, "").split():
        return found
    if kind in _VERSIONS:
        _check_version(api_version, kind)
    elif api_version in _OTHERS:
        raise InvalidObject("kind", f"{api_version} has no {kind}{_hint(kind, api_version)}")
    return None


def _check_version(api_version: str, kind: str) -> None:
    """Other groups may have a kind of the same name, as Knative has a Service."""
    wanted = _VERSIONS[kind]
    group = api_version.rpartition("/")[0]
    if group in _GROUPS or get_close_matches(api_version, [wanted], cutoff=0.8):
        raise InvalidObject("apiVersion", f"{api_version} has no {kind}: did you mean {wanted}?")


def _hint(kind: str, api_version: str) -> str:
    names = {name.lower(): name for name in (*_VERSIONS, *_OTHERS[api_version].split())}
    close = get_close_matches(kind.lower(), names, n=1)
    return f": did you mean {names[close[0]]}?" if close else ""
