# SPDX-License-Identifier: Apache-2.0
"""Invalid configurations, by kube-proxy's rules: all errors are reported, with their path
(kube-proxy.md 15).
"""

from typing import Any

import pytest
import yaml

from ebpflb.config import config_file, validation
from tests.config.files import HEAD, VALID


def wrong(**values: Any) -> list[str]:
    found = config_file.to_configuration(HEAD | values)
    return [str(each) for each in validation.check(found)]


@pytest.mark.parametrize("values", VALID)
def test_valid(values: dict[str, Any]) -> None:
    """Valid values are accepted; sections of other modes are not checked."""
    assert wrong(**values) == []


# A value, and how the line of its error begins.
INVALID = """
mode: userspace => mode: must be one of iptables, ipvs, nftables, not "userspace"
bindAddress: 10.0.0.1:80 => bindAddress: "10.0.0.1:80" is not an IP address
healthzBindAddress: host:1 => healthzBindAddress: "host" is not an IP address
healthzBindAddress: 1.2.3.4:0 => healthzBindAddress: "0" is not a port from 1 to 65535
healthzBindAddress: 1.2.3.4:65536 => healthzBindAddress: "65536" is not a port from 1 to 65535
healthzBindAddress: ":10256" => healthzBindAddress: "" is not an IP address
metricsBindAddress: "[::1]" => metricsBindAddress: "[::1]" is not ADDRESS:PORT such as 0.0.0.0:10256
metricsBindAddress: here => metricsBindAddress: "here" is not ADDRESS:PORT such as 0.0.0.0:10256
clusterCIDR: 10.244.0.0 => clusterCIDR: "10.244.0.0" is not a CIDR such as 10.0.0.0/8
clusterCIDR: "10.244.0.0/16," => clusterCIDR: "" is not a CIDR such as 10.0.0.0/8
clusterCIDR: "10.0.0.0/8,11.0.0.0/8" => clusterCIDR: "10.0.0.0/8,11.0.0.0/8" has more than one CIDR
clusterCIDR: "10.0.0.0/8,fd00::/8,fe00::/8" => clusterCIDR: "10.0.0.0/8,fd00::/8,fe00::/8" has more
nodePortAddresses: [primary, localhost, all, secondary] => nodePortAddresses[3]: "secondary" is not
nodePortAddresses: [10.0.0.0/8, 10.0.0.1] => nodePortAddresses[1]: "10.0.0.1" is not a CIDR
detectLocalMode: Bridge => detectLocalMode: must be one of ClusterCIDR, NodeCIDR, BridgeInterface,
detectLocalMode: BridgeInterface => detectLocal.bridgeInterface: must be set in detectLocalMode
detectLocalMode: InterfaceNamePrefix => detectLocal.interfaceNamePrefix: must be set in
oomScoreAdj: -1001 => oomScoreAdj: must be between -1000 and 1000, not -1001
oomScoreAdj: 1001 => oomScoreAdj: must be between -1000 and 1000, not 1001
iptables: {masqueradeBit: 32} => iptables.masqueradeBit: must be between 0 and 31, not 32
iptables: {masqueradeBit: -1} => iptables.masqueradeBit: must be between 0 and 31, not -1
iptables: {syncPeriod: -1s} => iptables.syncPeriod: must be greater than 0, not -1s
iptables: {minSyncPeriod: -1s} => iptables.minSyncPeriod: must be at least 0, not -1s
iptables: {minSyncPeriod: 31s} => iptables.syncPeriod: must be at least iptables.minSyncPeriod
nftables: {minSyncPeriod: 1m} => nftables.syncPeriod: must be at least nftables.minSyncPeriod
nftables: {masqueradeBit: 32} => nftables.masqueradeBit: must be between 0 and 31, not 32
ipvs: {syncPeriod: -5s, minSyncPeriod: -6s} => ipvs.syncPeriod: must be greater than 0, not -5s
configSyncPeriod: -1s => configSyncPeriod: must be greater than 0, not -1s
conntrack: {maxPerCore: -1} => conntrack.maxPerCore: must be at least 0, not -1
conntrack: {min: -1} => conntrack.min: must be at least 0, not -1
conntrack: {tcpEstablishedTimeout: -1s} => conntrack.tcpEstablishedTimeout: must be at least 0, not
conntrack: {tcpCloseWaitTimeout: -1s} => conntrack.tcpCloseWaitTimeout: must be at least 0, not -1s
conntrack: {udpTimeout: -1s} => conntrack.udpTimeout: must be at least 0, not -1s
conntrack: {udpStreamTimeout: -1s} => conntrack.udpStreamTimeout: must be at least 0, not -1s
clientConnection: {burst: -1} => clientConnection.burst: must be at least 0, not -1
logging: {format: xml} => logging.format: must be one of text, json, not "xml"
hostnameOverride: "  " => hostnameOverride: must not be blank
""".strip().splitlines()


@pytest.mark.parametrize("row", INVALID)
def test_invalid(row: str) -> None:
    """Invalid values of the mode in force are rejected, with path and reason."""
    value, _, line = row.partition(" => ")
    values = yaml.safe_load(value)
    mode = next((name for name in ("nftables", "ipvs") if name in values), "")
    values = {"mode": mode} | values
    assert any(each.startswith(line) for each in wrong(**values))


def test_all_at_once() -> None:
    """All errors are reported, not only the first one."""
    lines = wrong(
        mode="x",
        bindAddress="y",
        oomScoreAdj=5000,
        nodePortAddresses=["a", "b"],
        iptables={"syncPeriod": "-1s", "minSyncPeriod": "-2s", "masqueradeBit": 99},
        conntrack={"maxPerCore": -1, "udpTimeout": "-1s"},
    )
    assert [line.split(": ")[0] for line in lines] == [
        "mode",
        "iptables.syncPeriod",
        "iptables.minSyncPeriod",
        "iptables.masqueradeBit",
        "oomScoreAdj",
        "conntrack.maxPerCore",
        "conntrack.udpTimeout",
        "bindAddress",
        "nodePortAddresses[0]",
        "nodePortAddresses[1]",
    ]
