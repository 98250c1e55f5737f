# SPDX-License-Identifier: Apache-2.0
"""How long a load balancer address is away when its owner's cable is pulled, and what the program
that answers for addresses costs.

    sudo .venv/bin/python -m bench.addresses [--rounds N]

Three nodes, a client beyond a router that opens a connection every 10 ms, and endpoints on the
nodes that stay, to which requests are handed over. A round pulls the cable of the address's owner
and plugs it in again; its figures are the longest time between two connections that were served,
and how many connections that were opened before are not answered meanwhile. Then a station asks for
the address ten thousand times a second, while the client's connections go on.
"""

import argparse
import json
import subprocess
import sys
import time
from contextlib import ExitStack
from ipaddress import ip_address
from itertools import pairwise
from pathlib import Path

from bench import targets
from bench.report import Line, Lines, Row, row_of
from bench.result import run_bench
from bench.temporary_lab import print_step, temporary_lab
from ebpflb.agent.hand_over import NOTING_SECONDS
from ebpflb.kernel.attach.uplink_program import Given
from ebpflb.kernel.maps import bpf_map, state_dir
from ebpflb.kernel.maps.layout import ANSWERED
from ebpflb.kernel.programs import compiler, loader
from ebpflb.kernel.programs.precompile import ANSWER
from ebpflb.lab import cni, manifests, traffic
from ebpflb.lab.agents import LabAgent, wait_until
from ebpflb.lab.hosts import Host, Lab
from ebpflb.lab.netns import Namespace
from ebpflb.lab.router import NODES
from ebpflb.model.pools import CLASS, ranked
from ebpflb.options import Paths
from ebpflb.serve import status

NAMES = ("one", "two", "three")
ADDRESS, PORT, TARGET = "192.0.2.200", 80, 8080
OWNER = ranked(ADDRESS, NAMES)[0]
WAIT, ATTEMPT, AWAY = 0.01, 0.1, 6.0  # seconds
KEPT = 16  # connections that are open while the cable is pulled
REPEAT = 1_000_000
_CLIENT = """
import socket, sys, time
while True:
    begun = time.monotonic()
    try:
        place, seconds = (sys.argv[1], int(sys.argv[2])), float(sys.argv[3])
        with socket.create_connection(place, timeout=seconds) as it:
            served = bool(it.recv(64))
    except OSError:
        served = False
    print(f"{begun} {int(served)}", flush=True)
    time.sleep(float(sys.argv[4]))
"""
# Connections that are handed over: their endpoint sees the client. They say something when they are
# told to; prints how many are answered.
_KEEPS = """
import socket, sys
place, kept = (sys.argv[1], int(sys.argv[2])), []
while len(kept) < int(sys.argv[3]):
    it = socket.create_connection(place, timeout=5)
    if it.recv(64).decode().split()[1] == it.getsockname()[0]:
        kept.append(it)
print("ready", flush=True)
sys.stdin.readline()
def lives(it):
    try:
        it.sendall(b"still there?")
        return bool(it.recv(64))
    except OSError as error:
        print("a connection has ended:", error, file=sys.stderr, flush=True)
        return False
print(sum(map(lives, kept)))
"""

RATE, ASKING = 10_000, 10  # questions a second, and seconds
_STRANGER = 77
# Each question has another sender, which its answer names; the kernel says when that came.
_ASKS = """
import json, socket, struct, sys, time
target, rate, seconds = socket.inet_aton(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
wire.setsockopt(socket.SOL_SOCKET, 35, 1)  # SO_TIMESTAMPNS
wire.setsockopt(socket.SOL_SOCKET, 33, 1 << 24)  # SO_RCVBUFFORCE
wire.bind(("eth0", 0x806))
wire.setblocking(False)
mac = wire.getsockname()[4]
head = b"\\xff" * 6 + mac + b"\\x08\\6\\0\\1\\x08\\0\\6\\4\\0\\1" + mac
sent, took = {}, {}
def take():
    while True:
        try:
            frame, told, *_ = wire.recvmsg(2048, 64)
        except BlockingIOError:
            return
        if frame[20:22] == b"\\0\\2" and told:
            at, more = struct.unpack("qq", told[0][2][:16])
            number = int.from_bytes(frame[38:42], "big")
            if number in sent:
                took.setdefault(number, at * 10**9 + more - sent[number])
begun = time.monotonic()
for turn in range(seconds * 1000):
    for number in range(turn * rate // 1000, (turn + 1) * rate // 1000):
        sender = 0xC6120000 + number
        sent[sender] = time.clock_gettime_ns(time.CLOCK_REALTIME)
        wire.send(head + struct.pack("!I", sender) + bytes(6) + target)
    take()
    time.sleep(max(0, begun + (turn + 1) / 1000 - time.monotonic()))
spent = time.monotonic() - begun
time.sleep(0.5)
take()
print(json.dumps([spent, len(sent), [*took.values()]]))
"""


