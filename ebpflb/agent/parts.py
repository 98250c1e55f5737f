# SPDX-License-Identifier: Apache-2.0
"""Work in parts: one that cannot be done keeps no other from being done."""

from collections.abc import Callable, Iterable

from ebpflb.errors import KernelError


def do_all(parts: Iterable[Callable[[], None]]) -> None:
    """In this order. Raises the first KernelError, but not before the end."""
    errors = []
    for part in parts:
        try:
            part()
        except KernelError as error:
            errors.append(error)
    if errors:
        raise errors[0]
