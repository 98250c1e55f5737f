# SPDX-License-Identifier: Apache-2.0
"""Waits for descriptors, whatever their numbers: select(2) fails from 1,024 on."""

import math
import selectors
from collections.abc import Iterable
from typing import Protocol, TypeVar


class HasFileno(Protocol):
    """A socket, or anything else with a descriptor."""

    def fileno(self) -> int: ...


Source = TypeVar("Source", bound=int | HasFileno)


def readable(sources: Iterable[Source], seconds: float) -> list[Source]:
    """The sources that can be read; waits at most ``seconds`` until one of them can."""
    with selectors.PollSelector() as selector:
        for source in sources:
            selector.register(source, selectors.EVENT_READ, source)
        ready = selector.select(None if seconds == math.inf else seconds)
    return [key.data for key, _ in ready]
