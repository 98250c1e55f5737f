# SPDX-License-Identifier: Apache-2.0
"""Configurations in the shapes that distributions write: loaded or refused, as by kube-proxy."""

from pathlib import Path
from typing import Any

import click
import pytest

from ebpflb.cli import run_options
from ebpflb.cli.run import run
from ebpflb.config.translation import translate
from ebpflb.errors import ConfigurationError

Decision = dict[str, Any] | str
"""What some options become, as text; or the beginning of the error's last line."""

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
CIDRS = "(IPv4Network('10.42.0.0/16'),)"
FILES: dict[str, tuple[str, Decision]] = {
    "kubeadm: every field, most of them null, zero or empty": (
        "clientConnection: {acceptContentTypes: '', burst: 0, kubeconfig: /k, qps: 0}\n"
        "clusterCIDR: 10.42.0.0/16\nconfigSyncPeriod: 0s\nhealthzBindAddress: ''\n"
        "conntrack: {maxPerCore: null, min: null, tcpEstablishedTimeout: null, udpTimeout: 0s}\n"
        "ipvs: {excludeCIDRs: null, scheduler: '', strictARP: false, tcpTimeout: 0s}\n"
        "logging: {flushFrequency: 0, options: {json: {infoBufferSize: '0'}}, verbosity: 0}\n"
        "oomScoreAdj: null\nportRange: ''\nnodePortAddresses: null\nwindowsRunAsService: false\n"
        "winkernel: {enableDSR: false, networkName: '', sourceVip: ''}\n",
        {"kubeconfig": "/k", "oom_score_adj": "-999", "healthz_address": "0.0.0.0:10256"},
    ),
    "fields of kube-proxy 1.12 that later versions dropped": (
        "conntrack: {max: null, maxPerCore: 32768}\nudpIdleTimeout: 250ms\nmode: ipvs\n"
        "resourceContainer: /kube-proxy\nipvs: {masqueradeAll: true, scheduler: rr}\n",
        {"scheduler": "round-robin", "masquerade_all": "False"},
    ),
    "EKS": ("metricsBindAddress: 0.0.0.0:10249\n", {"metrics_address": "0.0.0.0:10249"}),
    "IPv6, with addresses left at IPv4": (
        "bindAddress: '::'\nhealthzBindAddress: 0.0.0.0:10256\n",
        {"metrics_address": "[::1]:10249", "bind_address": "None"},
    ),
    "a letter lost": ("ipvs: {trictARP: false}\n", {"scheduler": "random"}),
    "indentation lost": ("mode: ipvs\nipvs:\nstrictARP: true\n", {"scheduler": "round-robin"}),
    "kind: zero timeouts leave conntrack alone": (
        "metadata: {name: config}\nmode: nftables\n"
        "conntrack: {maxPerCore: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}\n",
        {"conntrack.max_per_core": "0", "conntrack.established": "0", "min_sync_period": "0.0"},
    ),
    "a shell variable that was not expanded": (
        "clusterCIDR: ${NODE_NETWORK}\n",
        'clusterCIDR: "${NODE_NETWORK}" is not a CIDR',
    ),
    "k0s": (
        "featureGates: {NFTablesProxyMode: true}\niptables: {minSyncPeriod: 1s}\n",
        {"min_sync_period": "1.0", "serve_external_ips": "True"},
    ),
    "OpenShift's own mode": ("mode: unidling+iptables\n", "mode: must be one of iptables, ipvs"),
    "Gardener": (
        "mode: ipvs\nipvs: {strictARP: true, excludeCIDRs: [10.96.0.0/12]}\n"
        "nodePortAddresses: [198.51.100.0/24, 'fd00::/8']\nconntrack: {tcpBeLiberal: true}\n",
        {
            "nodeport_addresses": "('198.51.100.0/24', 'fd00::/8')",
            "conntrack.be_liberal": "True",
        },
    ),
    "Azure: a prefix, a bit and a log format": (
        "detectLocalMode: InterfaceNamePrefix\ndetectLocal: {interfaceNamePrefix: azv}\n"
        "clusterCIDR: not read in this mode\niptables: {masqueradeBit: 21}\n"
        "logging: {format: json}\n",
        {"detector.name_prefix": "azv", "masquerade_mark": "2097152"},
    ),
    "duplicate fields: the last one": (
        "iptables: {minSyncPeriod: 5s, syncPeriod: 30s, minSyncPeriod: 1s}\n",
        {"min_sync_period": "1.0"},
    ),
    "text for a number": (
        "conntrack: {maxPerCore: '0'}\n",
        "conntrack.maxPerCore: Expected integer, got string",
    ),
    "one CIDR, and the node's address": (
        "bindAddress: 198.51.100.10\nhealthzBindAddress: 198.51.100.10\n"
        "clusterCIDR: 10.42.0.0/16\n",
        {
            "bind_address": "198.51.100.10",
            "healthz_address": "198.51.100.10:10256",
            "detector.cluster_cidrs": CIDRS,
        },
    ),
}
WHOLE: dict[str, tuple[bytes, Decision]] = {
    "kubeadm's documents: the first one counts": (
        b"apiVersion: kubeadm.k8s.io/v1beta3\nkind: InitConfiguration\n---\n" + HEAD.encode(),
        'kind: must be "KubeProxyConfiguration", not ',
    ),
    "the ConfigMap itself": (b"apiVersion: v1\nkind: ConfigMap\n", 'kind: must be "KubeProxyCon'),
    "a byte order mark, and lines that end as on Windows": (
        b"\xef\xbb\xbf" + (HEAD + "clusterCIDR: 10.42.0.0/16\n").replace("\n", "\r\n").encode(),
        {"detector.cluster_cidrs": CIDRS},
    ),
}
FLAGS: dict[str, tuple[str, Decision]] = {
    "k3s": (
        "--cluster-cidr=10.42.0.0/16 --conntrack-max-per-core=0 --proxy-mode=iptables"
        " --conntrack-tcp-timeout-established=0s --healthz-bind-address=127.0.0.1",
        {"conntrack.established": "0", "healthz_address": "127.0.0.1:10256"},
    ),
    "k3s with arguments": (
        "--proxy-mode=ipvs --ipvs-scheduler=lc --nodeport-addresses=100.64.0.0/10,127.0.0.0/8",
        {
            "scheduler": "least-connections",
            "nodeport_addresses": "('100.64.0.0/10', '127.0.0.0/8')",
        },
    ),
    "rke2": (
        "--healthz-bind-address=:: --kube-api-burst=20 --kube-api-qps=10",
        {"healthz_address": "[::]:10256"},
    ),
    "GKE": (
        "--master=https://127.0.0.1:1 --oom-score-adj=-998 --detect-local-mode=NodeCIDR --v=2"
        " --feature-gates=ExecProbeTimeout=false --iptables-sync-period=1m",
        {"oom_score_adj": "-998", "sync_period": "60.0"},
    ),
    "AKS: an empty prefix, and IPVS's words": (
        "--pod-interface-name-prefix= --proxy-mode=ipvs --ipvs-scheduler=leastconn"
        " --ipvs-tcp-timeout=15m --ipvs-tcpfin-timeout=2m --ipvs-strict-arp --ipvs-udp-timeout=5m",
        {"scheduler": "random", "detector.mode": "ClusterCIDR"},
    ),
    "all zeros": (
        "--conntrack-min=0 --conntrack-udp-timeout=0s --masquerade-all=true",
        {"conntrack.min_total": "0", "masquerade_all": "True"},
    ),
    "the node's address as its name": ("--hostname-override=198.51.100.10", {}),
    **{
        f"{flag}, which kube-proxy dropped": (flag, "No such option")
        for flag in (
            *("--resource-container=", "--cleanup-ipvs=true", "--logtostderr=true"),
            "--conntrack-max=0",
        )
    },
}


