# SPDX-License-Identifier: Apache-2.0
"""What an agent and ``ebpflb monitor`` say to each other before events flow, and their frames."""

import struct

import msgspec

FRAME = struct.Struct("=QI")


class MonitorQuestion(msgspec.Struct):
    """``format`` is ``decisions.format_hash``; ``verdicts`` has a bit for each that is wanted."""

    format: str
    verdicts: int


class MonitorAnswer(msgspec.Struct):
    """Why it cannot be; nothing if it can."""

    error: str = ""
