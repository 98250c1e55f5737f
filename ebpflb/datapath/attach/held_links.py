# SPDX-License-Identifier: Apache-2.0
"""Descriptors of our links: a link serves on while one is open, whatever becomes of its pin.

Others may remove pins, or unmount the bpffs. Without a descriptor each link would be detached at
once, and packets of open connections would go untranslated until it is attached again.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ebpflb.datapath import kernel
from ebpflb.errors import KernelError


class HeldLinks:
    """The links by their pins; to be told of every change of a pin that is our own."""

    def __init__(self) -> None:
        self._links: dict[Path, int] = {}

    def hold(self, pins: Iterable[Path]) -> None:
        """Holds the links that have these pins now, instead of those that had them before.

        One that cannot be opened is not held: its pin keeps it as before.
        """
        for pin in pins:
            with suppress(KernelError):
                link = kernel.get(str(pin))
                if link is not None:
                    self.release([pin])
                    self._links[pin] = link

    def get(self, pin: Path) -> int | None:
        """The descriptor of the link that had this pin; it stays open here."""
        return self._links.get(pin)

    def pins(self) -> list[Path]:
        return list(self._links)

    def release(self, pins: Iterable[Path]) -> None:
        for pin in pins:
            link = self._links.pop(pin, None)
            if link is not None:
                os.close(link)

    def restore(self, pins: Iterable[Path] | None = None) -> None:
        """Pins links again whose pin is gone: these, or all. Raises KernelError."""
        for pin in self.pins() if pins is None else pins:
            link = self._links.get(pin)
            if link is not None and not pin.exists():
                kernel.pin(link, str(pin))

    def close(self) -> None:
        self.release(self.pins())
