# SPDX-License-Identifier: Apache-2.0
"""What is imported of pyroute2."""

import subprocess
import sys

_IMPORTED = """
import ebpflb.cli.run, sys
from ebpflb.kernel import pyroute2_parts
print(*(name for name in sys.modules if name.startswith("pyroute2")), sep=",")
pyroute2_parts.IPRoute
print(*(name for name in sys.modules if name.startswith("pyroute2")), sep=",")
"""


def test_only_what_is_used_is_imported() -> None:
    """Nothing before the first use, and not the package with all protocols and databases."""
    code = [sys.executable, "-c", _IMPORTED]
    lines = subprocess.run(code, capture_output=True, text=True, check=True).stdout.splitlines()
    before, after = (line.split(",") for line in lines)
    assert before == ["pyroute2"]
    assert "pyroute2.iproute" in after
    assert {"pyroute2.ndb", "pyroute2.ipdb", "pyroute2.plan9"}.isdisjoint(after)
