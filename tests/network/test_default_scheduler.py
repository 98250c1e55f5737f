# SPDX-License-Identifier: Apache-2.0
"""The scheduler of Services that choose none: by --scheduler, or by a KubeProxyConfiguration."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ebpflb.lab import cni
from ebpflb.model.annotations import LEAST_CONNECTIONS, MAGLEV, RANDOM, ROUND_ROBIN, SOURCE_HASH
from tests.kit import scheduled
from tests.kit.parameters import both_engines
from tests.kit.scheduled import dial, from_port, met, settled
from tests.kit.two_nodes import TwoNodes

PAIR = ["here", "there"]
CLIENTS = ("hooked", "unhooked", "outside")  # by sockets, and by packets
MANY = 16  # connections
CONFIG = """\
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clusterCIDR: {networks}
mode: ipvs
ipvs: {{scheduler: "{name}"}}
"""
WITHOUT_EQUAL = (
    "ipvs.scheduler has no counterpart in ebpflb, so connections are spread at random: fo"
)

pytestmark = both_engines
Run = Callable[..., None]


@pytest.fixture(scope="module")
def run(two: TwoNodes) -> Iterator[Run]:
    """Starts the near node's agent again with these options beside its own."""
    agent = two.agents[0]
    its = agent.options

    def started(*options: str) -> None:
        agent.stop()
        agent.log_file.unlink()
        agent.options = *its, *options
        agent.start()

    yield started
    started()


def is_random(two: TwoNodes, who: str) -> bool:
    names = met(two, who, MANY)
    return {*names} == {*PAIR} and not alternate(names)


def alternate(names: list[str]) -> bool:
    return sorted(names[:2]) == PAIR and names == names[:2] * (len(names) // 2)


def is_in_turn(two: TwoNodes, who: str) -> bool:
    return alternate(met(two, who, MANY))


def is_by_load(two: TwoNodes, who: str) -> bool:
    """Each pair of connections that stay open meets both; if one's end, it gets the next ones."""
    with ExitStack() as opened:
        held = [dial(two, who, opened) for _ in range(MANY)]
        for name, each in held:
            if name == PAIR[0]:
                each.close()
        settled(two, MANY // 2)
        names = [dial(two, who, opened)[0] for _ in range(MANY // 2)]
    settled(two)
    pairs = [{name for name, _ in held[at : at + 2]} for at in range(0, MANY, 2)]
    return all(pair == {*PAIR} for pair in pairs) and {*names} == {PAIR[0]}


def is_by_port(two: TwoNodes, who: str) -> bool:
    """A socket has no port yet; from the same ports packets meet the same endpoints."""
    if who == "hooked":
        return is_random(two, who)
    first, again = (from_ports(two, who) for _ in range(2))
    return {*first} == {*PAIR} and first == again


def from_ports(two: TwoNodes, who: str) -> list[str]:
    ports = range(12_100, 12_100 + MANY)
    names = [from_port(two, who, "tcp", port, v6=False) for port in ports]
    two.delete_flows("tcp_flows")
    return names


def is_by_client(two: TwoNodes, who: str) -> bool:
    return len({*met(two, who, MANY)}) == 1


TOLD = {
    RANDOM: is_random,
    ROUND_ROBIN: is_in_turn,
    LEAST_CONNECTIONS: is_by_load,
    MAGLEV: is_by_port,
    SOURCE_HASH: is_by_client,
}


def assert_drawn(two: TwoNodes, default: str) -> None:
    """Without an annotation by the default; with one by what that says."""
    other = RANDOM if default != RANDOM else ROUND_ROBIN
    for annotation, name in ((None, default), (other, other)):
        two.publish(scheduled.service(two, annotation, *PAIR))
        settled(two)
        found = {who: TOLD[name](two, who) for who in CLIENTS}
        assert found == dict.fromkeys(CLIENTS, True), (annotation, name)


@pytest.mark.parametrize("name", TOLD)
def test_a_service_that_chooses_none_has_the_scheduler_of_the_option(
    two: TwoNodes, run: Run, name: str
) -> None:
    """An annotation goes before it."""
    run("--scheduler", name)
    assert_drawn(two, name)


@pytest.mark.parametrize(
    ("of_kernel", "options", "name"),
    [
        ("", (), ROUND_ROBIN),
        ("wlc", (), LEAST_CONNECTIONS),
        ("sh", (), SOURCE_HASH),
        ("wlc", ("--scheduler", ROUND_ROBIN), ROUND_ROBIN),
    ],
)
def test_a_configuration_of_mode_ipvs_has_a_default(
    two: TwoNodes, run: Run, tmp_path: Path, of_kernel: str, options: tuple[str, ...], name: str
) -> None:
    """The scheduler that comes next to the kernel's; the option goes before it."""
    run("--config", written(tmp_path, of_kernel), *options)
    assert WITHOUT_EQUAL not in two.agents[0].log()
    assert_drawn(two, name)


def test_a_scheduler_of_the_kernel_without_an_equal_is_named(
    two: TwoNodes, run: Run, tmp_path: Path
) -> None:
    """Connections go at random."""
    run("--config", written(tmp_path, "fo"))
    assert two.agents[0].log().count(WITHOUT_EQUAL) == 1
    assert_drawn(two, RANDOM)


def written(folder: Path, of_kernel: str) -> str:
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(networks=",".join(cni.NETWORKS), name=of_kernel))
    return str(config)
