# SPDX-License-Identifier: Apache-2.0
"""Commands show a Service with 10,000 endpoints page by page, and escape a hostile name of one of
them.
"""

from collections.abc import Iterator

import pytest

from ebpflb.lab import manifests
from tests.cli.conftest import Ebpflb
from tests.kit.cluster import Cluster

MANY, IN_A_SLICE = 10_000, 1000
HOSTILE = "a\x1b[2Jb"
PORTS = [{"name": "http", "port": 80, "protocol": "TCP"}]


def slices() -> Iterator[manifests.Manifest]:
    names = [HOSTILE, *(f"pod-{number}" for number in range(1, MANY))]
    every = [
        manifests.endpoint(f"10.250.{i // 250}.{i % 250 + 1}", node="n", target=it)
        for i, it in enumerate(names)
    ]
    for first in range(0, MANY, IN_A_SLICE):
        part = every[first : first + IN_A_SLICE]
        yield manifests.endpoint_slice("many", "IPv4", part, PORTS, name=f"many-{first}")


@pytest.fixture(scope="module", autouse=True)
def published(cluster: Cluster) -> None:
    cluster.publish(manifests.service("many", ["10.96.1.1"], PORTS), list(slices()))


def test_one_row_of_a_list(ebpflb: Ebpflb, where: list[str]) -> None:
    done = ebpflb("services", "list", "default/many", *where)
    rows = [line.split() for line in done.out.splitlines() if "default/many" in line]
    assert len(rows) == 1 and str(MANY) in rows[0]


def test_all_endpoints(ebpflb: Ebpflb, where: list[str]) -> None:
    done = ebpflb("services", "get", "default/many", *where)
    assert len(done.out.splitlines()) > MANY and "\x1b" not in done.out
