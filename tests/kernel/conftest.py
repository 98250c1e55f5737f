# SPDX-License-Identifier: Apache-2.0
"""Temporary state directories, cgroups and maps, which are removed after the test."""

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.kernel import datapath, probe
from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.state_dir import BPFFS, StateDir
from ebpflb.kernel.programs import compiler, loader
from ebpflb.kernel.programs.compiler import Compiled
from ebpflb.kernel.programs.loader import Program
from tests.kernel.maps import small
from tests.kernel.variants import SOURCE, VARIANTS
from tests.kit import once

_numbers = itertools.count()


def _name() -> str:
    return f"ebpflb-test-{os.getpid()}-kernel-{next(_numbers)}"


@pytest.fixture
def directory() -> Iterator[Path]:
    """Return an unused name in the bpffs."""
    path = BPFFS / _name()
    yield path
    shutil.rmtree(path, ignore_errors=True)
    assert not path.exists()


@pytest.fixture
def home(directory: Path) -> StateDir:
    """Return a prepared state directory."""
    made = StateDir(directory)
    made.prepare()
    return made


@pytest.fixture
def cgroups() -> Iterator[Iterator[Path]]:
    """Create as many new cgroups as a test needs."""
    made: list[Path] = []

    def make() -> Iterator[Path]:
        while True:
            made.append(cgroup_links.cgroup_root() / _name())
            made[-1].mkdir()
            yield made[-1]

    yield make()
    for path in made:
        if path.exists():
            path.rmdir()


@pytest.fixture
def cgroup(cgroups: Iterator[Path]) -> Path:
    return next(cgroups)


@pytest.fixture
def inside(cgroup: Path) -> Iterator[Path]:
    """Move this process into a cgroup of its own."""
    root = cgroup_links.cgroup_root()
    former = Path("/proc/self/cgroup").read_text().split("0::", 1)[1].split()[0]
    (cgroup / "cgroup.procs").write_text(str(os.getpid()))
    yield cgroup
    (root / former.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))


@pytest.fixture(scope="session", params=list(VARIANTS))
def compiled(request: pytest.FixtureRequest, shared: Path, cache: Path) -> Compiled:
    """Return the compiled hooks, for kernels with and without bpf_set_retval."""
    if request.param == "set_retval" and os.geteuid() == 0 and not probe.set_retval():
        pytest.skip("this kernel has no bpf_set_retval")
    with once.alone(shared):
        return compiler.compile_source(SOURCE, VARIANTS[request.param], cache=cache)


@pytest.fixture(scope="session")
def one_variant(shared: Path, cache: Path) -> Compiled:
    """Return the variant for this kernel."""
    with once.alone(shared):
        return compiler.compile_source(SOURCE, datapath.socket_flags(), cache=cache)


@pytest.fixture(scope="module")
def all_maps() -> Iterator[dict[str, Map]]:
    """Return every map of the datapath, unpinned."""
    with small.all_maps() as made:
        yield made


@pytest.fixture(scope="module")
def loaded(one_variant: Compiled, all_maps: dict[str, Map]) -> Iterator[list[Program]]:
    found = loader.load(one_variant, all_maps)
    yield found
    loader.close(found)


@pytest.fixture
def nothing_brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore this checkout's own precompiled bytecode (precompile.py)."""
    monkeypatch.setattr(compiler, "BROUGHT", tmp_path / "no bytecode")
