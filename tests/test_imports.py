# SPDX-License-Identifier: Apache-2.0
"""Tests import only whole modules and public names, from each other and from the product.

Ruff (SLF001) finds private names that are read; this test finds the other ways to use them.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# They damage the product from inside.
FILES = sorted(set((ROOT / "tests").rglob("*.py")) - set(ROOT.rglob("tests/**/*_mutations.py")))
PATCHES = {"setattr", "delattr", "object"}  # monkeypatch.setattr, patch.object


def wrong(source: str) -> Iterator[str]:
    """Yield other test modules, and private names that are imported or patched."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names = [each.name for each in node.names]
            modules = [*(node.module or "").split("."), *names]
            yield from (each for each in modules if each.startswith("test_"))
            yield from (each for each in names if is_private(each))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in PATCHES:
            texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
            yield from (text for text in map(str, texts) if is_private(text.rpartition(".")[2]))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_test_imports_another_or_a_private_name() -> None:
    """Therefore a rename within a module changes no test, and a test can be read and moved
    alone.
    """
    assert len(FILES) > 500
    found = {str(path): [*wrong(path.read_text())] for path in FILES}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from tests.cli.test_run import chosen",
        "from tests.cli import test_run",
        "from ebpflb.plan.desired import _order",
        "monkeypatch.setattr(loop, '_pause', 0)",
        "monkeypatch.setattr('ebpflb.loop._pause', 0)",
    ],
)
def test_mistakes_are_found(source: str) -> None:
    """The check above can fail."""
    assert list(wrong(source))
