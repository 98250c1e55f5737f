# SPDX-License-Identifier: Apache-2.0
"""`ebpflb cleanup --kube-proxy`, and what `check` and `status` report about a kube-proxy."""

import os
from collections.abc import Iterator
from contextlib import closing
from ipaddress import ip_address
from pathlib import Path
from socket import AF_INET, SOCK_DGRAM, socket

import pytest

from ebpflb import files
from ebpflb.kernel.netfilter import conntrack, nft, watch
from ebpflb.kernel.netfilter.table import TABLE, NetfilterTable, table_options
from ebpflb.kernel.node import kube_proxy, sysctls
from ebpflb.lab.agents import wait_until
from ebpflb.model.kube_proxy import Detection
from ebpflb.options import Options, Paths
from ebpflb.serve import status
from tests.cli.conftest import NEVER, Done, Ebpflb
from tests.kernel.node import answering, nodes, rules
from tests.kernel.node.nodes import TOOLS, everything, load, load_nft, make_sets, run, saved
from tests.kit import answers

VIP = ip_address("10.96.0.10")
NAME = f"ebpflb-test-{os.getpid()}-cleanup"
STARTED = "2026-11-27T12:00:00+00:00"
TRANSLATING = "table ip kube-proxy {\n chain c {\n type nat hook output priority -100\n udp dport 53 dnat to 127.0.0.1:54\n }\n}\n"  # noqa: E501


@pytest.fixture(autouse=True)
def network() -> Iterator[None]:
    with nodes.fresh(NAME):
        yield


@pytest.fixture
def loopback() -> None:
    """Set loopback up; not in all tests, because rules count the packets there."""
    run("ip", "link", "set", "lo", "up")


def left_by_iptables() -> None:
    for tool in TOOLS:
        load(tool, rules.KUBELET, rules.IPTABLES_MODE)


def make(table: nft.Name) -> None:
    """Make the state of an agent; netfilter's table stays after the agent has ended."""
    if table != TABLE:
        watch.keep_nat_hooks()
        return
    options = Options(Paths(NEVER), "node-1", NEVER)
    with closing(NetfilterTable(table_options(options, sctp=False, beside_flows=True))) as made:
        made.build()


OWN_TABLES = pytest.mark.parametrize("table", [TABLE, watch.HOLD], ids=str)


def removed(done: Done) -> list[str]:
    return [line[9:] for line in done.out.splitlines() if line.startswith("removed: ")]


def test_everything_removed_is_printed(ebpflb: Ebpflb, nowhere: list[str]) -> None:
    """Each removed object is printed, and at the end that nothing is left; a second run finds
    nothing.
    """
    left_by_iptables()
    load_nft()
    done = ebpflb("cleanup", "--kube-proxy", *nowhere)
    assert (done.status, done.err) == (0, "")
    assert len(removed(done)) == 2 + 4 * 3
    assert "removed: table ip6 kube-proxy\n" in done.out
    assert "removed: ip6tables-nft, table nat: 11 chains and 3 rules\n" in done.out
    assert "nothing is left of kube-proxy" in done.out
    again = ebpflb("cleanup", "--kube-proxy", *nowhere)
    assert again == Done(0, "nothing of kube-proxy was found\n", "")


