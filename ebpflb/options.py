# SPDX-License-Identifier: Apache-2.0
"""What the operator sets, on the command line or in kube-proxy's configuration file.

An option that kube-proxy does not have is declared once, as a field with a ``Flag``. From that
come the option of ``ebpflb run``, its line in /flagz, and its row in docs/configuration.md, where
tests/config/page.py adds links and the value of the Helm chart.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from ebpflb.entries.flows import STREAM_AFTER
from ebpflb.entries.services import Settings
from ebpflb.model import addresses, annotations, nodes
from ebpflb.model.addresses import Address, MapSizes, Network, host_port, parse_host_port
from ebpflb.model.devices import PRIMARY, LocalDetector, check_pattern
from ebpflb.model.nodes import FAST_FORWARDS, FORWARD_OFF, FORWARD_ON
from ebpflb.model.packet_path import (
    AUTO,
    KERNEL_UDP_STREAM_TIMEOUT,
    KERNEL_UDP_TIMEOUT,
    OFF,
    PACKET_PATHS,
    Engine,
    PacketMark,
    parse_mark,
)
from ebpflb.model.pools import Pools, parse_pools, show_pools
from ebpflb.model.services import (
    ALL_EXTERNAL_IPS,
    Admission,
    ExternalIps,
    Requirement,
    ServedServices,
    WholeAddresses,
    parse_external_ips,
    parse_namespaces,
    parse_requirements,
    show_namespaces,
    show_requirements,
)

_LAST_PORT = 65535
_PERCENT = 100
_HOST = re.compile(r"([\w.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]+", re.ASCII)


class Flag(NamedTuple):
    """How an option of ``ebpflb run`` is written, read and explained."""

    name: str  # such as "--devices"
    help: str  # whole sentences
    default_text: str = ""  # in words, if the field's own default does not say it
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    removed: Mapping[str, str] = {}  # a choice that was removed -> the one that is used instead
    without_value: str = ""  # what the option alone means
    repeated: bool = False  # can be given several times; ``parse`` then takes all texts
    parse: Callable[[Any], Any] | None = None  # text -> the field's value; raises ValueError
    show: Callable[[Any], Any] | None = None  # the inverse of ``parse``
    is_directory: bool = False  # can be given by the environment too
    must_exist: bool = False  # the directory

    @property
    def argument(self) -> str:
        """The name of the function argument in which click passes the value."""
        return self.name.lstrip("-").replace("-", "_")

    @property
    def variable(self) -> str | None:
        """The environment variable that sets the same option, if any."""
        return f"EBPFLB_{self.argument.upper()}" if self.is_directory else None

    def shown(self, value: Any) -> Any:
        """Return the field's value as a string, number, boolean or list."""
        return self.show(value) if self.show else value


_NO_PINGS = "agents do not probe other nodes any more; --endpoint-health=passive notices dead nodes"
# Options that a former version had -> what has become of them. Each is accepted, and has no effect.
REMOVED_OPTIONS = {"--node-health-key": _NO_PINGS, "--node-health-service": _NO_PINGS}


def option(default: Any, name: str, help: str, **details: Any) -> Any:
    """Return a dataclass field for an option; with the default MISSING it must always be given."""
    return field(default=default, metadata={"flag": Flag(name, help, **details)})


def flags_of(kind: Any) -> Iterator[tuple[str, Flag, Any]]:
    """Yield each field of Options or Paths that has a flag, its flag, and its default (or None)."""
    for each in fields(kind):
        if flag := each.metadata.get("flag"):
            yield each.name, flag, None if each.default is MISSING else each.default


def parse_ports(text: str) -> tuple[int, int]:
    """Parse LOW-HIGH as (low, high)."""
    low, dash, high = text.partition("-")
    if not (dash and low.isdecimal() and high.isdecimal()):
        raise ValueError(f'"{text}" is not LOW-HIGH such as 10000-29999')
    first, last = int(low), int(high)
    if not 1 <= first <= last <= _LAST_PORT:
        raise ValueError(f'"{text}" is not a range of ports from 1 to {_LAST_PORT}')
    return first, last


def _parse_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in patterns:
        check_pattern(pattern)
    return patterns


