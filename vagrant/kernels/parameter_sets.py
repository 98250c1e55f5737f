# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest for a part of the tests: here, and inside the lab's machines.

``--parameter-sets N`` keeps N sets of parameters of each test function, chosen so that they have
many different values; ``--parameter-sets N:FOLDER`` is another limit for one folder. Where a
fixture of a module or session has parameters (a variant of the programs, a kind of network), N are
kept for each of its values. ``--one-set-up FOLDER`` keeps one of these values in each file of the
folder, another one in another file; but every value of a parameter ``case``, which is a row of a
table of tests. ``--in-turns I/N:FOLDER`` keeps every N-th file of the folder,
from the I-th on.
"""

import zlib
from collections import defaultdict
from collections.abc import Hashable, Sequence
from collections.abc import Set as Values
from pathlib import Path
from typing import NamedTuple

import pytest

CASE = "case"  # the name of a parameter


class Group(NamedTuple):
    """A test function, and those of its parameters that it shares with others."""

    file: str
    function: str
    shared: tuple[tuple[str, str], ...]


def pytest_addoption(parser: pytest.Parser) -> None:
    words = {"action": "append", "default": [], "metavar": "N[:FOLDER]"}
    parser.addoption("--parameter-sets", help="N parameter sets of each test, no more", **words)
    words["metavar"] = "FOLDER"
    parser.addoption("--one-set-up", help="one value of each module's fixtures, no more", **words)
    words["metavar"] = "I/N:FOLDER"
    parser.addoption("--in-turns", help="every N-th file, from the I-th on", **words)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Chooses among the tests that ``-m`` leaves."""
    limits = dict(map(_limit, config.getoption("--parameter-sets")))
    folders = tuple(config.getoption("--one-set-up"))
    groups: dict[Group, list[pytest.Item]] = defaultdict(list)
    for item in items:
        groups[_group(item)].append(item)
    chosen = _one_set_up([key for key in groups if key.file.startswith(folders)])
    others = _others(config.getoption("--in-turns"), [item.path for item in items], config.rootpath)
    kept: set[pytest.Item] = set()
    for key, group in groups.items():
        if (key.file.startswith(folders) and key not in chosen) or group[0].path in others:
            continue
        start = zlib.crc32(repr(key).encode()) % len(group)
        folder = max(filter(group[0].nodeid.startswith, limits), key=len, default=None)
        limit = len(group) if folder is None else limits[folder]
        kept |= {group[at] for at in spread([_values(item) for item in group], limit, start)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _limit(word: str) -> tuple[str, int]:
    limit, _, folder = word.partition(":")
    return folder, int(limit)


def _others(turns: Sequence[str], paths: Sequence[Path], root: Path) -> set[Path]:
    """The files whose turn it is elsewhere."""
    found = set()
    for share, _, folder in (word.partition(":") for word in turns):
        first, count = map(int, share.split("/"))
        files = sorted({path for path in paths if path.is_relative_to(root / folder)})
        found |= {path for at, path in enumerate(files) if at % count != first}
    return found


def spread(sets: Sequence[Values[Hashable]], limit: int, start: int = 0) -> list[int]:
    """The indexes of ``limit`` sets with many different values; equal ones from ``start`` on."""
    left = [*range(start, len(sets)), *range(start)]
    found: list[int] = []
    seen: set[Hashable] = set()
    while left and len(found) < limit:
        best = max(left, key=lambda at: len(sets[at] - seen))
        left.remove(best)
        found.append(best)
        seen |= sets[best]
    return found


def _group(item: pytest.Item) -> Group:
    function = getattr(item, "originalname", item.name)
    # pytest has no public name for the scopes of parameters.
    scopes = item.callspec._arg2scope if hasattr(item, "callspec") else {}  # noqa: SLF001
    shared = (
        pair for pair in _values(item) if pair[0] == CASE or scopes[pair[0]].value != "function"
    )
    return Group(item.parent.nodeid if item.parent else "", function, tuple(sorted(shared)))


def _one_set_up(groups: Sequence[Group]) -> set[Group]:
    """Of each test function the group whose shared values lie at the same part of their order; of
    one with a parameter ``case`` that of each case.
    """
    of_function: dict[tuple[str, str, str], list[Group]] = defaultdict(list)
    for group in groups:
        of_function[group.file, group.function, dict(group.shared).get(CASE, "")].append(group)
    return {
        sorted(found)[zlib.crc32(file.encode()) * len(found) >> 32]
        for (file, *_), found in of_function.items()
    }


def _values(item: pytest.Item) -> set[tuple[str, str]]:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return {(name, repr(value)) for name, value in params.items()}
