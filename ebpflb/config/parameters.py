# SPDX-License-Identifier: Apache-2.0
"""Every parameter of kube-proxy: its flag, its fields, the help text, and whether it has an effect.

The effect itself is in translation.py. This table is the source of the options of ``ebpflb run``
and their help, of the warning about parameters without effect, and of the table in
docs/configuration.md.
"""

from collections.abc import Set
from functools import cache
from typing import Any, NamedTuple

from ebpflb.config import fields
from ebpflb.config.fields import KubeProxyConfiguration


class Parameter(NamedTuple):
    """A flag, its fields in the file, or both."""

    flags: str  # names, separated by blanks; kube-proxy's comes first
    fields: str  # paths in the file, separated by blanks
    help: str  # whole sentences; if it is ignored, the reason
    ignored: bool = False  # accepted, but without effect

    @property
    def flag(self) -> str:
        return self.flags.split()[0] if self.flags else ""


def _ignored(flags: str, fields: str, reason: str) -> Parameter:
    return Parameter(flags, fields, reason, ignored=True)


_NOT_READ = "For IPVS itself, Windows or Go's logging, which ebpflb does not have."
_API_CLIENT = "ebpflb reads objects as JSON, with a few watches, and does not throttle them."

# Flags and fields (or whole sections) that nothing reads.
SWITCHES = frozenset({"ipvs-strict-arp", "log-text-split-stream", "log-json-split-stream"})
_IGNORED_FLAGS = """
ipvs-exclude-cidrs ipvs-strict-arp
vmodule log-flush-frequency log-text-split-stream log-text-info-buffer-size
log-json-split-stream log-json-info-buffer-size
"""
IGNORED_FIELDS = """
ipvs.excludeCIDRs ipvs.strictARP portRange winkernel windowsRunAsService
logging.flushFrequency logging.options logging.vmodule
"""

