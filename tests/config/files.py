# SPDX-License-Identifier: Apache-2.0
"""Configuration files for tests."""

from pathlib import Path
from typing import Any

import yaml

KUBEADM = Path(__file__).parent / "kubeadm.yaml"  # as kubeadm writes it into its ConfigMap
HEAD = {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}
# Values that may stand in a file.
VALID: list[dict[str, Any]] = [
    {},
    {"mode": "iptables"},
    {"mode": "ipvs"},
    {"mode": "nftables"},
    {"bindAddress": "fd00::7"},
    {"bindAddress": "010.0.0.1"},
    {"healthzBindAddress": "[::]:10256", "metricsBindAddress": "127.0.0.1:1"},
    {"clusterCIDR": "10.244.0.0/16"},
    {"clusterCIDR": "10.244.0.0/16,fd00::/56"},
    {"clusterCIDR": "fd00::/56,10.244.0.0/16"},
    {"nodePortAddresses": ["primary"]},
    {"nodePortAddresses": ["10.0.0.0/8", "0.0.0.0/0", "::/0"]},
    {"detectLocalMode": "NodeCIDR"},
    {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "cni0"}},
    {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "cni0"}}
    | {"clusterCIDR": "not looked at"},
    {"detectLocalMode": "InterfaceNamePrefix", "detectLocal": {"interfaceNamePrefix": "veth"}},
    {"oomScoreAdj": -1000},
    {"iptables": {"masqueradeBit": 31, "syncPeriod": "10s", "minSyncPeriod": "10s"}},
    {"ipvs": {"tcpTimeout": "-1s", "excludeCIDRs": ["x"]}},
    {"nftables": {"masqueradeBit": 77, "syncPeriod": "-1s"}},
    {"conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s"}},
    {"featureGates": {"NobodyKnowsThis": True}},
    {"logging": {"format": "json"}},
]


def write(path: Path, **values: Any) -> Path:
    """A file with these fields."""
    path.write_text(yaml.safe_dump(HEAD | values))
    return path
