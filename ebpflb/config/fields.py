# SPDX-License-Identifier: Apache-2.0
"""KubeProxyConfiguration, kubeproxy.config.k8s.io/v1alpha1, as of kube-proxy 1.36.

Fields that nothing here reads are left out (``parameters.IGNORED_FIELDS``).

The defaults are those of kube-proxy (kube-proxy.md 15), with one exception: minSyncPeriod is 0,
because no pause is needed between two writes. Except in ``POINTERS``, a zero value ("", 0, "0s")
counts as not set.

A field is named by its path in the file, as kubectl writes it: "conntrack.min",
"nodePortAddresses[0]".
"""

from collections.abc import Iterator, Mapping, Set
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import yaml

from ebpflb.model.addresses import Duration, parse_address

API_VERSION = "kubeproxy.config.k8s.io/v1alpha1"
KIND = "KubeProxyConfiguration"

HEALTHZ_PORT, METRICS_PORT = 10256, 10249

# Fields that are pointers in Go: zero is a value of its own.
POINTERS = frozenset(
    {
        "localhost_node_ports",
        "masquerade_bit",
        "max_per_core",
        "min",
        "oom_score_adj",
        "tcp_be_liberal",
        "tcp_close_wait_timeout",
        "tcp_established_timeout",
    }
)

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
Liberal = bool | Literal["auto"]  # whether conntrack accepts segments out of the window
Uint32 = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]

SECOND = 10**9
_HALF_A_MINUTE = Duration(30 * SECOND)

Section_ = TypeVar("Section_", bound="Section")


class Section(msgspec.Struct, frozen=True, rename="camel"):
    """A part of the file."""


class ClientConnection(Section, frozen=True):
    kubeconfig: str = ""
    accept_content_types: str = ""
    content_type: str = "application/vnd.kubernetes.protobuf"
    qps: float = 5.0
    burst: Int32 = 10


class Logging(Section, frozen=True):
    format: str = "text"
    verbosity: Uint32 = 0


class IPTables(Section, frozen=True):
    masquerade_bit: Int32 = 14
    masquerade_all: bool = False
    localhost_node_ports: bool = True
    sync_period: Duration = _HALF_A_MINUTE
    min_sync_period: Duration = Duration(0)


class IPVS(Section, frozen=True):
    sync_period: Duration = _HALF_A_MINUTE
    min_sync_period: Duration = Duration(0)
    scheduler: str = ""
    tcp_timeout: Duration = Duration(0)
    tcp_fin_timeout: Duration = Duration(0)
    udp_timeout: Duration = Duration(0)


class NFTables(Section, frozen=True):
    masquerade_bit: Int32 = 14
    masquerade_all: bool = False
    sync_period: Duration = _HALF_A_MINUTE
    min_sync_period: Duration = Duration(0)


class Conntrack(Section, frozen=True):
    max_per_core: Int32 = 32 * 1024
    min: Int32 = 128 * 1024
    tcp_established_timeout: Duration = Duration(24 * 3600 * SECOND)
    tcp_close_wait_timeout: Duration = Duration(3600 * SECOND)
    tcp_be_liberal: Liberal | None = None  # None: not given
    udp_timeout: Duration = Duration(0)
    udp_stream_timeout: Duration = Duration(0)


class DetectLocal(Section, frozen=True):
    bridge_interface: str = ""
    interface_name_prefix: str = ""


class KubeProxyConfiguration(Section, frozen=True):
    """The whole file.

    After reading, healthzBindAddress and metricsBindAddress have a port; only a flag can make them
    "", which means that nothing listens.
    """

    api_version: str = API_VERSION
    kind: str = KIND
    feature_gates: dict[str, bool] = {}
    client_connection: ClientConnection = ClientConnection()
    logging: Logging = Logging()
    hostname_override: str = ""
    bind_address: str = "0.0.0.0"
    healthz_bind_address: str = ""  # 0.0.0.0:10256, or [::] if bindAddress is IPv6
    metrics_bind_address: str = ""  # 127.0.0.1:10249, or [::1] if bindAddress is IPv6
    bind_address_hard_fail: bool = False
    enable_profiling: bool = False
    show_hidden_metrics_for_version: str = ""
    mode: str = ""
    iptables: IPTables = IPTables()
    ipvs: IPVS = IPVS()
    nftables: NFTables = NFTables()
    detect_local_mode: str = "ClusterCIDR"
    detect_local: DetectLocal = DetectLocal()
    cluster_cidr: str = msgspec.field(default="", name="clusterCIDR")
    node_port_addresses: tuple[str, ...] = ()  # empty: like "primary", in every mode
    oom_score_adj: Int32 = -999
    conntrack: Conntrack = Conntrack()
    config_sync_period: Duration = Duration(15 * 60 * SECOND)

    @property
    def mode_section(self) -> IPTables | IPVS | NFTables:
        """The section of the mode, which has the sync periods (kube-proxy.md 15)."""
        if self.mode == "ipvs":
            return self.ipvs
        return self.nftables if self.mode == "nftables" else self.iptables

    @property
    def masquerade_section(self) -> IPTables | NFTables:
        """The section with masqueradeAll; section ipvs has no such fields (kube-proxy.md 15)."""
        return self.nftables if self.mode == "nftables" else self.iptables


