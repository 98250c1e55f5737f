# SPDX-License-Identifier: Apache-2.0
"""Waits for descriptors, whatever their numbers: select(2) fails from 1,024 on."""

import math
import select
from collections.abc import Iterable
from typing import Protocol, TypeVar


class HasFileno(Protocol):
    """A socket, or anything else with a descriptor."""

    def fileno(self) -> int: ...


Source = TypeVar("Source", bound=int | HasFileno)


def readable(sources: Iterable[Source], seconds: float) -> list[Source]:
    """The sources that can be read; waits at most ``seconds`` until one of them can."""
    poll, by_number = select.poll(), dict[int, Source]()
    for source in sources:
        number = source if isinstance(source, int) else source.fileno()
        poll.register(number, select.POLLIN)
        by_number[number] = source
    wait = None if seconds == math.inf else math.ceil(max(0.0, seconds) * 1000)
    return [by_number[number] for number, _ in poll.poll(wait)]
