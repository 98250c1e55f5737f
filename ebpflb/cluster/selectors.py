# SPDX-License-Identifier: Apache-2.0
"""Which objects are needed: sent to the API as selectors, applied here to manifests.

kube-proxy.md 1.1. A label is tested for presence, its value does not matter. An object that no
longer matches is emitted as removed, one that now matches as changed; the API does so by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ebpflb.model.endpoint_slices import HEADLESS_LABEL
from ebpflb.model.events import Kind
from ebpflb.model.objects import Object, Service
from ebpflb.model.services import PROXY_NAME_LABEL

FIELDS: dict[str, Callable[[Object], str]] = {
    "metadata.name": lambda item: item.metadata.name,
    "spec.clusterIP": lambda item: item.spec.cluster_ip if isinstance(item, Service) else "",
}


@dataclass(frozen=True, slots=True)
class FieldTest:
    """``field`` must be ``value`` or, if not ``equal``, anything else."""

    field: str
    equal: bool
    value: str

    def __str__(self) -> str:
        return f"{self.field}{'=' if self.equal else '!='}{self.value}"

    def accepts(self, item: Object) -> bool:
        return (FIELDS[self.field](item) == self.value) == self.equal


@dataclass(frozen=True, slots=True)
class Selector:
    """Objects without the label ``absent`` that pass ``test``; None: no condition."""

    absent: str | None = None
    test: FieldTest | None = None

    def query(self) -> dict[str, str]:
        """The parameters of a list or watch request."""
        query = {}
        if self.absent:
            query["labelSelector"] = f"!{self.absent}"
        if self.test:
            query["fieldSelector"] = str(self.test)
        return query

    def accepts(self, item: Object) -> bool:
        return self.absent not in (item.metadata.labels or {}) and (
            self.test is None or self.test.accepts(item)
        )


def selectors(node_name: str) -> dict[Kind, Selector]:
    """The objects that the node of this name needs."""
    return {
        Kind.SERVICE: Selector(PROXY_NAME_LABEL, FieldTest("spec.clusterIP", False, "None")),
        Kind.ENDPOINT_SLICE: Selector(HEADLESS_LABEL),
        Kind.NODE: Selector(test=FieldTest("metadata.name", True, node_name)),
        Kind.SERVICE_CIDR: Selector(),
    }
