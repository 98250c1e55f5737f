# SPDX-License-Identifier: Apache-2.0
"""Every program of every variant, at work in every way that this kernel has."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.datapath import kernel
from ebpflb.datapath.attach import cgroup_links, tcx
from ebpflb.datapath.attach.clsact import Clsact
from ebpflb.datapath.attach.tcx import Tcx
from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.datapath.maps.state_dir import StateDir
from ebpflb.datapath.programs import compiler, loader
from ebpflb.datapath.programs.loader import Program
from tests.datapath.attach import device_namespace
from tests.datapath.attach.device_namespace import Namespace
from tests.datapath.variants import eventually
from vagrant.kernels import bytecode

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="bpf(2) is root's")
PACKETS = "hooks/packet.c"
# The probe for conntrack is run once and attached nowhere.
NOT_AT_CGROUPS = {PACKETS, bytecode.PROBE}
AT_CGROUPS = [
    (source, variant)
    for source, its in bytecode.VARIANTS.items()
    if source not in NOT_AT_CGROUPS
    for variant in its
]
DEVICES = ("v0", "w0", "br0", "tun0")


def loaded(source: str, variant: str, maps: dict[str, Map], cache: Path) -> list[Program]:
    taken = bytecode.variants(source)
    if variant not in taken:
        pytest.skip("this kernel does not take this variant")
    return loader.load(compiler.compile_source(source, taken[variant], cache=cache), maps)


def ids(found: list[Program]) -> dict[str, int]:
    return {one.name: kernel.info(one.fd, "prog_info").id for one in found}


@pytest.mark.parametrize(("source", "variant"), AT_CGROUPS)
def test_cgroup(
    home: StateDir,
    cgroup: Path,
    all_maps: dict[str, Map],
    cache: Path,
    source: str,
    variant: str,
) -> None:
    """By links at a cgroup."""
    found = loaded(source, variant, all_maps, cache)
    cgroup_links.attach(home, cgroup, found)
    assert cgroup_links.attached(home) == ids(found)
    assert set(ids(found)) == set(compiler.sections(source))
    loader.close(found)


@pytest.fixture(params=["tcx", "clsact"])
def way(request: pytest.FixtureRequest, home: StateDir) -> Iterator[Tcx | Clsact]:
    if request.param == "tcx" and not tcx.works():
        pytest.skip("this kernel has no tcx")
    yield {"tcx": Tcx, "clsact": Clsact}[request.param](home.devices_directory)


@pytest.fixture
def ns() -> Iterator[Namespace]:
    with device_namespace.entered(f"ebpflb-test-{os.getpid()}-attach") as made:
        yield made


@pytest.mark.parametrize("variant", bytecode.VARIANTS[PACKETS])
def test_devices(
    way: Tcx | Clsact, ns: Namespace, all_maps: dict[str, Map], cache: Path, variant: str
) -> None:
    """At devices of all sorts, by tcx and by clsact."""
    found = loaded(PACKETS, variant, all_maps, cache)
    at = ns.tcx if way.name == "tcx" else ns.filters
    for name in DEVICES:
        way.attach(ns.index(name), found)
        assert at(name) == {end: [number] for end, number in ids(found).items()}
    way.detach_others(set())
    assert eventually(lambda: all(at(name) == device_namespace.NONE for name in DEVICES))
    loader.close(found)
