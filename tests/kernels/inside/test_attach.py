# SPDX-License-Identifier: Apache-2.0
"""Every program of every variant is attached in every way that this kernel has."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path

import pytest

from ebpflb.kernel import bpf
from ebpflb.kernel.attach import cgroup_links, tcx, uplink_program
from ebpflb.kernel.attach.clsact import Clsact
from ebpflb.kernel.attach.tcx import Tcx
from ebpflb.kernel.attach.uplink_program import Answerer
from ebpflb.kernel.maps import bpf_map, layout, state_dir
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.programs import compiler, loader, precompile
from ebpflb.kernel.programs.loader import Program
from ebpflb.kernel.segment import Answer, Segment
from ebpflb.model.addresses import Address
from ebpflb.model.devices import Device
from tests.kernel.attach import device_namespace
from tests.kernel.attach.device_namespace import Namespace
from tests.kernel.variants import eventually
from tests.kit import once
from vagrant.kernels import bytecode

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="bpf(2) is root's")
PACKETS = "hooks/packet.c"
# Explain's programs and what ends something are run, and attached to nothing here.
RUN = {
    precompile.EXPLAIN,
    precompile.SOCKET_END,
    precompile.CONNECTION_END,
    precompile.FLOW_END,
    precompile.QUIET_SOCKET,
}
NOT_AT_CGROUPS = {PACKETS, precompile.ANSWER, precompile.HAND_OVER, *RUN}
AT_CGROUPS = [
    (source, variant)
    for source, its in precompile.VARIANTS.items()
    if source not in NOT_AT_CGROUPS
    for variant in its
]
DEVICES = ("v0", "w0", "br0", "tun0")


Loaded = Callable[[str, str], list[Program]]


@pytest.fixture
def loaded(all_maps: dict[str, Map], shared: Path, cache: Path) -> Loaded:
    """Load a source in a variant; skip if this kernel does not accept it."""

    def load(source: str, variant: str) -> list[Program]:
        with once.alone(shared):
            taken = bytecode.variants(source)
            if variant not in taken:
                pytest.skip("this kernel does not take this variant")
            compiled = compiler.compile_source(source, taken[variant], cache=cache)
        with ExitStack() as opened:
            its = {}
            for name, spec in layout.MONITOR_MAPS.items():
                its[name] = bpf_map.open_map(spec, state_dir.create_map(spec))
                opened.callback(its[name].close)
            return loader.load(compiled, {**all_maps, **its})

    return load


def ids(found: list[Program]) -> dict[str, int]:
    return {one.name: bpf.info(one.fd, "prog_info").id for one in found}


@pytest.mark.parametrize(("source", "variant"), AT_CGROUPS)
def test_links_attach_at_a_cgroup(
    home: StateDir, cgroup: Path, loaded: Loaded, source: str, variant: str
) -> None:
    found = loaded(source, variant)
    cgroup_links.attach(home, cgroup, found)
    assert cgroup_links.attached(home) == ids(found)
    assert set(ids(found)) == set(compiler.sections(source))
    loader.close(found)


@pytest.fixture(params=["tcx", "clsact"])
def way(request: pytest.FixtureRequest, home: StateDir) -> Iterator[Tcx | Clsact]:
    if request.param == "tcx" and not tcx.works():
        pytest.skip("this kernel has no tcx")
    yield (Tcx if request.param == "tcx" else Clsact)(home.devices_directory)


@pytest.fixture
def ns() -> Iterator[Namespace]:
    with device_namespace.entered(f"ebpflb-test-{os.getpid()}-attach") as made:
        yield made


@pytest.mark.parametrize(
    "variant", [v for v in precompile.VARIANTS[PACKETS] if "recording" not in v]
)
def test_tcx_and_clsact_attach_at_devices(
    way: Tcx | Clsact, ns: Namespace, loaded: Loaded, variant: str
) -> None:
    """tcx and clsact attach the programs at devices of all kinds."""
    found = loaded(PACKETS, variant)
    at = ns.tcx if way.name == "tcx" else ns.filters
    for name in DEVICES:
        way.attach(ns.index(name), found)
        assert at(name) == {end: [number] for end, number in ids(found).items()}
    way.detach(way.recorded())
    assert eventually(lambda: all(at(name) == device_namespace.NONE for name in DEVICES))
    loader.close(found)


def test_a_further_program_runs_first(
    way: Tcx | Clsact,
    ns: Namespace,
    home: StateDir,
    loaded: Loaded,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the packet programs, also after these were attached again; it leaves nothing."""
    monkeypatch.setattr(tcx, "works", lambda: way.name == "tcx")
    here, at = device(ns, "v0"), ns.tcx if way.name == "tcx" else ns.filters
    packets, further = loaded(PACKETS, "plain"), loaded(precompile.FLOW_END, "plain")
    wanted = [*ids(further).values(), ids(packets)["ingress"]]
    for _ in range(2):
        way.attach(here.index, packets)
        uplink_program.HAND_OVER.attach(home, [here], further[0])
        assert at("v0")["ingress"] == wanted
        way.detach([here.index])
    uplink_program.HAND_OVER.attach(home, [], further[0])
    assert eventually(lambda: at("v0") == device_namespace.NONE)
    assert not uplink_program.HAND_OVER.recorded(home)
    loader.close([*packets, *further])


def test_answers(
    way: Tcx | Clsact, ns: Namespace, home: StateDir, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device answers for the addresses that it was given, until they are withheld; a second
    agent finds them.
    """
    monkeypatch.setattr(tcx, "works", lambda: way.name == "tcx")
    asked, other = map(ip_address, ("192.0.2.200", "2001:db8::200"))
    here = device(ns, "v0")
    assert eventually(lambda: device(ns, "w0").addresses)  # solicitations come from there
    there = device(ns, "w0")
    answerer = Answerer(home, cache)
    answerer.attach([here])
    segment = Segment(there)
    try:
        assert answers(segment, asked) == answers(segment, other) == set()
        for address in (asked, other):
            answerer.give(address, here)
        mac = bytes.fromhex(here.mac.replace(":", ""))
        assert answers(segment, asked, wanted=1) == {Answer(asked, mac)}
        assert answers(segment, other, wanted=1) == {Answer(other, mac)}
        answerer.close()
        answerer = Answerer(home, cache)
        assert answerer.given.keys() == {asked, other}
        answerer.attach([here])
        assert answers(segment, asked, wanted=1)
        answerer.withhold([asked])
        assert answers(segment, asked) == set()
        answerer.attach([])
        assert answers(segment, other) == set()
    finally:
        segment.close()
        answerer.close()


def device(ns: Namespace, name: str) -> Device:
    ns.run(f"ip link set {name} up")
    return next(each for each in ns.served(name) if each.name == name)


def answers(segment: Segment, address: Address, wanted: int = 0) -> set[Answer]:
    """Ask for the address until so many have answered, or for a while."""
    found: set[Answer] = set()
    end = time.monotonic() + (10 if wanted else 0.3)
    while time.monotonic() < end and len(found) < max(wanted, 1):
        segment.ask(address)
        time.sleep(0.02)
        found |= {it for it in segment.take() if isinstance(it, Answer) and it.address == address}
    return found