def _parse_listen_address(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if address and not (colon and port.isdecimal() and 0 < int(port) <= _LAST_PORT):
        raise ValueError(f'"{address}" is not HOST:PORT')
    if ":" in host and not host.startswith("["):
        raise ValueError(f'"{address}": an IPv6 address is written in brackets')
    return address


def parse_api_servers(texts: tuple[str, ...]) -> tuple[str, ...]:
    parts = [part.strip() for text in texts for part in text.split(",")]
    return tuple(dict.fromkeys(map(_parse_api_server, parts)))


def _parse_api_server(text: str) -> str:
    """Return the URL for HOST:PORT, or for the URL of a server."""
    url = text if "://" in text else f"https://{text}"
    try:
        found = urlsplit(url)
        is_one = found.scheme in ("http", "https") and _HOST.fullmatch(found.netloc) and found.port
    except ValueError:
        is_one = False
    if not is_one or found.path.strip("/") or found.query or found.fragment:
        raise ValueError(f'"{text}" is not HOST:PORT such as 192.0.2.1:6443 or [2001:db8::1]:6443')
    return f"{found.scheme}://{found.netloc}"


def _parse_local_api_server(text: str) -> tuple[Address, int]:
    try:
        address, port = parse_host_port(text)
    except ValueError:
        address = None
    if address is None or not address.is_loopback:
        raise ValueError(f'"{text}" is not a loopback address and port such as 127.0.0.1:7445')
    return address, port


def _parse_share(text: str) -> float:
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(_PERCENT))
    if not (is_number and 1 <= int(text) <= _PERCENT):
        raise ValueError(f'"{text}" is not a number from 1 to {_PERCENT}')
    return int(text) / _PERCENT


