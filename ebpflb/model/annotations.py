# SPDX-License-Identifier: Apache-2.0
"""How messages name an annotation of an object, and which messages are about one.

A person or a controller has written it by hand, so what is wrong with it becomes an event too.
"""

_PREFIX = "metadata.annotations["


def annotation_field(annotation: str) -> str:
    return f"{_PREFIX}{annotation}]"


def misplaced(annotation: str, kind: str, owner: str) -> str:
    """The warning about one that an object has and another kind of object should have."""
    return f"{annotation_field(annotation)}: has no effect on {kind}: set it on {owner}"


def unknown(annotation: str, known: list[str]) -> str:
    """The warning about one that begins as ours do, and is none."""
    return f"{annotation_field(annotation)}: has no effect: it is not one of {', '.join(known)}"


def is_about_one(message: str) -> bool:
    return message.startswith(_PREFIX)