def main() -> None:
    run_bench(__doc__, _measured, rounds=20)


def _measured(wanted: argparse.Namespace) -> Lines:
    with temporary_lab("bench-addresses") as (lab, folder, stack):
        agents = _cluster(lab, folder, stack)
        client = lab.outside("client", 1)
        _settle(agents)
        time.sleep(NOTING_SECONDS)  # until no node remembers flows that it has masqueraded
        rounds = [_round(lab, client, agents, number) for number in range(wanted.rounds)]
        _settle(agents)
        asked = _asked(lab, client)
    away, ended = [it for it, _ in rounds], sum(it for _, it in rounds)
    yield "a load balancer address whose owner's cable is pulled: away"
    yield row_of("median", away, "s", targets.FAILOVER)
    yield row_of("worst", away, "s", targets.FAILOVER_WORST, value=max(away))
    yield Row("connections through it that ended", ended, f"of {KEPT * len(rounds):,}", 0)
    yield from asked
    yield "the program that answers, a packet, by test runs (an empty program takes 26 of them)"
    for name, nanoseconds in _program().items():
        yield row_of(name, [nanoseconds], "ns")


def _cluster(lab: Lab, folder: Path, stack: ExitStack) -> list[LabAgent]:
    """Return the agents of the nodes, which serve the address."""
    nodes = [lab.node(name, number) for number, name in enumerate(NAMES, 1)]
    for one, other in zip(nodes, (*nodes[1:], nodes[0]), strict=True):
        lab.join(one, other)
    staying = [node for node in nodes if node.name != OWNER]
    pods = {node: lab.pod(node, f"pod-{node.name}", 11) for node in staying}
    for pod in pods.values():
        words = ("serve", pod.name, str(TARGET))
        lab.keep_ready(pod.python(Path(traffic.__file__), *words, stdout=subprocess.PIPE))
    agents = []
    for node in nodes:
        agent = LabAgent(lab, node, folder)
        pods_at = "--cluster-cidr", ",".join(cni.NETWORKS)
        agent.defaults = "--l2-pool", ADDRESS, "--hand-over=keep-client", *pods_at
        manifests.write(agent.manifests / "all.yaml", _objects(nodes, pods))
        stack.callback(agent.close)
        agent.start()
        agents.append(agent)
    return agents


def _objects(nodes: list[Host], pods: dict[Host, Host]) -> list[manifests.Manifest]:
    ports = [{"name": "tcp", "port": PORT, "protocol": "TCP"}]
    endpoints = [
        manifests.endpoint(pod.v4, node=node.name, target=pod.name) for node, pod in pods.items()
    ]
    return [
        manifests.service(
            "web",
            ["10.96.0.10"],
            ports,
            ingress=[ADDRESS],
            type="LoadBalancer",
            loadBalancerClass=CLASS,
        ),
        manifests.endpoint_slice("web", "IPv4", endpoints, [{**ports[0], "port": TARGET}]),
        *(manifests.node(node.name, node.v4) for node in nodes),
    ]


