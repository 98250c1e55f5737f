# SPDX-License-Identifier: Apache-2.0
"""Fields by their path in the file, as kubectl writes it: a.b[0].c"""

from collections.abc import Iterator
from typing import Any

import msgspec

from ebpflb.configuration.fields import KubeProxyConfiguration, Section, Section_


def join(path: str, field: object) -> str:
    """The path of a field, or of an element, at this path."""
    if isinstance(field, int):
        return f"{path}[{field}]"
    return f"{path}.{field}" if path else str(field)


def leaves(
    kind: type[Section] = KubeProxyConfiguration, path: str = ""
) -> Iterator[tuple[str, Any]]:
    """Every field of the file that is no section: its path and its type."""
    for field in msgspec.structs.fields(kind):
        at = join(path, field.encode_name)
        if isinstance(field.type, type) and issubclass(field.type, Section):
            yield from leaves(field.type, at)
        else:
            yield at, field.type


def value_at(section: Section, path: str) -> Any:
    """The value of a field, by its path in the file."""
    value: Any = section
    for name in path.split("."):
        fields = {field.encode_name: field.name for field in msgspec.structs.fields(value)}
        value = getattr(value, fields[name])
    return value


def replaced(section: Section_, path: str, value: Any) -> Section_:
    """The section with another value at the path."""
    first, _, rest = path.partition(".")
    fields = {field.encode_name: field.name for field in msgspec.structs.fields(section)}
    inner = replaced(getattr(section, fields[first]), rest, value) if rest else value
    return msgspec.structs.replace(section, **{fields[first]: inner})
