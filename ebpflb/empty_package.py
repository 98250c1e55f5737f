# SPDX-License-Identifier: Apache-2.0
"""A package without content in the place of one that would import all of its library."""

import importlib.util
import sys


def put(name: str) -> bool:
    """Whether it took the place; not where the package is imported already, or not installed."""
    spec = importlib.util.find_spec(name) if name not in sys.modules else None
    if spec is None:
        return False
    sys.modules[name] = package = importlib.util.module_from_spec(spec)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, package)
    return True
