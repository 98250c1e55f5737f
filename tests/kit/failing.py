# SPDX-License-Identifier: Apache-2.0
"""The reports about failing parts of an agent in the test's process."""

import threading
from dataclasses import dataclass, field
from pathlib import Path

from ebpflb.model.events import PartStatus


@dataclass
class Failing:
    record: Path
    told: list[PartStatus] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)
