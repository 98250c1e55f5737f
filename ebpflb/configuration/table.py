# SPDX-License-Identifier: Apache-2.0
"""Every flag and every field of kube-proxy, once: what it is for, and what becomes of it here.

The options of ``ebpflb run``, the line about what has no effect, and docs/configuration.md are all
made of this table. The letters are those of kube-proxy.md 15: M must be honoured, A accepted, N not
applicable.
"""

from collections.abc import Set
from typing import Any, NamedTuple

from ebpflb.configuration import fields
from ebpflb.configuration.fields import KubeProxyConfiguration


class Row(NamedTuple):
    """A flag, its fields, or both. ``idle``: accepted, and without effect."""

    flags: str  # all names, with blanks between; the first is kube-proxy's
    fields: str  # paths in the file, with blanks between
    letter: str
    meaning: str  # whole sentences; where it is idle, why
    idle: bool = False

    @property
    def flag(self) -> str:
        return self.flags.split()[0] if self.flags else ""


def _idle(flags: str, fields: str, letter: str, meaning: str) -> Row:
    return Row(flags, fields, letter, meaning, idle=True)


_NO_IPVS = "There is no IPVS here."
_NO_WINDOWS = "ebpflb runs on Linux."
_LOG = "One format is written, to stderr, unbuffered."
_OUR_CLIENT = "Objects are read as JSON, in a handful of watches; nothing is throttled."

