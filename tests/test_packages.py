# SPDX-License-Identifier: Apache-2.0
"""A package's docstring lists its modules."""

import re
from importlib import import_module
from pathlib import Path

import ebpflb

ROOT = Path(ebpflb.__file__).parents[1]
PACKAGES = [
    path.parent
    for root in ("ebpflb/*", "ebpflb_page")
    for path in ROOT.glob(f"{root}/**/__init__.py")
]


def test_each_module_has_a_line() -> None:
    """A package's docstring has a line for each of its modules, and no other lines."""
    for folder in PACKAGES:
        name = ".".join(folder.relative_to(ROOT).parts)
        words = import_module(name).__doc__ or ""
        listed = re.findall(r"^`{0,2}(\w+)`{0,2}  +\S", words, re.MULTILINE)
        modules = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
        packages = [path.parent.name for path in folder.glob("*/__init__.py")]
        assert (name, sorted(listed)) == (name, sorted(modules + packages))
