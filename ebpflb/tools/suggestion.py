# SPDX-License-Identifier: Apache-2.0
"""The end of an error about a Service that is not there."""

from collections.abc import Iterable


def likely_service(wanted: str, known: Iterable[str]) -> str:
    """Which NAMESPACE/NAME was probably meant, or where all of them are."""
    from difflib import get_close_matches  # only errors need it

    close = get_close_matches(wanted, sorted(known))
    return f"did you mean {' or '.join(close)}?" if close else "see `ebpflb services list`"
