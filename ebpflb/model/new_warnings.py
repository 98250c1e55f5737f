# SPDX-License-Identifier: Apache-2.0
"""What is wrong with an object is logged once, and not again with each of its changes."""

from collections.abc import Iterator

from ebpflb.model.events import Key


class NewWarnings:
    """Remembers the warnings about the last version of each object of one kind."""

    def __init__(self) -> None:
        self._last: dict[Key, tuple[str, ...]] = {}

    def of(self, key: Key, warnings: tuple[str, ...]) -> tuple[str, ...]:
        """Those that the object's last version did not have."""
        before = self._last.pop(key, ())
        if warnings:
            self._last[key] = warnings
        return tuple(text for text in warnings if text not in before)

    def current(self) -> Iterator[tuple[Key, str]]:
        """Each object with its warnings."""
        return ((key, "; ".join(texts)) for key, texts in self._last.items())

    def known(self, key: Key) -> tuple[str, ...]:
        """The warnings about the object's last version."""
        return self._last.get(key, ())

    def forget(self, key: Key) -> None:
        """The object was deleted."""
        self._last.pop(key, None)