def test_while_devices_get_programs(
    ebpflb: Ebpflb, nowhere: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """kube-proxy's rules stay while devices have no programs: packets of those devices need the
    rules.
    """
    load_nft()
    last = status.AgentStatus(pid=1, node="n", source="s", started=STARTED, devices_to_come=7)
    monkeypatch.setattr(status, "is_running", lambda _: True)
    monkeypatch.setattr(status, "read", lambda _: last)
    done = ebpflb("cleanup", "--kube-proxy", *nowhere)
    assert (done.status, done.out) == (1, "")
    assert "7 devices have no programs yet" in done.err
    assert nft.exists(nft.Name("ip6", "kube-proxy"))


def test_nothing_is_removed_while_kube_proxy_runs(
    ebpflb: Ebpflb, nowhere: list[str], tmp_path: Path
) -> None:
    """While a kube-proxy runs nothing is removed; one line names its pid; --force removes
    everything.
    """
    left_by_iptables()
    before = everything()
    with answering.process(tmp_path) as pid:
        done = ebpflb("cleanup", "--kube-proxy", *nowhere)
        assert done.status == 1
        assert done.err == (
            f"ebpflb: kube-proxy is running (pid {pid}): stop it first, or use --force\n"
        )
        assert everything() == before
        forced = ebpflb("cleanup", "--kube-proxy", "--force", *nowhere)
        assert (forced.status, "services do not work" in forced.out) == (0, False)
        assert not kube_proxy.detect().rules


def test_an_invisible_kube_proxy_that_answers_is_named(
    ebpflb: Ebpflb, nowhere: list[str], loopback: None
) -> None:
    """A kube-proxy that is invisible but answers is named by its port; ebpflb's own answer does not
    count.
    """
    load_nft()
    with answering.answer("iptables"):
        done = ebpflb("cleanup", "--kube-proxy", *nowhere)
        assert "is running (mode iptables at 127.0.0.1:10249)" in done.err
    with answering.answer("ebpf"):
        assert ebpflb("cleanup", "--kube-proxy", *nowhere).status == 0


def test_dry_run(ebpflb: Ebpflb, nowhere: list[str], tmp_path: Path) -> None:
    """A dry run prints the same lines and changes nothing, also while kube-proxy is running."""
    left_by_iptables()
    before = everything()
    with answering.process(tmp_path):
        told = ebpflb("cleanup", "--kube-proxy", "--dry-run", *nowhere)
    assert told.status == 0
    assert everything() == before
    done = ebpflb("cleanup", "--kube-proxy", *nowhere)
    assert told.out.splitlines() == [f"would be removed: {what}" for what in removed(done)]
    nothing = ebpflb("cleanup", "--kube-proxy", "--dry-run", *nowhere)
    assert nothing.out == "nothing of kube-proxy was found\n"


def test_force_is_for_kube_proxy(ebpflb: Ebpflb, nowhere: list[str]) -> None:
    """--force is rejected without --kube-proxy."""
    done = ebpflb("cleanup", "--force", *nowhere)
    assert done.status == 2
    assert "needs --kube-proxy" in done.err


def test_what_cannot_be_removed_is_named(ebpflb: Ebpflb, nowhere: list[str]) -> None:
    """An object that cannot be removed is named, the rest is removed, and the exit status is 1."""
    make_sets(TOOLS[0])
    asks = "*filter\n-A INPUT -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT\nCOMMIT\n"
    load(TOOLS[0], rules.IPVS_MODE, asks)
    done = ebpflb("cleanup", "--kube-proxy", *nowhere)
    assert done.status == 1
    still, last = done.err.splitlines()
    assert still.startswith("not removed: ipset KUBE-CLUSTER-IP: ")
    assert last == "ebpflb: some of what kube-proxy left behind could not be removed: see above"
    assert kube_proxy.ipsets() == {"KUBE-CLUSTER-IP"}
    assert "nothing is left" not in done.out


@pytest.fixture
def mode_ipvs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that stands for /proc/net/ip_vs, on a node that mode ipvs has served; its one
    server has two connections.
    """
    make_sets(TOOLS[0])
    load(TOOLS[0], rules.IPVS_MODE)
    run("ip", "link", "add", "kube-ipvs0", "type", "bridge")
    run("ip", "address", "add", "10.96.0.10", "dev", "kube-ipvs0")
    run("sysctl", "-qw", "net.ipv4.conf.all.arp_ignore=1")
    servers = tmp_path / "ip_vs"
    servers.write_text(
        "TCP  0A60000A:0050 rr\n  -> 0AF4010B:1F90      Masq    1      1          1\n"
    )
    monkeypatch.setattr(kube_proxy, "SERVERS", servers)
    return servers


def test_all_of_mode_ipvs_stays_while_it_has_connections(
    ebpflb: Ebpflb, nowhere: list[str], mode_ipvs: Path
) -> None:
    """While IPVS has a connection, be it half-closed, all of its mode stays, with the reason; the
    tables of another mode go. Then all goes, but a sysctl that another program may have set.
    """
    load_nft()
    before = saved()
    kept = (
        "what mode ipvs left is kept while IPVS has connections: 10.96.0.10:80/TCP (2);"
        " run this command again later, or use --force\n"
    )
    assert kept in ebpflb("cleanup", "--kube-proxy", "--dry-run", *nowhere).out
    done = ebpflb("cleanup", "--kube-proxy", *nowhere)
    assert (done.status, removed(done)) == (0, ["table ip kube-proxy", "table ip6 kube-proxy"])
    assert kept in done.out
    assert "nothing" not in done.out
    assert (saved(), kube_proxy.dummy_addresses("kube-ipvs0")) == (before, {VIP})
    mode_ipvs.write_text("")
    done = ebpflb("cleanup", "--kube-proxy", *nowhere)
    assert "kept: net.ipv4.conf.all.arp_ignore=1 (the kernel's default is 0)" in done.out
    assert "nothing is left of kube-proxy" in done.out
    assert kube_proxy.detect() == Detection()


def test_check_says_what_ipvs_holds(ebpflb: Ebpflb, mode_ipvs: Path) -> None:
    """`check` names the servers with connections, the addresses and the sysctls; and connections
    that conntrack does not see, which would end. Without IPVS it has no such line.
    """

    def findings() -> list[tuple[bool, str]]:
        done = ebpflb("check", "--state-dir", NEVER, "-o", "json")
        return [
            (it["ok"], it["detail"]) for it in answers.results(done.out) if it["feature"] == "IPVS"
        ]

    holds = (
        "virtual servers: 1; connections: 10.96.0.10:80/TCP (2); addresses of kube-ipvs0: 1;"
        " net.ipv4.conf.all.arp_ignore=1"
    )
    assert findings() == [(False, holds)]
    mode_ipvs.write_text("")
    run("ip", "link", "del", "kube-ipvs0")
    assert findings() == []


def test_no_tools(ebpflb: Ebpflb, nowhere: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without iptables the nft tables are removed, the unchecked variants are named, and the exit
    status is 1.
    """
    left_by_iptables()
    load_nft()
    with monkeypatch.context() as patched:
        patched.setenv("PATH", "/nowhere")
        done = ebpflb("cleanup", "--kube-proxy", *nowhere)
    assert done.status == 1
    assert removed(done) == ["table ip kube-proxy", "table ip6 kube-proxy"]
    lost = "cannot be checked: the tables nat, filter, mangle of {}: it is not installed here"
    assert done.err.splitlines()[:4] == [lost.format(tool.name) for tool in TOOLS]


@OWN_TABLES
def test_what_connections_need_stays(
    ebpflb: Ebpflb, nowhere: list[str], loopback: None, table: nft.Name
) -> None:
    """`cleanup` leaves a table that keeps NAT alive until no connection is translated."""
    make(table)
    nodes.translate("127.0.0.7", 53)
    done = ebpflb("cleanup", *nowhere)
    assert done.status == 0
    assert (
        f"{table} is kept while it still translates connections; run this command again later"
        in done.out
    )
    assert nft.exists(table)
    conntrack.delete(conntrack.connections(lambda *_: True))
    assert "stays" not in ebpflb("cleanup", *nowhere).out
    assert not nft.exists(table)


@OWN_TABLES
def test_kube_proxys_rules_keep_nat_alive_too(
    ebpflb: Ebpflb, nowhere: list[str], loopback: None, table: nft.Name
) -> None:
    """If kube-proxy serves again, nothing of ours stays, even while connections are translated."""
    load_nft()
    make(table)
    nodes.translate("127.0.0.7", 53)
    assert "stays" not in ebpflb("cleanup", *nowhere).out
    assert not nft.exists(table)


def test_conntrack_is_strict_again(ebpflb: Ebpflb, tmp_path: Path) -> None:
    """What --conntrack-tcp-be-liberal=auto has set is put back; --dry-run names it."""
    paths = Paths(NEVER, tmp_path)
    assert sysctls.be_liberal(paths.liberal_file)
    words = ("cleanup", "--state-dir", NEVER, "--run-dir", tmp_path)
    assert f"the value 1 of the sysctl {sysctls.LIBERAL}" in ebpflb(*words, "--dry-run").out
    assert sysctls.be_liberal(paths.liberal_file)
    assert ebpflb(*words).status == 0
    assert not files.says_one(sysctls.NETFILTER_SYSCTLS / sysctls.LIBERAL)


def test_nat_is_held(ebpflb: Ebpflb, nowhere: list[str], loopback: None) -> None:
    """NAT is kept alive as long as connections are translated, with a message."""
    run("nft", "-f", "-", said=TRANSLATING)
    client = socket(AF_INET, SOCK_DGRAM)
    client.sendto(b"?", ("127.0.0.1", 53))
    done = ebpflb("cleanup", "--kube-proxy", *nowhere)
    assert done.status == 0
    assert "table inet ebpflb-nat is kept while it still translates connections" in done.out
    assert nft.exists(watch.HOLD)
    assert not kube_proxy.detect().rules, "it is no leftover of kube-proxy"
    Path("/proc/sys/net/netfilter/nf_conntrack_udp_timeout").write_text("1")
    client.sendto(b"?", ("127.0.0.1", 53))
    client.close()
    wait_until("the connection is forgotten", lambda: not watch.has_dnat_connections())
    again = ebpflb("cleanup", "--kube-proxy", *nowhere)
    assert again == Done(0, "removed: table inet ebpflb-nat\nnothing of kube-proxy was found\n", "")
    assert not nft.exists(watch.HOLD)


def test_check_reports_kube_proxy(ebpflb: Ebpflb, tmp_path: Path) -> None:
    """`check` reports kube-proxy, with exit status 0."""
    load_nft()
    options = ["check", "--state-dir", NEVER, "-o", "json"]

    def finding() -> tuple[bool, bool, str]:
        done = ebpflb(*options)
        assert done.status == 0
        (found,) = (it for it in answers.results(done.out) if it["feature"] == "kube-proxy")
        return found["ok"], found["required"], found["detail"]

    left = "has stopped and left table ip kube-proxy, table ip6 kube-proxy"
    assert finding() == (False, False, left)
    with answering.process(tmp_path) as pid:
        assert finding() == (False, False, f"is also running (pid {pid})")
    ebpflb("cleanup", "--kube-proxy")
    assert finding() == (True, False, "none")


def test_status_asks_the_agent(
    ebpflb: Ebpflb, nowhere: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If only rules are found, the agent knows whether they were gone before. Its other findings
    may be a minute old, so status checks itself whether a kube-proxy has stopped or is back.
    """
    paths = Paths(NEVER, tmp_path / "never")
    returned, gone = "is also running (its rules have come back)", "has stopped and left"
    answers = "is also running (mode iptables at 127.0.0.1:10249): stop it"
    published = status.initial(node="n", source="s")
    known = {returned: returned, None: returned, answers: gone, f"{gone} rules": gone}
    with status.lock(paths):
        status.StatusFile(paths).write(published.changed(kube_proxy=returned))
        assert "come back" not in ebpflb("status", *nowhere).out
        load_nft()
        for said, expected in known.items():
            status.StatusFile(paths).write(published.changed(kube_proxy=said))
            assert f"kube proxy           {expected}" in ebpflb("status", *nowhere).out
    assert f"kube proxy           {gone}" in ebpflb("status", *nowhere).out
