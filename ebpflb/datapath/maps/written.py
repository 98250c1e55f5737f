# SPDX-License-Identifier: Apache-2.0
"""How a map tells what is written to it; the history wants to know."""

from collections.abc import Callable

Wrote = Callable[[str, bytes, bytes | None], None]
"""Called with a map's name, the keys and the values, joined; without values they were deleted."""


def unrecorded(name: str, keys: bytes, values: bytes | None) -> None:
    """Nobody wants to know."""
