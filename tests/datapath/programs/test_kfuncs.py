# SPDX-License-Identifier: Apache-2.0
"""Placeholders in bytecode become what the running kernel's BTF says."""

import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

from ebpflb.datapath import conntrack_probe, kernel, probe
from ebpflb.datapath.maps import layout
from ebpflb.datapath.programs import kfuncs
from ebpflb.datapath.programs.kfuncs import KFUNC_NUMBERS, Kfunc, Kfuncs
from ebpflb.datapath.programs.module_btf import open_module_btfs
from ebpflb.errors import KernelError, NodeError
from ebpflb.options import Paths
from tests.datapath.variants import needs_root, open_files

LOOKUP = KFUNC_NUMBERS["bpf_skb_ct_lookup"]
STATUS, STATE, REPLY_PORT = 0x7FE0, 0x7FF0, 0x7FF8
FOUND = Kfuncs({LOOKUP: Kfunc(2, 1234)}, {STATUS: 128, STATE: 192}, (0, 7, 8))


def instruction(opcode: int, registers: int = 0, offset: int = 0, number: int = 0) -> bytes:
    return struct.pack("<BBhi", opcode, registers, offset, number)


CALL, LOAD_BYTE, LOAD64, STORE = 0x85, 0x71, 0x18, 0x7B


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (instruction(CALL, 0, 0, LOOKUP), instruction(CALL, 0x20, 2, 1234)),
        (instruction(LOAD_BYTE, 0x61, STATE), instruction(LOAD_BYTE, 0x61, 192)),
        (instruction(LOAD_BYTE, 0x61, STATUS), instruction(LOAD_BYTE, 0x61, 128)),
    ],
    ids=["call", "state", "status"],
)
def test_placeholder(before: bytes, after: bytes) -> None:
    """A call names the function and its module's place; a load has the field's offset."""
    assert kfuncs.patch(before, FOUND) == after


@pytest.mark.parametrize(
    "code",
    [
        instruction(CALL, 0, 0, 1),
        instruction(LOAD_BYTE, 0x61, 8),
        instruction(STORE, 0x61, STATE),
        # The second half of a 64-bit load is a number, whatever it looks like.
        instruction(LOAD64, 0x11) + instruction(CALL, 0, 0, LOOKUP),
    ],
    ids=["helper", "load", "store", "second half"],
)
def test_anything_else(code: bytes) -> None:
    """It stays as it is."""
    assert kfuncs.patch(code, FOUND) == code


def test_code_without_placeholders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It needs no BTF: kernels without it load such programs."""
    monkeypatch.setattr(kfuncs, "BTF", tmp_path)
    with kfuncs.linked(instruction(CALL, 0, 0, 1)) as linked:
        assert linked == (instruction(CALL, 0, 0, 1), ())


def test_no_btf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A kernel without BTF says so, with the file that is missing."""
    monkeypatch.setattr(kfuncs, "BTF", tmp_path)
    with pytest.raises(NodeError, match="vmlinux"), kfuncs.found():
        pass
    assert not kfuncs.are_loaded()


def test_numbers() -> None:
    """Every function that the header declares has a number of its own, as have its fields."""
    header = (layout.SOURCES / "engine/conntrack/kfuncs.h").read_text()
    assert set(KFUNC_NUMBERS) == set(re.findall(r"(?m)^KFUNC\(.*, (bpf_\w+),", header))
    assert len(set(KFUNC_NUMBERS.values())) == len(KFUNC_NUMBERS) == 7


@pytest.fixture
def works() -> None:
    if obstacle := conntrack_probe.obstacle(Paths.cache):
        pytest.skip(obstacle)


@needs_root
@pytest.mark.usefixtures("works")
def test_this_kernel() -> None:
    """All are found where the probe works, and no descriptor stays open."""
    before = open_files()
    with kfuncs.found() as found:
        assert set(found.calls) == set(KFUNC_NUMBERS.values())
        assert found.offsets.keys() == {STATUS, STATE, REPLY_PORT}
        assert max(call.place for call in found.calls.values()) < max(len(found.fds), 1)
    assert open_files() == before
    assert kfuncs.are_loaded()


@needs_root
@pytest.mark.skipif(not (kfuncs.BTF / "vmlinux").exists(), reason="this kernel has no BTF")
def test_btf_by_its_name() -> None:
    """Of all the kernel has, those that are named are opened, and no others stay open."""
    before = open_files()
    found = open_module_btfs({"vmlinux", "no-such-module"})
    assert list(found) == ["vmlinux"]
    assert open_files() == before + 1
    os.close(found["vmlinux"])


@needs_root
@pytest.mark.usefixtures("works")
def test_probe_leaves_nothing() -> None:
    """It works again and again; neither descriptors nor flows remain."""
    before, flows = open_files(), Path("/proc/sys/net/netfilter/nf_conntrack_count")
    count = flows.read_text()
    assert conntrack_probe.obstacle(Paths.cache) is None
    assert open_files() == before
    assert int(flows.read_text()) <= int(count) + 50  # others of this machine come and go


@needs_root
@pytest.mark.parametrize(("result", "said"), conntrack_probe._FAILURES.items())
def test_probe_that_fails(monkeypatch: pytest.MonkeyPatch, result: int, said: str) -> None:
    """What the program could not do is said in a sentence."""
    if conntrack_probe.obstacle(Paths.cache):
        pytest.skip("nothing works here")
    ran = conntrack_probe.testrun.Ran(result, b"", 0)
    monkeypatch.setattr(conntrack_probe.testrun, "run", lambda *_: ran)
    assert conntrack_probe.obstacle(Paths.cache) == said


@needs_root
def test_probe_without_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused system call is an obstacle like any other, and no error."""

    def refuse(**_: Mapping[str, object]) -> int:
        raise KernelError("loading program probe", 1, "Operation not permitted")

    monkeypatch.setattr(kernel, "prog_load", refuse)
    assert "Operation not permitted" in (conntrack_probe.obstacle(Paths.cache) or "")


@needs_root
def test_namespace_of_the_probe() -> None:
    """It is another one than ours, and this thread stays in ours."""
    here = Path("/proc/thread-self/ns/net").readlink()
    there = probe.in_new_namespace(Path("/proc/thread-self/ns/net").readlink)
    assert there != here == Path("/proc/thread-self/ns/net").readlink()
