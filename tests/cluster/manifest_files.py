# SPDX-License-Identifier: Apache-2.0
"""Manifests written as an editor should write them, and the first events of a source."""

from pathlib import Path
from typing import Any

import yaml

from ebpflb.model.events import Event, Kind, Replaced
from tests.cluster.event_log import EventLog
from tests.kit.api_history import Json


def write(path: Path, *documents: Json) -> None:
    """Write the file under a hidden name, then rename it."""
    hidden = path.with_name(f".{path.name}.new")
    hidden.write_text(yaml.safe_dump_all(documents))
    hidden.rename(path)


def look_at_everything(folder: Path) -> None:
    """Cause an event that names no manifest."""
    (folder / "..data").mkdir()


def begun(events: EventLog) -> dict[Kind, Any]:
    """Return the first event of each kind, a Replaced."""
    return {kind: events.next(kind) for kind in Kind}


def keys(event: Event) -> set[str]:
    assert isinstance(event, Replaced)
    return {str(key) for key in event.objects}
