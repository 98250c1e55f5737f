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
from typing import Any, NamedTuple

import pytest

CASE = "case"  # the name of a parameter
EXTENDED = "extended"  # the mark of a test that NOT_EXTENDED leaves out
NOT_EXTENDED = f"not {EXTENDED}"


class Group(NamedTuple):
    """A test function, and its parameters that it shares with others."""

    file: str
    function: str
    shared: tuple[tuple[str, str], ...]


class ParameterSet:
    """One set of parameters of a test function; ``spec`` is pytest's, None without parameters."""

    def __init__(self, file: str, function: str, spec: Any) -> None:
        self.values: set[tuple[str, str]] = set()
        shared: list[tuple[str, str]] = []
        if spec is not None:
            self.values = {(name, repr(value)) for name, value in spec.params.items()}
            # pytest has no public name for the scopes of parameters.
            scopes = spec._arg2scope  # noqa: SLF001
            shared = [it for it in self.values if it[0] == CASE or _is_shared(scopes[it[0]])]
        self.group = Group(file, function, tuple(sorted(shared)))


def _is_shared(scope: Any) -> bool:
    return bool(scope.value != "function")


def pytest_addoption(parser: pytest.Parser) -> None:
    words = {"action": "append", "default": [], "metavar": "N[:FOLDER]"}
    parser.addoption("--parameter-sets", help="N parameter sets of each test, no more", **words)
    words["metavar"] = "FOLDER"
    parser.addoption("--one-set-up", help="one value of each module's fixtures, no more", **words)
    words["metavar"] = "I/N:FOLDER"
    parser.addoption("--in-turns", help="every N-th file, from the I-th on", **words)


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Chooses before pytest makes the tests, most of which would be left out again.

    Where tests are named, or sets of parameters have marks by which another ``-m`` could choose,
    all are made.
    """
    config = metafunc.config
    # pytest has no public name for the sets of parameters of a function.
    calls = metafunc._calls  # noqa: SLF001
    if config.option.markexpr == NOT_EXTENDED:
        calls[:] = [it for it in calls if all(mark.name != EXTENDED for mark in it.marks)] or calls
    elif any(it.marks for it in calls):
        return
    if not calls or any("::" in word for word in config.args):
        return
    parent = metafunc.definition.parent
    file = parent.nodeid if parent else ""
    sets = [ParameterSet(file, metafunc.function.__name__, it) for it in calls]
    calls[:] = [calls[at] for at in _choose(config, sets)]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose among the tests that ``-m`` leaves."""
    others = _others(config.getoption("--in-turns"), [item.path for item in items], config.rootpath)
    sets = [
        ParameterSet(
            item.parent.nodeid if item.parent else "",
            getattr(item, "originalname", item.name),
            getattr(item, "callspec", None),
        )
        for item in items
    ]
    chosen = [items[at] for at in _choose(config, sets) if items[at].path not in others]
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


def _choose(config: pytest.Config, sets: Sequence[ParameterSet]) -> list[int]:
    """Return the indexes of the sets that the options keep, in their order."""
    limits = dict(map(_limit, config.getoption("--parameter-sets")))
    folders = tuple(config.getoption("--one-set-up"))
    groups: dict[Group, list[int]] = defaultdict(list)
    for at, each in enumerate(sets):
        groups[each.group].append(at)
    one = _one_set_up([key for key in groups if key.file.startswith(folders)])
    kept: list[int] = []
    for key, group in groups.items():
        if key.file.startswith(folders) and key not in one:
            continue
        start = zlib.crc32(repr(key).encode()) % len(group)
        folder = max(filter(key.file.startswith, limits), key=len, default=None)
        limit = len(group) if folder is None else limits[folder]
        kept += [group[at] for at in spread([sets[at].values for at in group], limit, start)]
    return sorted(kept)


def _limit(word: str) -> tuple[str, int]:
    limit, _, folder = word.partition(":")
    return folder, int(limit)


def _others(turns: Sequence[str], paths: Sequence[Path], root: Path) -> set[Path]:
    """Return the files that run on other kernels."""
    found = set()
    for share, _, folder in (word.partition(":") for word in turns):
        first, count = map(int, share.split("/"))
        files = sorted({path for path in paths if path.is_relative_to(root / folder)})
        found |= {path for at, path in enumerate(files) if at % count != first}
    return found


def spread(sets: Sequence[Values[Hashable]], limit: int, start: int = 0) -> list[int]:
    """Return the indexes of ``limit`` sets with many different values; equal ones from ``start``
    on.
    """
    left = [*range(start, len(sets)), *range(start)]
    found: list[int] = []
    seen: set[Hashable] = set()
    while left and len(found) < limit:
        best = max(left, key=lambda at: len(sets[at] - seen))
        left.remove(best)
        found.append(best)
        seen |= sets[best]
    return found


def _one_set_up(groups: Sequence[Group]) -> set[Group]:
    """Return one group of each test function, or of each ``case`` of it; functions of a file take
    it from the same place in the order of their groups.
    """
    of_function: dict[tuple[str, str, str], list[Group]] = defaultdict(list)
    for group in groups:
        of_function[group.file, group.function, dict(group.shared).get(CASE, "")].append(group)
    return {
        sorted(found)[zlib.crc32(file.encode()) * len(found) >> 32]
        for (file, *_), found in of_function.items()
    }
