# SPDX-License-Identifier: Apache-2.0
"""What keeps programs from the kernel's conntrack is named."""

import subprocess
import sys

QUESTION = """
from ebpflb.datapath import conntrack_probe
from ebpflb.options import Paths
print(conntrack_probe.obstacle(Paths.cache))
"""


def test_a_missing_capability_is_named() -> None:
    """Without CAP_SYS_ADMIN the engine cannot be tried, whatever the kernel has."""
    fewer = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    words = [*fewer, sys.executable, "-c", QUESTION]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert said.startswith("CAP_SYS_ADMIN is missing (")
