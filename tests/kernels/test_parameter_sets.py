# SPDX-License-Identifier: Apache-2.0
"""A few parameter sets of each test are run: no test is left out altogether, many values are
included.
"""

import os
import subprocess
import sys
from collections.abc import Hashable, Set
from itertools import product
from pathlib import Path

import pytest

from vagrant.kernels.parameter_sets import spread

FAMILIES, PROTOCOLS, KINDS = ["v4", "v6"], ["tcp", "udp", "sctp"], ["cluster", "nodeport"]
EVERY: list[Set[Hashable]] = [set(each) for each in product(FAMILIES, PROTOCOLS, KINDS)]


@pytest.mark.parametrize("sets", [[], [set()], EVERY[:2]])
def test_no_more_than_there_are(sets: list[Set[Hashable]]) -> None:
    assert sorted(spread(sets, 3)) == list(range(len(sets)))


NETWORKS = ["bridge", "routed"]
TESTS = """
import pytest

@pytest.fixture(scope="module", params=["bridge", "routed"])
def network(request):
    return request.param

@pytest.mark.parametrize("family", ["v4", "v6"])
@pytest.mark.parametrize("protocol", ["tcp", "udp", "sctp"])
def test_shared(network, protocol, family): pass

@pytest.mark.parametrize("number", range(9))
class TestOne:
    def test_it(self, number): pass

def test_plain(): pass
"""


def collected(folder: Path, *options: str) -> list[str]:
    """Return the names of the remaining tests in the folder."""
    return [line for line in output(folder, *options).splitlines() if "::" in line]


def output(folder: Path, *options: str) -> str:
    plugin = ["-p", "vagrant.kernels.parameter_sets", "-c", "/dev/null"]
    command = [sys.executable, "-m", "pytest", *plugin, "--rootdir", str(folder), *options]
    command += ["--collect-only", "-q", str(folder)]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=alone).stdout


@pytest.mark.parametrize(
    ("options", "many"),
    [
        (["--parameter-sets=2"], 2),
        (["--parameter-sets=5", "--parameter-sets=2:test_it"], 2),
        (["--parameter-sets=1:elsewhere"], 9),
        ([], 9),
    ],
)
def test_in_pytest(tmp_path: Path, options: list[str], many: int) -> None:
    """Every network is included; of the sets that only one test varies, few are kept."""
    (tmp_path / "test_it.py").write_text(TESTS)
    names = [line.partition("::")[2] for line in collected(tmp_path, *options)]
    counts = [sum(word in name for name in names) for word in ("bridge", "routed", "TestOne")]
    assert counts == [min(many, 6), min(many, 6), many]
    assert "test_plain" in names


def test_one_set_up(tmp_path: Path) -> None:
    """Each file in the named folder keeps one network with all parameters of its tests; files
    elsewhere keep both.
    """
    for name in ("here/test_a.py", "here/test_b.py", "here/test_c.py", "test_d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(TESTS)
    names = collected(tmp_path, "--one-set-up=here")
    found = {
        file: [sum(f"{file}.py::test_shared[{word}" in name for name in names) for word in NETWORKS]
        for file in ("test_a", "test_b", "test_c", "test_d")
    }
    assert found.pop("test_d") == [6, 6]
    assert all(sorted(counts) == [0, 6] for counts in found.values())
    assert len(set(map(tuple, found.values()))) == len(NETWORKS)
    assert sum("test_plain" in name for name in names) == 4
