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
    required: str  # kube-proxy.md 15: M must be honoured, A must be accepted, N is not applicable
    help: str  # whole sentences; if it is ignored, the reason
    ignored: bool = False  # accepted, but without effect

    @property
    def flag(self) -> str:
        return self.flags.split()[0] if self.flags else ""


def _ignored(flags: str, fields: str, required: str, reason: str) -> Parameter:
    return Parameter(flags, fields, required, reason, ignored=True)


_NO_IPVS = "ebpflb does not use IPVS."
_NO_WINDOWS = "ebpflb runs on Linux only."
_LOG = "The log is plain text on stderr, without a buffer."
_API_CLIENT = "ebpflb reads objects as JSON, with a few watches, and does not throttle them."

# fmt: off
PARAMETERS = (
    Parameter("config", "", "M",
        "Configuration file. Overrides every flag that has a field in the file."),
    Parameter("write-config-to", "", "A",
        "Write the complete configuration to this file and exit."),
    Parameter("cleanup", "", "M",
        "Remove everything that ebpflb and kube-proxy have set up on this node, and exit."),
    Parameter("init-only", "", "A", "Set the kernel's conntrack parameters and exit."),
    Parameter("kubeconfig", "clientConnection.kubeconfig", "M",
        "Kubeconfig file with the address and credentials of the API server."),
    Parameter("master", "", "M", "URL of the API server. Overrides the one in the kubeconfig."),
    _ignored("kube-api-content-type", "clientConnection.contentType", "A", _API_CLIENT),
    _ignored("kube-api-qps", "clientConnection.qps", "A", _API_CLIENT),
    _ignored("kube-api-burst", "clientConnection.burst", "A", _API_CLIENT),
    _ignored("", "clientConnection.acceptContentTypes", "A", _API_CLIENT),
    Parameter("hostname-override node-name", "hostnameOverride", "M",
        "Name of this Node, instead of the host name."),
    Parameter("bind-address", "bindAddress", "M",
        "Primary IP address of the Node. If unspecified (0.0.0.0 or ::), the Node's own first "
        "address."),
    Parameter("healthz-bind-address", "healthzBindAddress", "M",
        "Address and port of /healthz and /livez. The port is 10256 if it is left out. An empty "
        "flag disables them."),
    Parameter("metrics-bind-address", "metricsBindAddress", "M",
        "Address and port of /metrics. The port is 10249 if it is left out. An empty flag "
        "disables it."),
    Parameter("healthz-port", "", "A",
        "Port of /healthz; 0 disables it. Deprecated: use --healthz-bind-address."),
    Parameter("metrics-port", "", "A",
        "Port of /metrics; 0 disables it. Deprecated: use --metrics-bind-address."),
    Parameter("bind-address-hard-fail", "bindAddressHardFail", "M",
        "Exit if a port of /healthz or /metrics is already in use."),
    Parameter("profiling", "enableProfiling", "A",
        "Serve /debug/stacks at the address of /metrics."),
    _ignored("show-hidden-metrics-for-version", "showHiddenMetricsForVersion", "A",
        "ebpflb has no hidden metrics."),
    Parameter("feature-gates", "featureGates", "A",
        "Feature gates. AllowServiceExternalIPs=false stops serving externalIPs; other gates "
        "have no effect."),
    Parameter("proxy-mode", "mode", "A",
        "iptables, ipvs, nftables or empty. Only selects the section of the file that the sync "
        "periods, masqueradeAll and masqueradeBit are read from; services are served the same way "
        "in every mode."),
    Parameter("detect-local-mode", "detectLocalMode", "M",
        "How to detect traffic from this node's pods: ClusterCIDR, NodeCIDR, BridgeInterface or "
        "InterfaceNamePrefix."),
    Parameter("cluster-cidr", "clusterCIDR", "M",
        "Addresses of the cluster's pods, for detectLocalMode ClusterCIDR: one CIDR, or an IPv4 "
        "and an IPv6 CIDR separated by a comma."),
    Parameter("pod-bridge-interface", "detectLocal.bridgeInterface", "M",
        "Bridge that pods are attached to, for detectLocalMode BridgeInterface."),
    Parameter("pod-interface-name-prefix", "detectLocal.interfaceNamePrefix", "M",
        "Prefix of the names of pods' devices, for detectLocalMode InterfaceNamePrefix."),
    Parameter("nodeport-addresses", "nodePortAddresses", "M",
        "Node addresses that serve NodePorts: CIDRs, 'primary', 'all' or 'localhost', which the "
        "node's own processes can always use. If empty, 'primary' in every mode."),
    Parameter("masquerade-all", "iptables.masqueradeAll nftables.masqueradeAll", "M",
        "Masquerade (SNAT) all traffic to cluster IPs."),
    Parameter("iptables-masquerade-bit", "iptables.masqueradeBit nftables.masqueradeBit", "A",
        "Bit of the packet mark by which the packet path netfilter tells its masquerade rule what "
        "to masquerade. It is cleared there."),
    _ignored("iptables-localhost-nodeports", "iptables.localhostNodePorts", "M",
        "Processes on the node can always connect to NodePorts on loopback, packets never can."),
    Parameter("iptables-sync-period", "iptables.syncPeriod nftables.syncPeriod", "M",
        "The audit's periods depend on it (reliability.md); /healthz fails when "
        "a change waits for twice this time."),
    Parameter("iptables-min-sync-period", "iptables.minSyncPeriod nftables.minSyncPeriod", "M",
        "Minimum pause between two updates. The default is none (in kube-proxy 1s)."),
    Parameter("ipvs-sync-period", "ipvs.syncPeriod", "M",
        "As --iptables-sync-period, in mode ipvs."),
    Parameter("ipvs-min-sync-period", "ipvs.minSyncPeriod", "M",
        "As --iptables-min-sync-period, in mode ipvs."),
    _ignored("config-sync-period", "configSyncPeriod", "A",
        "Watches are resumed; ebpflb lists again only every 4 to 8 hours, and if the API server"
        " requires it."),
    Parameter("oom-score-adj", "oomScoreAdj", "A",
        "oom_score_adj of the agent. Not set if the kernel does not allow it."),
    Parameter("conntrack-max-per-core", "conntrack.maxPerCore", "A",
        "nf_conntrack_max for each CPU, at most 1048576 in total. It is only ever raised. 0 "
        "leaves it unchanged."),
    Parameter("conntrack-min", "conntrack.min", "A",
        "Minimum of nf_conntrack_max, whatever the number of CPUs."),
    Parameter("conntrack-tcp-timeout-established", "conntrack.tcpEstablishedTimeout", "M",
        "Timeout of idle established TCP connections, in ebpflb and in conntrack. 0 leaves "
        "conntrack unchanged and means 24h in ebpflb."),
    Parameter("conntrack-tcp-timeout-close-wait", "conntrack.tcpCloseWaitTimeout", "M",
        "Timeout of TCP connections that one side has closed, in ebpflb and in conntrack. 0 "
        "leaves conntrack unchanged and means 1h in ebpflb."),
    Parameter("conntrack-tcp-be-liberal", "conntrack.tcpBeLiberal", "M",
        "Let conntrack accept TCP segments outside the window. The flow tables always do."),
    Parameter("conntrack-udp-timeout", "conntrack.udpTimeout", "A",
        "Timeout of idle UDP flows without a reply, in ebpflb and in conntrack. 0 leaves "
        "conntrack unchanged and means 30s in ebpflb."),
    Parameter("conntrack-udp-timeout-stream", "conntrack.udpStreamTimeout", "A",
        "Timeout of idle UDP flows with replies, in ebpflb and in conntrack. 0 leaves conntrack "
        "unchanged and means 180s in ebpflb."),
    Parameter("ipvs-scheduler", "ipvs.scheduler", "N",
        "In mode ipvs the default of --scheduler: the scheduler of ebpflb that comes next to this "
        "one of the kernel. In other modes it has no effect."),
    _ignored("ipvs-exclude-cidrs", "ipvs.excludeCIDRs", "N", _NO_IPVS),
    _ignored("ipvs-strict-arp", "ipvs.strictARP", "N", _NO_IPVS),
    _ignored("ipvs-tcp-timeout", "ipvs.tcpTimeout", "N", _NO_IPVS),
    _ignored("ipvs-tcpfin-timeout", "ipvs.tcpFinTimeout", "N", _NO_IPVS),
    _ignored("ipvs-udp-timeout", "ipvs.udpTimeout", "N", _NO_IPVS),
    _ignored("", "winkernel.networkName", "N", _NO_WINDOWS),
    _ignored("", "winkernel.sourceVip", "N", _NO_WINDOWS),
    _ignored("", "winkernel.enableDSR", "N", _NO_WINDOWS),
    _ignored("", "winkernel.rootHnsEndpointName", "N", _NO_WINDOWS),
    _ignored("", "winkernel.forwardHealthCheckVip", "N", _NO_WINDOWS),
    _ignored("", "windowsRunAsService", "N", _NO_WINDOWS),
    _ignored("", "portRange", "N", "kube-proxy ignores it too."),
    Parameter("v verbose", "logging.verbosity", "A",
        "Log verbosity. From 4 on, details are logged."),
    _ignored("vmodule", "logging.vmodule", "A", "ebpflb has no Go modules."),
    _ignored("logging-format", "logging.format", "A", _LOG),
    _ignored("log-flush-frequency", "logging.flushFrequency", "A", _LOG),
    _ignored("log-text-split-stream", "logging.options.text.splitStream", "A", _LOG),
    _ignored("log-text-info-buffer-size", "logging.options.text.infoBufferSize", "A", _LOG),
    _ignored("log-json-split-stream", "logging.options.json.splitStream", "A", _LOG),
    _ignored("log-json-info-buffer-size", "logging.options.json.infoBufferSize", "A", _LOG),
    Parameter("version", "", "A", "Print the version and exit."),
    _ignored("boot-id-file", "", "A", "ebpflb does not read this file."),
    _ignored("machine-id-file", "", "A", "ebpflb does not read this file."),
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
