# SPDX-License-Identifier: Apache-2.0
"""What the operator chose on the command line."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ebpflb.model import nodeports
from ebpflb.model.locality import Detector


@dataclass(frozen=True)
class Places:
    """Where one node's agent keeps its things; several nodes on one machine differ in these."""

    state: Path  # in a bpffs: what serves while no agent runs
    run: Path = Path("/run/ebpflb")  # the agent's lock and its last words
    cache: Path = Path("/var/cache/ebpflb")  # compiled bytecode

    @property
    def status_file(self) -> Path:
        return self.run / f"{self._name}.json"

    @property
    def lock_file(self) -> Path:
        return self.run / f"{self._name}.lock"

    @property
    def ports_file(self) -> Path:
        return self.run / f"{self._name}.ports"

    @property
    def _name(self) -> str:
        return str(self.state).strip("/").replace("/", "-")


@dataclass(frozen=True)
class Settings:
    """One agent's settings."""

    places: Places
    node_name: str
    cgroup: Path
    manifests: Path | None = None  # None: the Kubernetes API
    kubeconfig: Path | None = None  # None: the pod's own
    nodeport_addresses: tuple[str, ...] = nodeports.PRIMARY
    guard_nodeports: bool = True
    devices: tuple[str, ...] = ()  # patterns; none: all
    detector: Detector = field(default_factory=Detector)
    masquerade_all: bool = False
    masquerade_local_backends: bool = False
    masquerade_ports: tuple[int, int] = (10000, 29999)

    @property
    def fields(self) -> dict[str, Any]:
        """What of the map settings is the operator's choice."""
        flags = {
            "guard_nodeports": self.guard_nodeports,
            "masquerade_all": self.masquerade_all,
            "masquerade_here": self.masquerade_local_backends,
        }
        first, last = self.masquerade_ports
        chosen = frozenset(flag for flag, wanted in flags.items() if wanted)
        return {"flags": chosen, "first_port": first, "last_port": last}

    @property
    def source(self) -> str:
        """Where the cluster's objects come from, in a few words."""
        if self.manifests:
            return f"manifests in {self.manifests}"
        return f"the API server of {self.kubeconfig or 'this pod'}"