ROWS = (
    Row("config", "", "M", "The configuration file; it replaces every flag that has a field."),
    Row("write-config-to", "", "A", "Write the whole configuration to this file, and exit."),
    Row("cleanup", "", "M", "Remove what ebpflb and a kube-proxy left, and exit."),
    Row("init-only", "", "A", "Set what the kernel's conntrack is to have, and exit."),
    Row("kubeconfig", "clientConnection.kubeconfig", "M", "How to reach the API server."),
    Row("master", "", "M", "The URL of the API server; overrides the one of the kubeconfig."),
    _idle("kube-api-content-type", "clientConnection.contentType", "A", _OUR_CLIENT),
    _idle("kube-api-qps", "clientConnection.qps", "A", _OUR_CLIENT),
    _idle("kube-api-burst", "clientConnection.burst", "A", _OUR_CLIENT),
    _idle("", "clientConnection.acceptContentTypes", "A", _OUR_CLIENT),
    Row("hostname-override node-name", "hostnameOverride", "M", "The name of this Node."),
    Row("bind-address", "bindAddress", "M", "The Node's primary address, unless unspecified."),
    Row(
        "healthz-bind-address",
        "healthzBindAddress",
        "M",
        "Where /healthz and /livez are served; without a port on 10256. As a flag, empty: nowhere.",
    ),
    Row(
        "metrics-bind-address",
        "metricsBindAddress",
        "M",
        "Where /metrics is served; without a port on 10249. As a flag, empty: nowhere.",
    ),
    Row("healthz-port", "", "A", "0: /healthz is not served. Deprecated."),
    Row("metrics-port", "", "A", "0: /metrics is not served. Deprecated."),
    Row("bind-address-hard-fail", "bindAddressHardFail", "M", "End if a port is taken."),
    Row("profiling", "enableProfiling", "A", "Serve /debug/stacks beside /metrics."),
    _idle(
        "show-hidden-metrics-for-version",
        "showHiddenMetricsForVersion",
        "A",
        "No metric is hidden.",
    ),
    Row(
        "feature-gates",
        "featureGates",
        "A",
        "AllowServiceExternalIPs=false: externalIPs are not served. Other gates have no effect.",
    ),
    Row(
        "proxy-mode",
        "mode",
        "A",
        "One of iptables, ipvs, nftables, or nothing: which section the periods and masqueradeAll"
        " are read from. Services are served the same way in every mode, as in mode nftables.",
    ),
    Row("detect-local-mode", "detectLocalMode", "M", "How pods are told from others."),
    Row(
        "cluster-cidr",
        "clusterCIDR",
        "M",
        "The pods' addresses, in mode ClusterCIDR: a CIDR, or one of each family with a comma"
        " between.",
    ),
    Row(
        "pod-bridge-interface",
        "detectLocal.bridgeInterface",
        "M",
        "The bridge that pods are plugged into, in mode BridgeInterface.",
    ),
    Row(
        "pod-interface-name-prefix",
        "detectLocal.interfaceNamePrefix",
        "M",
        "How the names of pods' devices begin, in mode InterfaceNamePrefix.",
    ),
    Row(
        "nodeport-addresses",
        "nodePortAddresses",
        "M",
        "Where NodePorts are served: 'primary', or CIDRs. Nothing is 'primary', in every mode.",
    ),
    Row(
        "masquerade-all",
        "iptables.masqueradeAll nftables.masqueradeAll",
        "M",
        "Let all traffic to cluster IPs go on as this node's.",
    ),
    _idle(
        "iptables-masquerade-bit",
        "iptables.masqueradeBit nftables.masqueradeBit",
        "A",
        "No packet is marked.",
    ),
    _idle(
        "iptables-localhost-nodeports",
        "iptables.localhostNodePorts",
        "M",
        "The node's own processes always reach NodePorts on loopback, at their sockets; packets"
        " never do.",
    ),
    Row(
        "iptables-sync-period",
        "iptables.syncPeriod nftables.syncPeriod",
        "M",
        "Half of the time after which a change that could not be written makes /healthz fail.",
    ),
    Row(
        "iptables-min-sync-period",
        "iptables.minSyncPeriod nftables.minSyncPeriod",
        "M",
        "A pause after each write. Unlike kube-proxy's, the default is none.",
    ),
    Row("ipvs-sync-period", "ipvs.syncPeriod", "M", "The same, in mode ipvs."),
    Row("ipvs-min-sync-period", "ipvs.minSyncPeriod", "M", "The same, in mode ipvs."),
    _idle(
        "config-sync-period",
        "configSyncPeriod",
        "A",
        "Watches are resumed, and listed anew where the server asks for it.",
    ),
    Row("oom-score-adj", "oomScoreAdj", "A", "Set where the kernel allows it."),
    Row(
        "conntrack-max-per-core",
        "conntrack.maxPerCore",
        "A",
        "nf_conntrack_max for each CPU, at most 1048576 together; it is raised, never lowered."
        " 0: left alone.",
    ),
    Row("conntrack-min", "conntrack.min", "A", "The least nf_conntrack_max."),
    Row(
        "conntrack-tcp-timeout-established",
        "conntrack.tcpEstablishedTimeout",
        "M",
        "How long an idle TCP connection is kept, by ebpflb and conntrack. 0: a day; conntrack's is"
        " left alone.",
    ),
    Row(
        "conntrack-tcp-timeout-close-wait",
        "conntrack.tcpCloseWaitTimeout",
        "M",
        "The same, if one side has closed it. 0: an hour; conntrack's is left alone.",
    ),
    Row(
        "conntrack-tcp-be-liberal",
        "conntrack.tcpBeLiberal",
        "M",
        "Let conntrack take segments out of window for valid. ebpflb never minds them.",
    ),
    Row(
        "conntrack-udp-timeout",
        "conntrack.udpTimeout",
        "A",
        "How long an idle UDP flow is kept that was not answered. 0: 30 s; conntrack's is left"
        " alone.",
    ),
    Row(
        "conntrack-udp-timeout-stream",
        "conntrack.udpStreamTimeout",
        "A",
        "The same, if it was answered. 0: 180 s; conntrack's is left alone.",
    ),
    _idle("ipvs-scheduler", "ipvs.scheduler", "N", _NO_IPVS),
    _idle("ipvs-exclude-cidrs", "ipvs.excludeCIDRs", "N", _NO_IPVS),
    _idle("ipvs-strict-arp", "ipvs.strictARP", "N", _NO_IPVS),
    _idle("ipvs-tcp-timeout", "ipvs.tcpTimeout", "N", _NO_IPVS),
    _idle("ipvs-tcpfin-timeout", "ipvs.tcpFinTimeout", "N", _NO_IPVS),
    _idle("ipvs-udp-timeout", "ipvs.udpTimeout", "N", _NO_IPVS),
    _idle("", "winkernel.networkName", "N", _NO_WINDOWS),
    _idle("", "winkernel.sourceVip", "N", _NO_WINDOWS),
    _idle("", "winkernel.enableDSR", "N", _NO_WINDOWS),
    _idle("", "winkernel.rootHnsEndpointName", "N", _NO_WINDOWS),
    _idle("", "winkernel.forwardHealthCheckVip", "N", _NO_WINDOWS),
    _idle("", "windowsRunAsService", "N", _NO_WINDOWS),
    _idle("", "portRange", "N", "kube-proxy does not use it either."),
    Row("v verbose", "logging.verbosity", "A", "How much to log: from 4 on, details."),
    _idle("vmodule", "logging.vmodule", "A", "The modules are Go's."),
    _idle("logging-format", "logging.format", "A", _LOG),
    _idle("log-flush-frequency", "logging.flushFrequency", "A", _LOG),
    _idle("log-text-split-stream", "logging.options.text.splitStream", "A", _LOG),
    _idle("log-text-info-buffer-size", "logging.options.text.infoBufferSize", "A", _LOG),
    _idle("log-json-split-stream", "logging.options.json.splitStream", "A", _LOG),
    _idle("log-json-info-buffer-size", "logging.options.json.infoBufferSize", "A", _LOG),
    Row("version", "", "A", "Say the version, and exit."),
    _idle("boot-id-file", "", "A", "It is not read."),
    _idle("machine-id-file", "", "A", "It is not read."),
)

# With --config these flags count beside the file (kube-proxy.md 15).
BESIDE_FILE = (
    frozenset(row.flag for row in ROWS if not row.fields)
    - {
        "healthz-port",
        "metrics-port",
    }
    | {"hostname-override"}
    | {row.flag for row in ROWS if row.fields.startswith("logging.")}
)


def kind_of(row: Row) -> Any:
    """The type of its fields; None for a flag without."""
    return dict(fields.leaves())[row.fields.split()[0]] if row.fields else None


def idle_flags(given: Set[str]) -> list[str]:
    """Of these flags those without effect."""
    return [f"--{row.flag}" for row in ROWS if row.idle and row.flag in given]


def idle_fields(configuration: KubeProxyConfiguration) -> list[str]:
    """The fields without effect that say something other than the default."""
    default = KubeProxyConfiguration()
    every = (path for row in ROWS if row.idle for path in row.fields.split())
    return [
        path
        for path in every
        if fields.value_at(configuration, path) != fields.value_at(default, path)
    ]
