# SPDX-License-Identifier: Apache-2.0
"""In which time the weight of a new endpoint grows to its whole: a Service's annotation.

A process that has just started is slow: its caches are empty, its code is not compiled. It gets few
connections at first.
"""

from ebpflb.model import durations, objects
from ebpflb.model.annotations import annotation_field

SLOW_START_ANNOTATION = objects.SLOW_START
LONGEST_SLOW_START = 3600.0  # seconds


def of(service: objects.Service, warnings: list[str]) -> float:
    """In seconds; 0: its weight is whole at once. What cannot be read is a warning, and 0."""
    text = service.metadata.annotation(SLOW_START_ANNOTATION)
    if text is None:
        return 0.0
    try:
        return _seconds(text)
    except ValueError as error:
        where = annotation_field(SLOW_START_ANNOTATION)
        warnings.append(f"{where}: {error}, so new endpoints get their whole weight at once")
        return 0.0


def _seconds(text: str) -> float:
    seconds = durations.parse(text).seconds
    if not 0 <= seconds <= LONGEST_SLOW_START:
        raise ValueError(f'"{text}" is not between 0s and 1h')
    return seconds
