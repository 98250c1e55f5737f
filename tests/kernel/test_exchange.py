# SPDX-License-Identifier: Apache-2.0
"""Programs of another variant replace the usual ones, which then replace them again."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebpflb.errors import KernelError
from ebpflb.kernel import bpf
from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.attach.device_programs import unpin_all
from ebpflb.kernel.datapath import Datapath
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.programs.loader import Program, ProgramSet
from tests.kernel.attach.device_namespace import Namespace, entered
from tests.kernel.variants import needs_root

pytestmark = needs_root

NAME = f"ebpflb-test-{os.getpid()}-exchange"
Make = Callable[[], ProgramSet]


@pytest.fixture
def ns() -> Iterator[Namespace]:
    """Move the test's thread into a namespace."""
    with entered(NAME) as made:
        yield made


@pytest.fixture
def datapath(directory: Path, cgroup: Path, ns: Namespace, cache: Path) -> Iterator[Datapath]:
    """Return a datapath whose programs are in force at the cgroup and at every device."""
    made = Datapath(StateDir(directory))
    made.load(cache)
    assert made.attach(cgroup, ns.served()) == {}
    yield made
    made.close()
    unpin_all(made.state)


@pytest.fixture
def others(datapath: Datapath, cache: Path) -> Make:
    """Load further programs, of any variant."""
    return lambda: ProgramSet(datapath.compile(cache), datapath.maps)


def ids(programs: list[Program]) -> set[int]:
    return {int(bpf.info(program.fd, "prog_info").id) for program in programs}


def usual_ids(datapath: Datapath) -> set[int]:
    assert datapath.usual
    return ids(datapath.usual.sockets)


def in_force(datapath: Datapath) -> set[int]:
    """Return the programs at the hooks of the cgroup."""
    return set(cgroup_links.attached(datapath.state).values())


def faults(datapath: Datapath, cgroup: Path, ns: Namespace) -> list[object]:
    """Return the audit's findings, also at devices, whichever programs should be in force."""
    return [drift for part in datapath.faults(cgroup, ns.served()) for drift in part]


def test_the_program_at_egress_is_loaded_once_it_is_wanted(
    directory: Path, cgroup: Path, ns: Namespace, cache: Path
) -> None:
    made = Datapath(StateDir(directory))
    made.wants_egress = False
    made.load(cache)
    assert made.attach(cgroup, ns.served()) == {}
    assert "egress" not in {it.name for it in made.programs}
    made.wants_egress = True
    assert made.attach_devices(ns.served()) == {}
    assert "egress" in {it.name for it in made.programs} and not made.flows_wait
    assert not faults(made, cgroup, ns)
    made.close()
    unpin_all(made.state)


@pytest.mark.extended
def test_there_and_back(datapath: Datapath, others: Make, cgroup: Path, ns: Namespace) -> None:
    """First every hook has the other programs, without drift; then again the former ones, and no
    other program is open.
    """
    usual, made = usual_ids(datapath), others()
    during, descriptors = ids(made.sockets), [it.fd for it in made.loaded]
    assert datapath.exchange(made, cgroup, ns.served()) == {}
    assert in_force(datapath) == during
    assert not faults(datapath, cgroup, ns)
    assert datapath.exchange(None, cgroup, ns.served()) == {}
    assert in_force(datapath) == usual
    assert not faults(datapath, cgroup, ns)
    assert not any(Path("/proc/self/fd", str(fd)).exists() for fd in descriptors)


@pytest.mark.extended
def test_a_failure_leaves_the_usual_ones_everywhere(
    datapath: Datapath, others: Make, cgroup: Path, ns: Namespace
) -> None:
    """If the fourth hook refuses its program, the first three get the usual programs again."""
    usual, made = usual_ids(datapath), others()
    whole = made.sockets[3]
    made.sockets[3] = whole._replace(fd=made.packets(True)[0].fd)
    with pytest.raises(KernelError):
        datapath.exchange(made, cgroup, ns.served())
    made.sockets[3] = whole
    made.close()
    assert in_force(datapath) == usual
    assert not faults(datapath, cgroup, ns)


@pytest.mark.extended
def test_programs_that_are_loaded_again_take_their_place(
    datapath: Datapath, others: Make, cgroup: Path, ns: Namespace, cache: Path
) -> None:
    """Newly loaded programs may be of another engine: no other variant stays in force beside
    them.
    """
    made = others()
    during = ids(made.sockets)
    assert datapath.exchange(made, cgroup, ns.served()) == {}
    datapath.load(cache)
    assert datapath.others is None
    assert datapath.attach(cgroup, ns.served()) == {}
    assert in_force(datapath) == usual_ids(datapath)
    assert not in_force(datapath) & during
    assert not faults(datapath, cgroup, ns)
