# SPDX-License-Identifier: Apache-2.0
"""Times as people type them: 10m (ago), 14:03, 2026-11-22T14:03:10."""

import re
import time
from datetime import datetime

import click

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_TODAY = re.compile(r"\d\d?:\d\d(:\d\d(\.\d+)?)?")


def parse(text: str, now: float) -> float:
    """Seconds since the epoch; without a zone in this machine's. Raises ValueError.

    A time of day that is still to come today is yesterday's.
    """
    if ago := _AGO.fullmatch(text):
        return now - float(ago[1]) * _UNITS[ago[2]]
    if _TODAY.fullmatch(text):
        day = datetime.fromtimestamp(now).date().isoformat()
        found = datetime.fromisoformat(f"{day}T{text.zfill(len(text) + (text[1] == ':'))}")
        at = found.timestamp()
        return at if at <= now else at - 86400
    return datetime.fromisoformat(text).timestamp()


def option(_context: object, _option: object, text: str | None) -> float | None:
    """A callback of click."""
    try:
        return None if text is None else parse(text, time.time())
    except (ValueError, OverflowError):
        example = "14:03, 2026-11-22T14:03:10 or 10m"
        raise click.BadParameter(f'"{text}" is not a time such as {example}') from None
