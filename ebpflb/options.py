# SPDX-License-Identifier: Apache-2.0
"""What the operator chose, on the command line or in kube-proxy's configuration file."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ebpflb.model import nodeport_addresses
from ebpflb.model.addresses import Address
from ebpflb.model.local_detector import LocalDetector


@dataclass(frozen=True)
class Paths:
    """Where one node's agent keeps its things; several nodes on one machine differ in these."""

    state: Path  # in a bpffs: what serves while no agent runs
    run: Path = Path("/run/ebpflb")  # the lock and the status of the agent
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
class ConntrackOptions:
    """What the kernel's connection tracking is to have (kube-proxy.md 11.3); 0: left alone.

    Time-outs are in seconds, and count for the flows of the packet path as well.
    """

    max_per_core: int = 32 * 1024
    least: int = 128 * 1024
    established: int = 24 * 3600
    close_wait: int = 3600
    be_liberal: bool = False
    udp: int = 0
    udp_stream: int = 0


@dataclass(frozen=True)
class Options:
    """What one agent is to do, and with what."""

    paths: Paths
    node_name: str
    cgroup: Path
    manifests: Path | None = None  # None: the Kubernetes API
    kubeconfig: Path | None = None  # None: the pod's own
    master: str = ""  # the API server's URL, where it is not the kubeconfig's
    nodeport_addresses: tuple[str, ...] = nodeport_addresses.PRIMARY
    guard_nodeports: bool = True
    devices: tuple[str, ...] = ()  # patterns; none: all
    detector: LocalDetector = field(default_factory=LocalDetector)
    masquerade_all: bool = False
    masquerade_local_backends: bool = False
    masquerade_ports: tuple[int, int] = (10000, 29999)
    bind_address: Address | None = None  # the Node's primary address, whatever the Node says
    healthz_address: str = "0.0.0.0:10256"  # "": not served
    metrics_address: str = "127.0.0.1:10249"  # "": not served
    bind_address_hard_fail: bool = False
    profiling: bool = False
    sync_period: float = 30.0  # seconds
    min_sync_period: float = 0.0  # seconds between the end of a write and the next one
    serve_external_ips: bool = True
    conntrack: ConntrackOptions = ConntrackOptions()
    oom_score_adj: int = -999
    mode: str = ""  # which of kube-proxy's modes the operator asked for: nothing hangs on it
    configuration: msgspec.Struct | None = None  # kube-proxy's, whole, as /configz shows it

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
        if self.master:
            return f"the API server {self.master}"
        return f"the API server of {self.kubeconfig or 'this pod'}"