def decided(words: list[str]) -> dict[str, Any] | str:
    """The options; or the last line of the error."""
    try:
        values = run.make_context("run", words).params
        return translate(run_options.load(values))
    except click.UsageError as error:
        return error.format_message()
    except ConfigurationError as error:
        return str(error).splitlines()[-1].partition("config.conf: ")[2]


def check(words: list[str], decision: Decision) -> None:
    found = decided(words)
    if isinstance(decision, str):
        assert isinstance(found, str) and found.startswith(decision), found
        return
    assert isinstance(found, dict), found
    for path, text in decision.items():
        name, _, inner = path.partition(".")
        value = getattr(found[name], inner) if inner else found[name]
        assert str(value) == text, path


@pytest.mark.parametrize(("text", "decision"), FILES.values(), ids=FILES)
def test_files(tmp_path: Path, text: str, decision: Decision) -> None:
    """Every field of a file."""
    (tmp_path / "config.conf").write_text(HEAD + text)
    check([f"--config={tmp_path}/config.conf"], decision)


@pytest.mark.parametrize(("content", "decision"), WHOLE.values(), ids=WHOLE)
def test_whole_files(tmp_path: Path, content: bytes, decision: Decision) -> None:
    """The file as such."""
    (tmp_path / "config.conf").write_bytes(content)
    check([f"--config={tmp_path}/config.conf"], decision)


@pytest.mark.parametrize(("words", "decision"), FLAGS.values(), ids=FLAGS)
def test_flags(words: str, decision: Decision) -> None:
    """Instead of a file."""
    check(words.split(), decision)
