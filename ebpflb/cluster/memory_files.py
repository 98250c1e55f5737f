# SPDX-License-Identifier: Apache-2.0
"""Files that exist in this process alone: nothing of them is left when it is killed.

TLS keys have to be files, and those of a kubeconfig may be in its text.
"""

import os
from pathlib import Path


class MemoryFiles:
    """They are closed when nothing refers to this object any more."""

    def __init__(self) -> None:
        self._opened: list[int] = []

    def add(self, content: bytes) -> Path:
        """Where this process can open a file with this content."""
        opened = os.memfd_create("ebpflb")
        self._opened.append(opened)
        with open(opened, "wb", closefd=False) as file:
            file.write(content)
        return Path(f"/proc/self/fd/{opened}")

    def __del__(self) -> None:
        for opened in self._opened:
            os.close(opened)