def _round(lab: Lab, client: Host, agents: list[LabAgent], number: int) -> tuple[float, int]:
    """Pull the owner's cable; return the seconds without a connection, and how many connections of
    before ended.
    """
    print_step(f"round {number + 1}")
    _settle(agents)
    python, words = [sys.executable, "-IS", "-c"], (ADDRESS, str(PORT))
    pipes: dict[str, int] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    keeping = client.start([*python, _KEEPS, *words, str(KEPT)], **pipes)
    lab.keep_ready(keeping)
    opening = *words, str(ATTEMPT), str(WAIT)
    process = client.start([*python, _CLIENT, *opening], stdout=subprocess.PIPE)
    cable = f"{NODES.name}{NAMES.index(OWNER) + 1}"
    time.sleep(1)
    lab.router.ip(f"link set {cable} down")
    time.sleep(AWAY)
    process.kill()
    lives, _ = keeping.communicate("\n")
    assert process.stdout
    rows = [line.split() for line in process.stdout if line.endswith("\n")]
    lab.router.ip(f"link set {cable} up")
    served = [float(at) for at, is_served in rows if is_served == "1"]
    return max(after - at for at, after in pairwise(served)), KEPT - int(lives)


def _asked(lab: Lab, client: Host) -> list[Line]:
    """Ask for the address all the time; return what became of the questions, and of others."""
    print_step("asking for the address")
    stranger = Namespace(f"{lab.prefix}-stranger")
    stranger.create(lab.cgroup)
    lab.router.plug(stranger, NODES, _STRANGER)
    opens = (_CLIENT, ADDRESS, str(PORT), str(1.0), str(WAIT))
    opening = client.start([sys.executable, "-IS", "-c", *opens], stdout=subprocess.PIPE)
    asks = (_ASKS, ADDRESS, str(RATE), str(ASKING))
    said = subprocess.run(
        [*stranger.enter, sys.executable, "-IS", "-c", *asks],
        stdout=subprocess.PIPE, text=True, check=True,
    ).stdout  # fmt: skip
    opening.kill()
    assert opening.stdout
    served = [line.split()[1] for line in opening.stdout if line.endswith("\n")]
    spent, count, took = json.loads(said)
    milliseconds = sorted(each / 1e6 for each in took)
    late = milliseconds[int(len(milliseconds) * 0.99)]
    return [
        f"the address is asked for {count / spent:,.0f} times a second, {spent:.0f} s",
        Row("questions without an answer", count - len(took), f"of {count:,}", 0),
        row_of("until the answer, median", milliseconds, "ms", targets.ANSWER),
        row_of("until the answer, p99", milliseconds, "ms", targets.ANSWER, value=late),
        Row("connections that failed meanwhile", served.count("0"), f"of {len(served):,}", 0),
    ]


def _settle(agents: list[LabAgent]) -> None:
    """Wait until the owner alone answers, as all others have been told, and all hand over."""
    wait_until("the owner answers", lambda: _owners(agents) == {OWNER})
    wait_until("requests are handed over", lambda: _hand_overs(agents) == {"to 2 of 2 other nodes"})
    time.sleep(2)


def _owners(agents: list[LabAgent]) -> set[str]:
    published = [status.read(agent.paths) for agent in agents]
    return {it.address_owners.get(ADDRESS, "") if it else "" for it in published}


def _hand_overs(agents: list[LabAgent]) -> set[str]:
    published = [status.read(agent.paths) for agent in agents]
    return {it.hand_over if it else "" for it in published}


def _program() -> dict[str, int]:
    """Return the nanoseconds of a packet for nobody, and of a question."""
    answered = bpf_map.open_map(ANSWERED, state_dir.create_map(ANSWERED))
    answered.write([(ip_address(ADDRESS), Given(1, "02:00:00:00:00:01"))])
    compiled = compiler.compile_source(ANSWER, cache=Paths.cache)
    (program,) = loader.load(compiled, {ANSWERED.name: answered})
    ether = bytes.fromhex("ffffffffffff 020000000002")
    arp = "0806 0001 0800 06 04 0001 020000000002 c0000201 000000000000"
    question = ether + bytes.fromhex(arp) + ip_address(ADDRESS).packed
    other = ether + bytes.fromhex(arp) + ip_address("192.0.2.199").packed
    frames = {
        "IPv4": ether + b"\x08\0" + bytes(60),
        "IPv6": ether + b"\x86\xdd" + bytes(60),
        "a question for another address": other,
    }
    took = {
        name: min(
            loader.run_program(program.fd, frame, repeat=REPEAT).nanoseconds for _ in range(5)
        )
        for name, frame in frames.items()
    }
    took["a question that is answered"] = min(
        loader.run_program(program.fd, question).nanoseconds for _ in range(100)
    )
    loader.close([program])
    answered.close()
    return took


if __name__ == "__main__":
    main()