def with_defaults(section: Section_) -> Section_:
    """Replace zero values by the defaults, except in ``POINTERS``."""
    changes: dict[str, Any] = {}
    for field in msgspec.structs.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, Section):
            changes[field.name] = with_defaults(value)
        elif not value and field.name not in POINTERS and field.default is not msgspec.NODEFAULT:
            changes[field.name] = field.default
    return msgspec.structs.replace(section, **changes)


def to_builtins(value: Any) -> Any:
    """Return the fields by their names in the file, in JSON's types; durations as text."""
    return msgspec.to_builtins(value, enc_hook=str)


def as_yaml(configuration: KubeProxyConfiguration) -> str:
    """Return a file that ``config_file.read`` reads back to the same configuration."""
    return yaml.safe_dump(to_builtins(configuration), sort_keys=False)


def join_path(path: str, field: object) -> str:
    """Return the path of a field (a name) or of an element (an index) below this path."""
    if isinstance(field, int):
        return f"{path}[{field}]"
    return f"{path}.{field}" if path else str(field)


def leaf_fields(
    kind: type[Section] = KubeProxyConfiguration, path: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield path and type of every field of the file that is not a section."""
    for field in msgspec.structs.fields(kind):
        at = join_path(path, field.encode_name)
        if isinstance(field.type, type) and issubclass(field.type, Section):
            yield from leaf_fields(field.type, at)
        else:
            yield at, field.type


def value_at(section: Section, path: str) -> Any:
    """Return the value of the field with this path."""
    value: Any = section
    for name in path.split("."):
        fields = {field.encode_name: field.name for field in msgspec.structs.fields(value)}
        value = getattr(value, fields[name])
    return value


def replace_at(section: Section_, path: str, value: Any) -> Section_:
    """Return a copy of the section with another value at the path."""
    first, _, rest = path.partition(".")
    fields = {field.encode_name: field.name for field in msgspec.structs.fields(section)}
    inner = replace_at(getattr(section, fields[first]), rest, value) if rest else value
    return msgspec.structs.replace(section, **{fields[first]: inner})


# healthzBindAddress and metricsBindAddress: ADDRESS:PORT (kube-proxy.md 13, 15). By path: the
# default address if bindAddress is IPv4, if it is IPv6, and the default port.
_LISTENING = {
    "healthzBindAddress": ("0.0.0.0", "::", HEALTHZ_PORT),
    "metricsBindAddress": ("127.0.0.1", "::1", METRICS_PORT),
}
LISTEN_FIELDS = tuple(_LISTENING)


def complete_listen_address(
    config: KubeProxyConfiguration, explicit: Set[str], ports: Mapping[str, int]
) -> KubeProxyConfiguration:
    """Complete both addresses.

    ``explicit``: the paths that the operator has set; the others get the default of bindAddress's
    family. ``ports``: by path, the port for an address without one, instead of the default port.
    """
    for path, (v4, v6, port) in _LISTENING.items():
        default = v6 if ":" in config.bind_address else v4
        address = value_at(config, path) if path in explicit else default
        config = replace_at(config, path, with_port(address, ports.get(path) or port))
    return config


def with_port(text: str, port: int) -> str:
    """Add the port to an address without one; other text is returned unchanged."""
    try:
        address = parse_address(text)
    except ValueError:
        return text
    return f"[{text}]:{port}" if address.version == 6 else f"{text}:{port}"
