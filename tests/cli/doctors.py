# SPDX-License-Identifier: Apache-2.0
"""`ebpflb doctor` on the node of a cluster: its output, and the traces of its connections."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ebpflb.kernel.node.scratch_namespace import VETH_PREFIX
from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.model.packet_path import Engine
from ebpflb.plan.canary import is_canary
from ebpflb.serve import status
from tests.cli.conftest import Done
from tests.kit import answers, forked
from tests.kit.cluster import NODEPORT, Cluster, endpoint, running, web

RANGES = ("10.96.0.0/16", "fd00:96::/112")


@contextmanager
def published(folder: Path, *options: str, engine: Engine = Engine.FLOWS) -> Iterator[Cluster]:
    """Yield a cluster whose agent has Services of both families, and their ranges."""
    with running(folder, *options, engine=engine) as made:
        backends = list(map(endpoint, made.web))
        services = web(*backends, v6=[endpoint(it, v6=True) for it in made.web], nodeport=NODEPORT)
        made.publish(services, manifests.service_cidr(*RANGES))
        wait_until("status has them", lambda: in_status(made) == (5, 12))
        yield made


def in_status(cluster: Cluster) -> tuple[int, int]:
    """Return the numbers of service ports, the marker's included, and of their backends."""
    found = status.read(cluster.agent.paths)
    return (found.service_ports, found.backends) if found else (0, 0)


def on_node(cluster: Cluster, *command: str) -> Done:
    done = subprocess.run(
        [*cluster.node.enter, *command], capture_output=True, text=True, check=False
    )
    return Done(done.returncode, done.stdout, done.stderr)


def doctor(cluster: Cluster, *words: str) -> Done:
    where = [*cluster.agent.where, "--cgroup-root", str(cluster.node.cgroup)]
    cgroup = cluster.node.cgroup
    done = forked.run("doctor", *where, *words, netns=cluster.node.netns, cgroup=cgroup)
    return Done(done.returncode, done.stdout, done.stderr)


def canaries(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Return doctor's results about its connections, by path."""
    done = doctor(cluster, "-o", "json")
    assert done.err == ""
    found = {it["feature"]: it for it in answers.results(done.out) if "canary" in it["feature"]}
    wrong = any(it["required"] and not it["ok"] for it in answers.results(done.out))
    assert done.status == wrong
    return found


def ok(found: dict[str, dict[str, Any]]) -> list[str]:
    return [name.removeprefix("canary: ") for name, it in found.items() if it["ok"]]


def left(cluster: Cluster) -> list[str]:
    """Return what remains of a canary: service ports, slots, cluster IPs, ranges and devices."""
    maps, found = cluster.maps, []
    found += [str(name) for _, name in maps["service_names"].items() if is_canary(name)]
    found += [f"range {key}" for key, _ in maps["source_ranges"].items()]
    services = {key.address for key, _ in maps["services"].items()}
    found += [f"cluster IP {key}" for key, _ in maps["cluster_ips"].items() if key not in services]
    links = on_node(cluster, "ip", "-o", "link").out + on_node(cluster, "ip", "route").out
    return found + [line for line in links.splitlines() if VETH_PREFIX in line]
