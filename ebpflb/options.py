# SPDX-License-Identifier: Apache-2.0
"""What the operator chose, on the command line or in kube-proxy's configuration file."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from ebpflb.model import annotations, services
from ebpflb.model.addresses import Address, Network
from ebpflb.model.devices import PRIMARY, LocalDetector
from ebpflb.model.packet_path import (
    AUTO,
    KERNEL_UDP_STREAM_TIMEOUT,
    KERNEL_UDP_TIMEOUT,
    OFF,
    PacketMark,
)
from ebpflb.model.services import Admission, ExternalIps, ServedServices

# What the audit does with what differs from what is planned.
AUDITS = (REPAIR, REPORT) = ("repair", "report")
# Whose sockets are translated: the others' packets are, at their device.
SOCKET_TRANSLATIONS = (ALL_SOCKETS, HOST_SOCKETS) = ("all", "host")


@dataclass(frozen=True)
class Paths:
    """One agent's directories and files; agents on the same machine have different ones."""

    state: Path  # in a bpffs: the pinned maps and links, which serve while no agent runs
    run: Path = Path("/run/ebpflb")  # the agent's own files
    cache: Path = Path("/var/cache/ebpflb")  # compiled bytecode
    known_as: str = ""  # where the agent sees another name of the state directory: its ``name``

    @property
    def status_file(self) -> Path:
        return self.run / f"{self.name}.json"

    @property
    def lock_file(self) -> Path:
        return self.run / f"{self.name}.lock"

    @property
    def socket_file(self) -> Path:
        return self.run / f"{self.name}.sock"

    @property
    def monitor_socket(self) -> Path:
        return self.run / f"{self.name}.monitor.sock"

    @property
    def ports_file(self) -> Path:
        return self.run / f"{self.name}.ports"

    @property
    def name(self) -> str:
        """Of its files in the run directory, which several agents may share."""
        return self.known_as or str(self.state).strip("/").replace("/", "-")


@dataclass(frozen=True)
class ConntrackOptions:
    """Limits and timeouts of the kernel's connection tracking (kube-proxy.md 11.3).

    Timeouts are in seconds; the flows of the packet path have the same. 0 leaves the kernel's own.
    """

    max_per_core: int = 32 * 1024  # entries
    min_total: int = 128 * 1024  # entries, on machines with few cores
    established: int = 24 * 3600
    close_wait: int = 3600
    be_liberal: bool = False
    udp: int = 0
    udp_stream: int = 0


# Where replies leave: as the backend's packets are routed, or where their requests came in.
REPLY_PATHS = ROUTE, REQUEST_DEVICE = "route", "request-device"


@dataclass(frozen=True)
class Options:
    """Everything that is chosen for one agent."""

    paths: Paths
    node_name: str
    cgroup: Path
    manifests: Path | None = None  # None: the Kubernetes API
    kubeconfig: Path | None = None  # None: the pod's own
    master: str = ""  # the API server's URL, where it is not the kubeconfig's
    nodeport_addresses: tuple[str, ...] = PRIMARY
    guard_nodeports: bool = True  # processes may not bind a NodePort
    devices: tuple[str, ...] = ()  # patterns of names; none: all devices
    packet_path: str = AUTO  # one of packet_path.CHOICES
    socket_translation: str = ALL_SOCKETS  # one of SOCKET_TRANSLATIONS
    audit: str = REPAIR  # one of AUDITS
    map_sizes: tuple[tuple[str, int], ...] = ()  # name -> entries, where not as in maps.h
    detector: LocalDetector = field(default_factory=LocalDetector)
    masquerade_all: bool = False
    masquerade_local_backends: bool = False
    masquerade_mark: int = 0x4000  # one bit, on the engine netfilter
    masquerade_ports: tuple[int, int] = (10000, 29999)
    reply_path: str = ROUTE  # one of REPLY_PATHS
    fast_forward: bool = False  # established flows are forwarded past the stack
    packet_mark: PacketMark = OFF
    bind_address: Address | None = None  # the Node's primary address, whatever the Node says
    healthz_address: str = "0.0.0.0:10256"  # "": not served
    readyz_address: str = "127.0.0.1:10247"  # "": not served; as healthz_address, but ours alone
    metrics_address: str = "127.0.0.1:10249"  # "": not served
    bind_address_hard_fail: bool = False
    profiling: bool = False
    # Seconds: the audit's periods depend on it; /healthz fails after twice as long.
    sync_period: float = 30.0
    min_sync_period: float = 0.0  # seconds from the end of a sync to the next one
    served: ServedServices = services.ALL_SERVICES
    scheduler: str = annotations.RANDOM  # one of SCHEDULERS, of Services without the annotation
    shadow: bool = False  # decisions are counted, and not carried out
    namespace_share: float = 0.8  # of each map, for one namespace; from 0 to 1
    serve_external_ips: bool = True
    nodeport_source_ranges: tuple[Network, ...] = ()  # none: everybody
    external_ips: ExternalIps = services.ALL_EXTERNAL_IPS  # those that are served, if any are
    conntrack: ConntrackOptions = ConntrackOptions()
    oom_score_adj: int = -999
    mode: str = ""  # kube-proxy's mode that was asked for; it has no effect here
    configuration: msgspec.Struct | None = None  # all of kube-proxy's, for /configz

    @property
    def map_settings(self) -> dict[str, Any]:
        """The fields of the map ``settings`` that the operator chooses."""
        flags = {
            "guard_nodeports": self.guard_nodeports,
            "masquerade_all": self.masquerade_all,
            "masquerade_here": self.masquerade_local_backends,
            "reply_to_device": self.reply_path == REQUEST_DEVICE,
            "fast_forward": self.fast_forward,
            "host_sockets": self.socket_translation == HOST_SOCKETS,
            "shadow": self.shadow,
        }
        first, last = self.masquerade_ports
        chosen = frozenset(flag for flag, is_chosen in flags.items() if is_chosen)
        mark, mask = self.packet_mark
        return {
            "flags": chosen,
            "first_port": first,
            "last_port": last,
            "mark": mark,
            "mark_mask": mask,
            "udp_timeout": self.conntrack.udp or KERNEL_UDP_TIMEOUT,
            "udp_stream_timeout": self.conntrack.udp_stream or KERNEL_UDP_STREAM_TIMEOUT,
        }

    @property
    def conntrack_wanted(self) -> ConntrackOptions:
        """What conntrack is to be set to: with --fast-forward it sees too little of windows."""
        liberal = self.conntrack.be_liberal or self.fast_forward
        return replace(self.conntrack, be_liberal=liberal)

    @property
    def admission(self) -> Admission:
        """What Services may do on this node."""
        external_ips = self.serve_external_ips, self.external_ips
        return Admission(*external_ips, self.nodeport_source_ranges, self.served, self.scheduler)

    @property
    def left_to_kube_proxy(self) -> str:
        """What a kube-proxy on the same node has to serve, in words; "": nothing."""
        if self.shadow:
            return "all Services (--shadow)"
        return "" if self.served.is_all else f"Services outside of {self.served}"

    @property
    def source(self) -> str:
        """Where the cluster's objects come from, for the operator."""
        if self.manifests:
            return f"manifests in {self.manifests}"
        if self.master:
            return f"the API server {self.master}"
        return f"the API server of {self.kubeconfig or 'this pod'}"