# fmt: off
PARAMETERS = (
    Parameter("config", "",
        "Configuration file. Overrides every flag that has a field in the file."),
    Parameter("write-config-to", "",
        "Write the complete configuration to this file and exit."),
    Parameter("cleanup", "",
        "Remove everything that ebpflb and kube-proxy have set up on this node, and exit."),
    Parameter("init-only", "",
        "Set the kernel's conntrack parameters, try NAT by nftables for the agent, and exit."),
    Parameter("kubeconfig", "clientConnection.kubeconfig",
        "Kubeconfig file with the address and credentials of the API server."),
    Parameter("master", "", "URL of the API server. Overrides the one in the kubeconfig."),
    _ignored("kube-api-content-type", "clientConnection.contentType", _API_CLIENT),
    _ignored("kube-api-qps", "clientConnection.qps", _API_CLIENT),
    _ignored("kube-api-burst", "clientConnection.burst", _API_CLIENT),
    _ignored("", "clientConnection.acceptContentTypes", _API_CLIENT),
    Parameter("hostname-override node-name", "hostnameOverride",
        "Name of this Node, instead of the host name."),
    Parameter("bind-address", "bindAddress",
        "Primary IP address of the Node. If unspecified (0.0.0.0 or ::), the Node's own first "
        "address."),
    Parameter("healthz-bind-address", "healthzBindAddress",
        "Address and port of /healthz and /livez. The port is 10256 if it is left out. An empty "
        "flag disables them."),
    Parameter("metrics-bind-address", "metricsBindAddress",
        "Address and port of /metrics. The port is 10249 if it is left out. An empty flag "
        "disables it."),
    Parameter("healthz-port", "",
        "Port of /healthz; 0 disables it. Deprecated: use --healthz-bind-address."),
    Parameter("metrics-port", "",
        "Port of /metrics; 0 disables it. Deprecated: use --metrics-bind-address."),
    Parameter("bind-address-hard-fail", "bindAddressHardFail",
        "Exit if a port of /healthz or /metrics is already in use."),
    Parameter("profiling", "enableProfiling",
        "Serve /debug/stacks at the address of /metrics."),
    _ignored("show-hidden-metrics-for-version", "showHiddenMetricsForVersion",
        "ebpflb has no hidden metrics."),
    Parameter("feature-gates", "featureGates",
        "Feature gates. AllowServiceExternalIPs=false stops serving externalIPs; other gates "
        "have no effect."),
    Parameter("proxy-mode", "mode",
        "iptables, ipvs, nftables or empty. Only selects the section of the file that the sync "
        "periods, masqueradeAll and masqueradeBit are read from; services are served the same way "
        "in every mode."),
    Parameter("detect-local-mode", "detectLocalMode",
        "How to detect traffic from this node's pods: ClusterCIDR, NodeCIDR, BridgeInterface or "
        "InterfaceNamePrefix."),
    Parameter("cluster-cidr", "clusterCIDR",
        "Addresses of the cluster's pods, for detectLocalMode ClusterCIDR: one CIDR, or an IPv4 "
        "and an IPv6 CIDR separated by a comma."),
    Parameter("pod-bridge-interface", "detectLocal.bridgeInterface",
        "Bridge that pods are attached to, for detectLocalMode BridgeInterface."),
    Parameter("pod-interface-name-prefix", "detectLocal.interfaceNamePrefix",
        "Prefix of the names of pods' devices, for detectLocalMode InterfaceNamePrefix."),
    Parameter("nodeport-addresses", "nodePortAddresses",
        "Node addresses that serve NodePorts: CIDRs, 'primary', 'all' or 'localhost', which the "
        "node's own processes can always use. If empty, 'primary' in every mode."),
    Parameter("masquerade-all", "iptables.masqueradeAll nftables.masqueradeAll",
        "Masquerade (SNAT) all traffic to cluster IPs."),
    Parameter("iptables-masquerade-bit", "iptables.masqueradeBit nftables.masqueradeBit",
        "Bit of the packet mark by which the packet path netfilter tells its masquerade rule what "
        "to masquerade. It is cleared there."),
    _ignored("iptables-localhost-nodeports", "iptables.localhostNodePorts",
        "Processes on the node can always connect to NodePorts on loopback, packets never can."),
    Parameter("iptables-sync-period", "iptables.syncPeriod nftables.syncPeriod",
        "The audit's periods depend on it (reliability.md); /healthz fails when "
        "a change waits for twice this time."),
    Parameter("iptables-min-sync-period", "iptables.minSyncPeriod nftables.minSyncPeriod",
        "Minimum pause between two updates. The default is none (in kube-proxy 1s)."),
    Parameter("ipvs-sync-period", "ipvs.syncPeriod",
        "As --iptables-sync-period, in mode ipvs."),
    Parameter("ipvs-min-sync-period", "ipvs.minSyncPeriod",
        "As --iptables-min-sync-period, in mode ipvs."),
    _ignored("config-sync-period", "configSyncPeriod",
        "Watches are resumed; ebpflb lists again only every 4 to 8 hours, and if the API server"
        " requires it."),
    Parameter("oom-score-adj", "oomScoreAdj",
        "oom_score_adj of the agent. Not set if the kernel does not allow it."),
    Parameter("conntrack-max-per-core", "conntrack.maxPerCore",
        "nf_conntrack_max for each CPU, at most 1048576 in total. It is only ever raised. 0 "
        "leaves it unchanged."),
    Parameter("conntrack-min", "conntrack.min",
        "Minimum of nf_conntrack_max, whatever the number of CPUs."),
    Parameter("conntrack-tcp-timeout-established", "conntrack.tcpEstablishedTimeout",
        "Timeout of idle established TCP connections, in ebpflb and in conntrack. 0 leaves "
        "conntrack unchanged and means 24h in ebpflb."),
    Parameter("conntrack-tcp-timeout-close-wait", "conntrack.tcpCloseWaitTimeout",
        "Timeout of TCP connections that one side has closed, in ebpflb and in conntrack. 0 "
        "leaves conntrack unchanged and means 1h in ebpflb."),
    Parameter("conntrack-tcp-be-liberal", "conntrack.tcpBeLiberal",
        "Let conntrack accept TCP segments outside the window; with auto while no rule of the node "
        "asks for what it finds invalid (configuration.md). The flow tables always do."),
    Parameter("conntrack-udp-timeout", "conntrack.udpTimeout",
        "Timeout of idle UDP flows without a reply, in ebpflb and in conntrack. 0 leaves "
        "conntrack unchanged and means 30s in ebpflb."),
    Parameter("conntrack-udp-timeout-stream", "conntrack.udpStreamTimeout",
        "Timeout of idle UDP flows with replies, in ebpflb and in conntrack. 0 leaves conntrack "
        "unchanged and means 180s in ebpflb."),
    Parameter("ipvs-scheduler", "ipvs.scheduler",
        "In mode ipvs the default of --scheduler: the scheduler of ebpflb that comes next to this "
        "one of the kernel. In other modes it has no effect."),
    Parameter("ipvs-tcp-timeout", "ipvs.tcpTimeout",
        "In mode ipvs the least --conntrack-tcp-timeout-established."),
    Parameter("ipvs-tcpfin-timeout", "ipvs.tcpFinTimeout",
        "In mode ipvs the least --conntrack-tcp-timeout-close-wait."),
    Parameter("ipvs-udp-timeout", "ipvs.udpTimeout",
        "In mode ipvs the least --conntrack-udp-timeout-stream."),
    Parameter("v verbose", "logging.verbosity",
        "Log verbosity. From 4 on, details are logged. SIGUSR2 switches them on and off."),
    Parameter("logging-format", "logging.format",
        "text, or json: a line of JSON with Kubernetes' keys for each message."),
    Parameter("version", "", "Print the version and exit."),
    _ignored("boot-id-file", "", "ebpflb does not read this file."),
    _ignored("machine-id-file", "", "ebpflb does not read this file."),
    *(_ignored(flag, "", _NOT_READ) for flag in _IGNORED_FLAGS.split()),
)
# fmt: on

# The flags that have an effect even with --config (kube-proxy.md 15).
EFFECTIVE_WITH_CONFIG = (
    frozenset(parameter.flag for parameter in PARAMETERS if not parameter.fields)
    - {"healthz-port", "metrics-port"}
    | {"hostname-override"}
    | {each.flag for each in PARAMETERS if each.fields.startswith("logging.")}
)


def type_of(parameter: Parameter) -> Any:
    """Return the type of its fields; None for a flag without a field."""
    return _field_types()[parameter.fields.split()[0]] if parameter.fields else None


@cache
def _field_types() -> dict[str, Any]:
    return dict(fields.leaf_fields())


def ignored_flags(flags: Set[str]) -> list[str]:
    """Return those of ``flags`` that have no effect."""
    return [f"--{each.flag}" for each in PARAMETERS if each.ignored and each.flag in flags]


def ignored_fields(config: KubeProxyConfiguration) -> list[str]:
    """Return the fields without effect whose value is not the default."""
    default = KubeProxyConfiguration()
    paths = (path for each in PARAMETERS if each.ignored for path in each.fields.split())
    return [
        path for path in paths if fields.value_at(config, path) != fields.value_at(default, path)
    ]
