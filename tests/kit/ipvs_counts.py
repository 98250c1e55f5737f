# SPDX-License-Identifier: Apache-2.0
"""Counts what connections meet in a migration from kube-proxy's mode ipvs (docs/migration.md):

.venv/bin/python -m vagrant.kernels count 6.12 "python -m tests.kit.ipvs_counts"
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from socket import SOCK_DGRAM, SOCK_STREAM

from bench import kubeproxy
from ebpflb.lab.agents import wait_until
from ebpflb.model.packet_path import Engine
from tests.kit import ipvs_nodes
from tests.kit.ipvs_nodes import IpvsNodes
from tests.kit.sockets import Socket

OF_EACH_WAY = 4
SECONDS = 3.0


def take_over(nodes: IpvsNodes) -> None:
    nodes.agent.start()
    assert "is kept" in nodes.ebpflb("cleanup", "--kube-proxy").stdout


def forced(nodes: IpvsNodes) -> None:
    nodes.agent.start()
    assert not nodes.ebpflb("cleanup", "--kube-proxy", "--force").returncode


def change_of_mode(nodes: IpvsNodes) -> None:
    """As kube-proxy starts in mode nftables: it first cleans up what mode ipvs has left."""
    nodes.feed("ipvsadm --clear")
    nodes.node.ip(f"link delete {kubeproxy.IPVS_DEVICE}")
    for tool in ("iptables-nft", "ip6tables-nft"):
        for table in ("nat", "filter"):
            nodes.feed(f"{tool} -t {table} -F")
            nodes.feed(f"{tool} -t {table} -X")
    for family in ipvs_nodes.FAMILIES:
        them = nodes.of_kube_proxy(family)
        nodes.node.nft(kubeproxy.nft(them, nodes.node.name, family.of(nodes.node), family.pods))


def give_back(nodes: IpvsNodes) -> None:
    nodes.add_ipvs()
    wait_until("it is seen", lambda: "is also running" in nodes.ebpflb("status").stdout)
    nodes.agent.stop()
    assert not nodes.ebpflb("cleanup").returncode


def answer(client: Socket, word: bytes = b"?") -> bytes:
    """Return what an endpoint answers; nothing if it does not, or the connection has ended."""
    try:
        client.settimeout(SECONDS)
        client.send(word)
        return bytes(client.recv(64))
    except OSError:
        return b""


def count(name: str, engine: Engine, change: Callable[[IpvsNodes], None]) -> None:
    back = change is give_back
    with (
        tempfile.TemporaryDirectory() as folder,
        ipvs_nodes.running(Path(folder), engine) as nodes,
    ):
        for each in ("udp_timeout", "udp_timeout_stream"):  # an emulated agent starts slowly
            nodes.node.sysctl(f"net.netfilter.nf_conntrack_{each}", 600)
        if back:
            nodes.agent.start()
        else:
            nodes.add_ipvs()
        ways = (nodes.lasting if back else nodes.ways) * OF_EACH_WAY
        streams = nodes.open(SOCK_STREAM, ways)
        asking = sorted(ways, key=lambda way: way[0] is nodes.node)
        datagrams = nodes.open(SOCK_DGRAM, asking)
        before = [answer(client).split() for client in datagrams]
        change(nodes)
        ended = sum(not answer(client) for client in streams)
        after = [answer(client).split() for client in datagrams]
        own = sum(host is nodes.node for host, _ in asking)
        met = list(zip(before, after, strict=True))
        others, nodes_own = met[: len(met) - own], met[len(met) - own :]
        for whose, pairs in (("others'", others), ("the node's", nodes_own)):
            moved = sum(bool(now) and now[0] != was[0] for was, now in pairs)
            silent = sum(not now for _, now in pairs)
            said = f"{moved} another endpoint, {silent} none of {len(pairs)} {whose} UDP"
            print(f"{name}, {engine}: {ended} of {len(streams)} TCP ended; {said}", flush=True)


if __name__ == "__main__":
    start = time.monotonic()
    for engine in Engine:
        count("ebpflb starts", engine, take_over)
        count("the way back", engine, give_back)
        count("--force", engine, forced)
    count("kube-proxy's own change", Engine.NETFILTER, change_of_mode)
    print(f"in {time.monotonic() - start:.0f} s")
