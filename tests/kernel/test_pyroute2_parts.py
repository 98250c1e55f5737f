# SPDX-License-Identifier: Apache-2.0
"""What an agent imports of pyroute2."""

import subprocess
import sys

_IMPORTED = """
import ebpflb.cli.run, sys
print(*(name for name in sys.modules if name.startswith("pyroute2")))
"""


def test_a_start_imports_only_the_modules_that_it_uses() -> None:
    """Not pyroute2's package, which imports all protocols and databases of devices."""
    code = [sys.executable, "-c", _IMPORTED]
    modules = subprocess.run(code, capture_output=True, text=True, check=True).stdout.split()
    assert "pyroute2.iproute" in modules
    assert {"pyroute2.ndb", "pyroute2.ipdb", "pyroute2.plan9"}.isdisjoint(modules)
