# SPDX-License-Identifier: Apache-2.0
"""Lets single modules of pyroute2 be imported without all the others.

pyroute2's package imports every protocol that it has, and a database of devices: 60 modules that
ebpflb does not use, and 40 ms of each start. A package of the same name without content takes its
place here, before any module of ebpflb imports pyroute2. From then on a process can import
``pyroute2.iproute.IPRoute``, and not ``pyroute2.IPRoute``.
"""

import importlib.util
import sys

_NAME = "pyroute2"


def import_no_more_than_asked() -> None:
    """Does nothing where pyroute2 is imported already."""
    spec = importlib.util.find_spec(_NAME)
    if spec and _NAME not in sys.modules:
        sys.modules[_NAME] = importlib.util.module_from_spec(spec)
