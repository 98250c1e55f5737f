# SPDX-License-Identifier: Apache-2.0
"""Files of bpf/ include only files of their own layer or below."""

import re

from ebpflb.kernel.maps.layout import SOURCES

LEVELS = {
    **dict.fromkeys(("layout", "maps", "net"), 0),
    "core": 1,
    "rules": 2,
    **dict.fromkeys(("engine", "sockets"), 3),
    "path": 4,
    "hooks": 5,
}


def test_nothing_above_is_included() -> None:
    """The layers are, from the top: hooks, path, engine or sockets, rules, core, net."""
    upwards, seen = [], 0
    for source in SOURCES.rglob("*.[ch]"):
        level = LEVELS.get(source.relative_to(SOURCES).parts[0])
        for included in re.findall(r'(?m)^#include "(\w+)/', source.read_text()):
            seen += 1
            if level is not None and LEVELS.get(included, 0) > level:
                upwards.append((source.name, included))
    assert seen > 100 and not upwards
