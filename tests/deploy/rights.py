# SPDX-License-Identifier: Apache-2.0
"""Agents with the capabilities that deploy/ grants, and what they must be able to do."""

import configparser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ebpflb.kernel.node import namespaces
from ebpflb.lab import cni
from ebpflb.lab.hosts import Lab
from tests.deploy import seccomp_default
from tests.deploy.helm import DEPLOY
from tests.kit import requests, stale_udp
from tests.kit.cluster import NODEPORT, VIP, VIP6, Cluster, endpoint, web
from tests.kit.lab_cluster import PORT, new_lab

REQUESTS = 60
# As a container of the chart: / and /sys are read-only, what is mounted for the agent is not.
READ_ONLY = (
    'mount --bind "$0" "$0" && for it in / /sys; do mount -o remount,bind,ro $it || exit; done;'
    ' exec "$@"'
)
Rights = tuple[str, ...]


def granted_by_the_unit() -> Rights:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "systemd/ebpflb.service")
    return tuple(unit["Service"]["CapabilityBoundingSet"].split())


def ours() -> int:
    """Return the capabilities that root has here; a machine may withhold some."""
    return mask_of(Path("/proc/self/status"), "CapBnd")


def mask_of(status: Path, line: str) -> int:
    found = dict(each.split(":", 1) for each in status.read_text().splitlines())
    return int(found[line], 16)


def mask(rights: Rights) -> int:
    return sum(1 << namespaces.CAPABILITIES[name] for name in rights)


def limited_to(rights: Rights, folder: Path, profile: Rights | None = None) -> list[str]:
    """Return the command prefix for root with only these rights, as in a container or unit.

    A container has the seccomp profile RuntimeDefault for these rights, or for those in
    ``profile``.
    """
    here = [name for name in rights if ours() >> namespaces.CAPABILITIES[name] & 1]
    named = "".join(f",+{name.removeprefix('CAP_').lower()}" for name in here)
    tmp = folder / "tmp"
    tmp.mkdir(exist_ok=True)
    return [
        *("unshare", "--mount", "--propagation", "slave", "sh", "-c", READ_ONLY, str(folder)),
        *("env", f"TMPDIR={tmp}", "PYTHONDONTWRITEBYTECODE=1"),
        *("setpriv", "--no-new-privs", f"--bounding-set=-all{named}"),
        *seccomp_default.under(rights if profile is None else profile),
    ]


class Confined(Cluster):
    """A cluster with a client outside, whose packets are translated at a device."""

    def __init__(self, lab: Lab, folder: Path, *options: str) -> None:
        hairpin = cni.Bridge(hairpin=True)
        engine = "--packet-path=auto", "--fast-forward=on"
        super().__init__(lab, folder, *engine, *options, network=hairpin)
        self.outside = lab.outside("outside", 7)


@contextmanager
def cluster(folder: Path, cache: Path) -> Iterator[Confined]:
    """Yield a node whose agent has not started yet; it compiles what is not in the cache."""
    with new_lab() as lab:
        made = Confined(lab, folder, "--cache-dir", str(cache))
        try:
            made.write(web(*map(endpoint, made.web), v6=[endpoint(p, v6=True) for p in made.web]))
            yield made
        finally:
            made.close()


def serves(made: Confined) -> None:
    """Check sockets of pods and of the node in both families, and packets of unhooked pods."""
    everything = web(
        *map(endpoint, made.web), v6=[endpoint(p, v6=True) for p in made.web], nodeport=NODEPORT
    )
    made.publish(everything)
    for host, protocol, address, port in (
        (made.client, "tcp", VIP, PORT),
        (made.client, "udp", VIP6, PORT),
        (made.node, "tcp", VIP, PORT),
        (made.outside, "tcp", made.node.v4, NODEPORT),
    ):
        said = made.request(host, protocol, address, port, REQUESTS)
        assert (said["errors"], len(said["names"])) == ({}, 3), (protocol, address)


def packet_path(made: Confined) -> str:
    """Return the engine that the agent reported last."""
    return made.agent.log().rpartition("packet path: ")[2].partition(" ")[0]


def moves_connected_datagrams(made: Confined, seconds: float) -> bool:
    """Whether a pod's connected UDP socket is ended in time after its endpoint is removed."""
    first, second, _ = made.web
    made.publish(web(endpoint(first)))
    client = requests.udp_socket(made.sockets(made.client), VIP)
    assert stale_udp.connect(client, VIP).name == first.name
    made.publish(web(endpoint(second)))
    return stale_udp.is_ended(client, seconds)