def _filled(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a ``parse`` that refuses empty text, which an unset shell variable leaves."""

    def parse_filled(text: str) -> Any:
        if not text.strip():
            raise ValueError("is empty; leave the option out to mean all")
        return parse(text)

    return parse_filled


MOST_SERIES = 1000  # service ports


class SeriesOf(NamedTuple):
    """The service ports that have series: the busiest ``limit`` of Services with these labels."""

    limit: int
    selector: tuple[Requirement, ...] = ()


def parse_series(text: str) -> SeriesOf | None:
    """Parse NUMBER or NUMBER,SELECTOR; None for 0. Raises ValueError."""
    number, _, selector = text.partition(",")
    is_number = number.isascii() and number.isdecimal() and len(number) <= len(str(MOST_SERIES))
    if not (is_number and int(number) <= MOST_SERIES):
        raise ValueError(f'"{number}" is not a number of service ports from 0 to {MOST_SERIES}')
    required = parse_requirements(selector)
    return SeriesOf(int(number), required) if int(number) else None


def show_series(series: SeriesOf | None) -> str:
    """The inverse of ``parse_series``."""
    if series is None:
        return "0"
    return ",".join([str(series.limit), *(each.text for each in series.selector)])


# What the audit does about differences from the plan.
AUDITS = (REPAIR, REPORT) = ("repair", "report")
# Whose connections are translated at sockets; all others are translated at the device.
SOCKET_TRANSLATIONS = (ALL_SOCKETS, HOST_SOCKETS) = ("all", "host")


@dataclass(frozen=True)
class Paths:
    """One agent's directories and files; each agent on a machine needs its own."""

    # In a bpffs: the pinned maps and links, which serve while no agent runs.
    state: Path = option(
        Path("/sys/fs/bpf/ebpflb"),
        "--state-dir",
        "Directory in a bpffs for pinned maps and links. Each node on a machine needs its own.",
        is_directory=True,
    )
    # The agent's own files.
    run: Path = option(
        Path("/run/ebpflb"),
        "--run-dir",
        "Directory of the agent's lock, status and history.",
        is_directory=True,
    )
    cache: Path = option(
        Path("/var/cache/ebpflb"),
        "--cache-dir",
        "Directory for compiled bytecode.",
        is_directory=True,
    )
    known_as: str = ""  # where the agent sees another name of the state directory: its ``name``

    @property
    def status_file(self) -> Path:
        return self.run / f"{self.name}.json"

    @property
    def history_file(self) -> Path:
        return self.run / f"{self.name}.history"

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
    def answers_file(self) -> Path:
        """The kernel's abilities found by `run --init-only`, for all agents of the machine."""
        return self.run / "kernel.json"

    @property
    def ports_file(self) -> Path:
        return self.run / f"{self.name}.ports"

    @property
    def liberal_file(self) -> Path:
        return self.run / f"{self.name}.liberal"

    @property
    def failure_file(self) -> Path:
        """A file whose modification time says when an agent ended because a part of it kept
        failing.
        """
        return self.run / f"{self.name}.failed"

    @property
    def api_servers_file(self) -> Path:
        return self.cache / f"{self.name}.api-servers.json"

    @property
    def name(self) -> str:
        """The name of this agent's files in the run directory, which several agents may share."""
        return self.known_as or str(self.state).strip("/").replace("/", "-")


@dataclass(frozen=True)
class ConntrackOptions:
    """Limits and timeouts of the kernel's connection tracking (kube-proxy.md 11.3).

    Timeouts are in seconds, and apply to the flows of the packet path too. 0 keeps the kernel's
    value.
    """

    max_per_core: int = 32 * 1024  # entries
    min_total: int = 128 * 1024  # entries, on machines with few cores
    established: int = 24 * 3600
    close_wait: int = 3600
    be_liberal: bool = False
    udp: int = 0
    udp_stream: int = 0
    follows_rules: bool = False  # be_liberal is on while no rule of the node needs it off


# Where replies leave: as the backend's packets are routed, or where their requests came in.
REPLY_PATHS = ROUTE, REQUEST_DEVICE = "route", "request-device"
UNKNOWN_PORTS = (UNKNOWN_ROUTED, UNKNOWN_PASS, UNKNOWN_REJECT, UNKNOWN_DROP) = (
    "off",
    "pass",
    "reject",
    "drop",
)


@dataclass(frozen=True)
class Options:
    """All options of one agent."""

    paths: Paths
    node_name: str
    cgroup: Path = option(
        MISSING,
        "--cgroup-root",
        "Cgroup whose sockets are served, or a directory with a mount of cgroup v2 below it.",
        default_text="the root of cgroup v2",
        is_directory=True,
    )
    # None: the Kubernetes API.
    manifests: Path | None = option(
        None,
        "--manifests",
        "Read Services, EndpointSlices and Nodes from the YAML files in this directory, not"
        " from the API server.",
        is_directory=True,
        must_exist=True,
        parse=Path.absolute,
    )
    kubeconfig: Path | None = None  # None: the pod's own
    master: str = ""  # the API server's URL, where it is not the kubeconfig's
    # URLs; if empty, the API server of ``master``, of the kubeconfig or of the pod is asked.
    api_servers: tuple[str, ...] = option(
        (),
        "--api-server",
        "Ask these API servers in turn, with the credentials of the kubeconfig or the pod: no load"
        " balancer is needed before them. Can be repeated.",
        default_text="the kubeconfig's, or the pod's",
        metavar="HOST:PORT,...",
        repeated=True,
        parse=parse_api_servers,
        show=",".join,
    )
    local_api_server: tuple[Address, int] | None = option(
        None,
        "--local-api-server",
        "Serve the API servers (Service default/kubernetes) at this loopback address too, for"
        " processes in the node's own network namespace, such as its kubelet.",
        default_text="none",
        metavar="ADDRESS:PORT",
        parse=_parse_local_api_server,
        show=lambda found: host_port(*found) if found else "",
    )
    nodeport_addresses: tuple[str, ...] = PRIMARY
    guard_nodeports: bool = option(
        True, "--guard-nodeports", "Make bind() to a NodePort fail in the node's network namespace."
    )
    devices: tuple[str, ...] = option(
        (),
        "--devices",
        "Serve packets on network devices with this name ('eth*'), or not on these ('!cali*')."
        " Can be repeated.",
        default_text="all but loopback",
        metavar="PATTERN",
        repeated=True,
        parse=_parse_patterns,
    )
    packet_path: str = option(
        AUTO,
        "--packet-path",
        "What translates packets: the kernel's NAT (netfilter), ebpflb's own flow tables"
        " (flows), or netfilter wherever its NAT works with nftables (auto).",
        choices=PACKET_PATHS,
        removed={"conntrack": Engine.NETFILTER},
    )
    socket_translation: str = option(
        ALL_SOCKETS,
        "--socket-translation",
        "Which sockets are connected to an endpoint: all, or with host only those in the node's own"
        " network namespace. Service meshes and rules inside pods then see the Service's address.",
        choices=SOCKET_TRANSLATIONS,
    )
    audit: str = option(
        REPAIR,
        "--audit",
        "What to do with programs, pins and map entries that others have changed: repair or only"
        " report them.",
        choices=AUDITS,
    )
    # Name -> entries, where not as in maps.h.
    map_sizes: MapSizes = option(
        (),
        "--map-size",
        f"Other sizes of maps: {', '.join(addresses.SIZES)} (scale.md has the memory for"
        " each). The flows of packets start empty.",
        metavar="NAME=ENTRIES,...",
        repeated=True,
        parse=lambda texts: addresses.parse_map_sizes(",".join(texts)),
        show=addresses.show_map_sizes,
    )
    detector: LocalDetector = field(default_factory=LocalDetector)
    masquerade_all: bool = False
    masquerade_local_backends: bool = option(
        False,
        "--masquerade-local-backends",
        "Masquerade external clients also for backends on this node, as kube-proxy does.",
    )
    masquerade_mark: int = 0x4000  # one bit, on the engine netfilter
    masquerade_ports: tuple[int, int] = option(
        (10000, 29999),
        "--masquerade-ports",
        "Source ports of masqueraded connections of the flow tables, which nothing else on the "
        "node uses.",
        metavar="LOW-HIGH",
        parse=parse_ports,
        show=lambda ports: "{}-{}".format(*ports),
    )
    reply_path: str = option(
        ROUTE,
        "--reply-path",
        "How replies of the flow tables leave: as the backend's packets are routed (route), or "
        "by the device where their request came in (request-device).",
        choices=REPLY_PATHS,
    )
    fast_forward: str = option(
        FORWARD_OFF,
        "--fast-forward",
        "Forward packets of established flows, from the 17th on, from device to device by the "
        "kernel's flowtable, past routing rules, netfilter and conntrack; with auto as long as no "
        "rule on the node acts on each packet or can drop one. Without effect on the packet path "
        "flows.",
        choices=FAST_FORWARDS,
        without_value=FORWARD_ON,
    )
    packet_mark: PacketMark = option(
        OFF,
        "--packet-mark",
        "Set this mark on packets that the flow tables translate at ingress, so that netfilter "
        "rules can accept them; with it --packet-path=auto chooses the flow tables.",
        default_text="none",
        metavar="MARK/MASK",
        parse=parse_mark,
        show=str,
    )
    bind_address: Address | None = None  # the Node's primary address, whatever the Node says
    healthz_address: str = "0.0.0.0:10256"  # "": not served
    # "": not served; as healthz_address, but ours alone.
    readyz_address: str = option(
        "127.0.0.1:10247",
        "--readyz-bind-address",
        "A second address of /readyz, /healthz and /livez, at which no kube-proxy answers;"
        ' "" disables it.',
        metavar="HOST:PORT",
        parse=_parse_listen_address,
    )
    # One of nodes.KINDS.
    node_readiness: str = option(
        nodes.OFF,
        "--node-readiness",
        "How the Node says in the API whether Services work there, so that no pods come before:"
        f" by its condition {nodes.CONDITION_TYPE} (condition), or by removing its taint"
        f" {nodes.TAINT_KEY} (taint).",
        choices=nodes.KINDS,
    )
    metrics_address: str = "127.0.0.1:10249"  # "": not served
    service_metrics: SeriesOf | None = option(
        None,
        "--service-metrics",
        "How many service ports have series of their own in /metrics: the busiest, of Services"
        f" with these labels if a selector follows; at most {MOST_SERIES}.",
        default_text="0",
        metavar="NUMBER[,SELECTOR]",
        parse=parse_series,
        show=show_series,
    )
    bind_address_hard_fail: bool = False
    profiling: bool = False
    # Seconds: the audit's periods depend on it; /healthz fails after twice as long.
    sync_period: float = 30.0
    min_sync_period: float = 0.0  # seconds from the end of a sync to the next one
    namespaces: frozenset[str] = option(
        frozenset(),
        "--namespaces",
        "Serve only Services of these namespaces; a kube-proxy beside ebpflb serves the others.",
        default_text="all",
        metavar="NAME,...",
        parse=_filled(parse_namespaces),
        show=show_namespaces,
    )
    services: tuple[Requirement, ...] = option(
        (),
        "--services",
        "Serve only Services with these labels, as kubectl's -l; a kube-proxy beside ebpflb "
        "serves the others.",
        default_text="all",
        metavar="SELECTOR",
        parse=_filled(parse_requirements),
        show=show_requirements,
    )
    # The share of each map for one namespace, from 0 to 1.
    namespace_share: float = option(
        0.8,
        "--namespace-share",
        "How much of each map of services, endpoints, source ranges and tables the Services of"
        " one namespace may use. What does not fit is named by `ebpflb status` and an Event.",
        metavar="PERCENT",
        parse=_parse_share,
        show=lambda share: round(_PERCENT * share),
    )
    # One of SCHEDULERS, of Services without the annotation; unset: by kube-proxy's configuration.
    scheduler: str = option(
        annotations.RANDOM,
        "--scheduler",
        "How new connections get their endpoint, unless the Service's annotation"
        f" {annotations.SCHEDULER_ANNOTATION} says otherwise.",
        default_text="random; in mode ipvs the nearest to --ipvs-scheduler, or round-robin",
        choices=annotations.SCHEDULERS,
    )
    # One of ENDPOINT_HEALTH, of Services without the annotation.
    endpoint_health: str = option(
        annotations.HEALTH_OFF,
        "--endpoint-health",
        "Whether endpoints are set aside for a while to which clients of this node fail to open"
        " connections (passive) or not (off), unless the Service's annotation"
        f" {annotations.HEALTH_ANNOTATION} says otherwise.",
        choices=annotations.ENDPOINT_HEALTH,
        removed={"nodes": annotations.HEALTH_PASSIVE},
    )
    node_local_addresses: tuple[Address, ...] = option(
        annotations.NODE_LOCAL_DNS,
        "--node-local-addresses",
        "The addresses that the annotation"
        f" {annotations.NODE_LOCAL_ANNOTATION} of a Service may name. What listens there on a"
        " node gets what clients send to such a Service.",
        metavar="none|ADDRESS,...",
        parse=annotations.parse_addresses,
        show=annotations.show_addresses,
    )
    answer_pings: bool = option(
        False,
        "--answer-pings",
        "Answer pings to the addresses of Services that have endpoints, except from this node.",
    )
    # One of UNKNOWN_PORTS.
    unknown_ports: str = option(
        UNKNOWN_ROUTED,
        "--load-balancer-unknown-ports",
        "What happens to packets for a load balancer's address at a port that no Service has: they"
        " are refused (reject), dropped (drop), passed to the node's stack unless its route leads"
        " back to where they came from (pass), or routed even then (off).",
        choices=UNKNOWN_PORTS,
    )
    shadow: bool = option(
        False,
        "--shadow",
        "Only count decisions: no new connection is translated, refused or dropped, and"
        " a kube-proxy beside ebpflb serves everything. Existing connections continue.",
    )
    serve_external_ips: bool = True
    # Those that are served, if any are.
    external_ips: ExternalIps = option(
        ALL_EXTERNAL_IPS,
        "--external-ips",
        "Which of the Services' externalIPs are served. Everyone who may write a Service can "
        "claim any address with them (CVE-2020-8554).",
        metavar="all|none|CIDR,...",
        parse=parse_external_ips,
        show=str,
    )
    l2_pools: Pools = option(
        (),
        "--l2-pool",
        "Addresses for Services of type LoadBalancer with loadBalancerClass ebpflb.io/l2, of both"
        " families, for which the nodes answer by ARP and NDP; for namespaces with these labels."
        " Can be repeated.",
        default_text="none",
        metavar="RANGE,...[@SELECTOR]",
        repeated=True,
        parse=parse_pools,
        show=show_pools,
    )
    # One of HAND_OVER.
    hand_over: str = option(
        annotations.HAND_OVER_OFF,
        "--hand-over",
        "Whose requests at load balancer and external addresses are handed unchanged to a node with"
        " an endpoint on the same segment, so that the endpoint sees the client's address: of"
        " Services with externalTrafficPolicy Local or annotation"
        f" {annotations.FORWARDING_ANNOTATION}=keep-client (auto), of all (keep-client), or of none"
        " (off).",
        choices=annotations.HAND_OVER,
    )
    nodeport_source_ranges: tuple[Network, ...] = option(
        (),
        "--nodeport-source-ranges",
        "The clients that NodePorts accept, including pods and the node, unless the Service's"
        f" annotation {annotations.NODEPORT_RANGES_ANNOTATION} says otherwise.",
        default_text="everyone",
        metavar="CIDR,...",
        parse=_filled(annotations.parse_networks),
        show=annotations.show_networks,
    )
    conntrack: ConntrackOptions = ConntrackOptions()
    oom_score_adj: int = -999
    configuration: msgspec.Struct | None = None  # all of kube-proxy's, for /configz
    removed_settings: Mapping[str, str] = field(default_factory=dict)  # that are set -> what to do

    @property
    def map_settings(self) -> Settings:
        """The fields of the map ``settings`` that the operator sets.

        A flag "reply_to_device" is SETTING_REPLY_TO_DEVICE in bpf/layout/node.h.
        """
        flags = {
            "guard_nodeports": self.guard_nodeports,
            "masquerade_all": self.masquerade_all,
            "masquerade_here": self.masquerade_local_backends,
            "reply_to_device": self.reply_path == REQUEST_DEVICE,
            "host_sockets": self.socket_translation == HOST_SOCKETS,
            "shadow": self.shadow,
            "answer_pings": self.answer_pings,
            "unknown_ports": self.unknown_ports != UNKNOWN_ROUTED,
            "unknown_reject": self.unknown_ports == UNKNOWN_REJECT,
            "unknown_drop": self.unknown_ports == UNKNOWN_DROP,
        }
        first, last = self.masquerade_ports
        mark, mask = self.packet_mark
        return Settings(
            flags=frozenset(flag for flag, is_set in flags.items() if is_set),
            first_port=first,
            last_port=last,
            mark=mark,
            mark_mask=mask,
            stream_after=STREAM_AFTER,
            udp_timeout=self.conntrack.udp or KERNEL_UDP_TIMEOUT,
            udp_stream_timeout=self.conntrack.udp_stream or KERNEL_UDP_STREAM_TIMEOUT,
        )

    @property
    def conntrack_wanted(self) -> ConntrackOptions:
        """The wanted settings of conntrack. With --fast-forward it must not check TCP windows."""
        liberal = self.conntrack.be_liberal or self.has_flowtable
        return replace(self.conntrack, be_liberal=liberal)

    @property
    def liberal_by_rules(self) -> bool:
        """Whether --conntrack-tcp-be-liberal=auto can have an effect."""
        is_decided = self.conntrack_wanted.be_liberal or self.shadow
        return self.conntrack.follows_rules and not is_decided and self.packet_path != Engine.FLOWS

    @property
    def has_flowtable(self) -> bool:
        """Whether --fast-forward can have an effect: the engine `flows` has no fast path."""
        return self.fast_forward != FORWARD_OFF and self.packet_path != Engine.FLOWS

    @property
    def served(self) -> ServedServices:
        """The Services that are served on this node."""
        return ServedServices(self.namespaces, self.services)

    @property
    def admission(self) -> Admission:
        """What Services may do on this node."""
        return Admission(
            serve_external_ips=self.serve_external_ips,
            external_ips=self.external_ips,
            nodeport_source_ranges=self.nodeport_source_ranges,
            served=self.served,
            scheduler=self.scheduler,
            local_api_server=self.local_api_server,
            keeps_api_servers=self.keeps_api_servers,
            endpoint_health=self.endpoint_health,
            node_local_addresses=self.node_local_addresses,
            whole_addresses=self.whole_addresses,
            pools=self.l2_pools,
            hand_over=annotations.HAND_OVER_OFF if self.shadow else self.hand_over,
        )

    @property
    def whole_addresses(self) -> WholeAddresses:
        """Which service addresses the programs must know even for ports that no Service has."""
        if self.answer_pings:
            return WholeAddresses.ALL
        routed = self.unknown_ports == UNKNOWN_ROUTED
        return WholeAddresses.NONE if routed else WholeAddresses.BALANCED

    @property
    def keeps_api_servers(self) -> bool:
        """Whether the endpoints of default/kubernetes are kept, and their health is watched."""
        return bool(self.api_servers or self.local_api_server)

    @property
    def left_to_kube_proxy(self) -> str:
        """In words, what a kube-proxy on the same node has to serve; "" for nothing."""
        if self.shadow:
            return "all Services (--shadow)"
        return "" if self.served.is_all else f"Services outside of {self.served}"

    @property
    def source(self) -> str:
        """Where the cluster's objects come from, for the operator."""
        if self.manifests:
            return f"manifests in {self.manifests}"
        if self.api_servers:
            return f"the API servers {', '.join(self.api_servers)}"
        if self.master:
            return f"the API server {self.master}"
        return f"the API server of {self.kubeconfig or 'this pod'}"
