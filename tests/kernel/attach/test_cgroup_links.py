# SPDX-License-Identifier: Apache-2.0
"""Programs at a cgroup: attached once, replaced in place, attached again if needed."""

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from ipaddress import ip_address
from pathlib import Path

import pytest

from ebpflb.entries.services import Backend, Frontend, Range, ServiceEntry
from ebpflb.errors import KernelError
from ebpflb.kernel import bpf
from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.attach.device_programs import unpin_all
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.programs import loader
from ebpflb.kernel.programs.compiler import Compiled
from ebpflb.kernel.programs.loader import SECTIONS, Program
from tests.kernel.variants import eventually, needs_root, open_files

pytestmark = needs_root

ALLOW = struct.pack("<BBhi", 0xB7, 0, 0, 1) + struct.pack("<BBhi", 0x95, 0, 0, 0)


@pytest.fixture
def others(one_variant: Compiled, all_maps: dict[str, Map]) -> Iterator[list[Program]]:
    """Load the same programs again, as a new agent does."""
    found = loader.load(one_variant, all_maps)
    yield found
    loader.close(found)


def program_ids(found: list[Program]) -> dict[str, int]:
    return {p.name: bpf.info(p.fd, "prog_info").id for p in found}


def link_ids(home: StateDir) -> dict[str, int]:
    found = {}
    for pin in home.links():
        fd = bpf.get(str(pin))
        assert fd is not None
        found[pin.name] = bpf.info(fd, "link_info").id
        os.close(fd)
    return found


def at(cgroup: Path) -> dict[str, list[int]]:
    """Return the programs attached to this cgroup by section, as the kernel reports them."""
    target = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return {name: bpf.query(target, attach.attach_type) for name, attach in SECTIONS.items()}
    finally:
        os.close(target)


def test_the_root_is_found_beside_cgroup_v1() -> None:
    """The root of cgroup v2 is found, also if cgroup v1 is mounted."""
    assert (cgroup_links.cgroup_root() / "cgroup.controllers").exists()


def test_new_programs_replace_old_ones(
    home: StateDir, cgroup: Path, loaded: list[Program], others: list[Program]
) -> None:
    """New programs replace the old ones in the same links."""
    cgroup_links.attach(home, cgroup, loaded)
    before = link_ids(home)
    cgroup_links.attach(home, cgroup, others)
    assert link_ids(home) == before
    assert cgroup_links.attached(home) == program_ids(others)
    assert all(len(found) == 1 for found in at(cgroup).values())


def test_link_without_cgroup(home: StateDir, cgroup: Path, loaded: list[Program]) -> None:
    """The kernel refuses to update a link whose cgroup was removed (ENOLINK): it is replaced."""
    cgroup_links.attach(home, cgroup, loaded[:1])
    cgroup.rmdir()
    fd = bpf.get(str(home.links_directory / loaded[0].name))
    assert fd is not None
    assert eventually(lambda: not bpf.info(fd, "link_info").cgroup)
    with pytest.raises(KernelError, match="Link has been severed"):
        bpf.link_update(fd, loaded[0].fd)
    os.close(fd)


def test_removal_detaches_the_programs(home: StateDir, cgroup: Path, loaded: list[Program]) -> None:
    """Removing the state directory detaches the programs."""
    cgroup_links.attach(home, cgroup, loaded)
    unpin_all(home)
    assert eventually(lambda: not any(at(cgroup).values()))
    assert cgroup_links.attached(home) == {}


def test_first_attach_fails(home: StateDir, cgroup: Path, loaded: list[Program]) -> None:
    """If a hook refuses its program, no program is attached."""
    wrong = loaded[-1]._replace(attach_type=SECTIONS["cgroup/connect4"].attach_type)
    with pytest.raises(KernelError):
        cgroup_links.attach(home, cgroup, [*loaded[:-1], wrong])
    assert eventually(lambda: not any(at(cgroup).values()))
    assert not list(home.links())


def test_no_leak(home: StateDir, cgroups: Iterator[Path], loaded: list[Program]) -> None:
    """Attaching, replacing and moving leave no descriptor behind."""
    before = open_files()
    first, second = next(cgroups), next(cgroups)
    for target in (first, first, second):
        cgroup_links.attach(home, target, loaded)
        cgroup_links.attached(home)
        cgroup_links.foreign_programs(target, set())
    assert open_files() == before


def test_programs_of_another_agent_are_found(
    home: StateDir, cgroups: Iterator[Path], loaded: list[Program]
) -> None:
    """Another agent's program is found, here and at parent cgroups, and distinguished from our
    own.
    """
    parent = next(cgroups)
    child = parent / "child"
    child.mkdir()
    fd = bpf.prog_load(name="other_program", program_type=18, attach_type=10, code=ALLOW, log=None)
    target = os.open(parent, os.O_RDONLY)
    link = bpf.link_create(fd, target, 10)
    try:
        cgroup_links.attach(home, child, loaded)
        ours = {id for each in loaded for id in bpf.map_ids(each.fd)}
        number = bpf.info(fd, "prog_info").id
        expected = {"cgroup/connect4": [f"other_program #{number}"]}
        assert (
            cgroup_links.foreign_programs(child, ours)
            == cgroup_links.foreign_programs(parent, ours)
            == expected
        )
        assert set(cgroup_links.foreign_programs(child, set())) == set(SECTIONS)
    finally:
        for descriptor in (link, target, fd):
            os.close(descriptor)
        unpin_all(home)
        child.rmdir()


CLIENT = """
import os, socket, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
stream = socket.create_connection(("172.30.0.1", 80), timeout=60)
print(stream.getpeername(), stream.recv(9))
"""


def test_a_process_reaches_the_backend(
    home: StateDir, cgroup: Path, loaded: list[Program], all_maps: dict[str, Map]
) -> None:
    """A process in the cgroup reaches the backend, and sees the service."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        publish(all_maps, server.getsockname()[1])
        cgroup_links.attach(home, cgroup, loaded)
        command = [sys.executable, "-c", CLIENT, str(cgroup)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            server.settimeout(60)
            answer, _peer = server.accept()
            answer.sendall(b"from here")
            shown, _ = client.communicate(timeout=60)
            answer.close()
    assert shown == "('172.30.0.1', 80) b'from here'\n"
    assert all_maps["service_stats"].get(3) == (1, 0, 0, 0)
    assert eventually(lambda: all_maps["backend_stats"].get(5) == (1, 1))


def publish(all_maps: dict[str, Map], port: int) -> None:
    """Publish service 3 at 172.30.0.1:80, with backend 5 on loopback."""
    backend = Backend(ip_address("127.0.0.1"), port, frozenset({"cluster"}), 5, 3)
    all_maps["slots"].write([(7, backend)])
    all_maps["backend_slots"].write([(5, 7)])
    frontend = Frontend(ip_address("172.30.0.1"), 80, 6)
    service = ServiceEntry(3, frozenset({"endpoints"}), 0, 1, Range(7, 1), Range(8, 0))
    all_maps["services"].write([(frontend, service)])
