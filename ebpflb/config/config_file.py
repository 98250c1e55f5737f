# SPDX-License-Identifier: Apache-2.0
"""A configuration file -> plain values -> KubeProxyConfiguration with its defaults; its watch.

As in kube-proxy (kube-proxy.md 15), unknown fields are logged and otherwise ignored, and the last
value of a duplicate field and the first of several documents are used. The first value of a wrong
type is an error.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ebpflb import files
from ebpflb.cluster import decoding, manifests
from ebpflb.config import fields
from ebpflb.config.fields import KubeProxyConfiguration, Section, join_path, value_at
from ebpflb.config.parameters import IGNORED_FIELDS
from ebpflb.errors import ConfigurationError, InvalidObject, one_line
from ebpflb.model import addresses
from ebpflb.model.addresses import Duration
from ebpflb.workers import PeriodicWorker

log = logging.getLogger(__name__)


def read(path: Path) -> KubeProxyConfiguration:
    """Read the file.

    Raises ConfigurationError if the file is missing, is not a KubeProxyConfiguration, or has a
    value of a wrong type.
    """
    try:
        values = parse(files.read_regular(path))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except (files.UnusableFile, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    _check_kind(path, values)
    unread = list(_unread(KubeProxyConfiguration, values, ""))
    known = IGNORED_FIELDS.split()
    unknown = [at for at, _ in unread if at not in known]
    ignored = [at for at, value in unread if at in known and _is_set(value)]
    _warn(path, "unknown fields are ignored", unknown)
    _warn(path, "accepted, but ignored", ignored)
    try:
        return to_configuration(values)
    except InvalidObject as error:
        raise ConfigurationError(f"the configuration is invalid:\n  {path}: {error}") from None


def parse(data: bytes) -> dict[str, Any]:
    """Parse the first YAML document, without nulls; JSON is YAML too.

    Raises ValueError, with a message for the operator, if it is not a mapping.
    """
    try:
        values: Any = _without_nulls(next(manifests.load_documents(data), None))
    except (ValueError, RecursionError) as error:  # an alias may stand inside of itself
        raise ValueError(f"neither YAML nor JSON: {one_line(str(error))}") from error
    if not isinstance(values, dict):
        raise ValueError("not a mapping of fields: is the file complete?")
    found: dict[str, Any] = values
    return found


def _without_nulls(value: Any) -> Any:
    """Return the value without null fields, which count as not set; null elements of lists stay."""
    if isinstance(value, dict):
        return {str(k): _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _check_kind(path: Path, values: dict[str, Any]) -> None:
    expected = {"apiVersion": fields.API_VERSION, "kind": fields.KIND}
    lines = [
        f'{path}: {field}: must be "{wanted}", not {values.get(field)!r}'
        for field, wanted in expected.items()
        if values.get(field) != wanted
    ]
    if lines:
        raise ConfigurationError("\n".join(lines))


def _warn(path: Path, what: str, names: Sequence[str]) -> None:
    if names:
        log.warning("%s: %s: %s", path, what, ", ".join(names))


def _unread(kind: type[Section], values: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield path and value of the fields that a section of this type does not have."""
    if not isinstance(values, dict):
        return
    known = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for name, value in values.items():
        at, inner = join_path(path, name), known.get(name)
        if inner is None:
            yield at, value
        elif isinstance(inner, type) and issubclass(inner, Section):
            yield from _unread(inner, value, at)


def _is_set(value: Any) -> bool:
    """Whether a value says anything: kubeadm writes all fields, most of them zero."""
    if isinstance(value, dict):
        return any(map(_is_set, value.values()))
    return bool(value) and value not in ("0", "0s")


def to_configuration(values: dict[str, Any]) -> KubeProxyConfiguration:
    """Convert plain values to fields. Raises InvalidObject for a value of the wrong type."""
    try:
        converted = msgspec.convert(values, KubeProxyConfiguration, dec_hook=decode)
    except msgspec.ValidationError as error:
        raise decoding.invalid_object(error) from error
    explicit = {path for path in fields.LISTEN_FIELDS if value_at(converted, path)}
    return fields.complete_listen_address(fields.with_defaults(converted), explicit, {})


def decode(kind: type[Duration], value: Any) -> Duration:
    """Decode a duration for msgspec: a text, because 86400 would be less than a millisecond."""
    if isinstance(value, str):
        return kind(addresses.parse_duration(value))
    raise ValueError(f"{value!r} {addresses.NOT_A_DURATION}")


# The watch of the file while the agent runs.
#
# When the file is written or replaced, kube-proxy exits to be restarted with the new file
# (kube-proxy.md 15). The kubelet updates a mounted ConfigMap by replacing the symbolic link
# ``..data``, so the file behind the name is compared. A missing file does not count as changed.

POLL_SECONDS = 1.0


class ConfigWatch(PeriodicWorker):
    """The file at this object's creation is the reference: create it before reading the file."""

    def __init__(self, path: Path) -> None:
        super().__init__("config", POLL_SECONDS)
        self.changed = False
        self.path = path.absolute()
        self._known = _signature(self.path)

    def start(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Start; ``on_change`` is called once, from the thread of the watch; not after ``stop``."""
        self._on_change = on_change
        super().start()

    def turn(self) -> None:
        if not self.changed and _signature(self.path) not in (None, self._known):
            self.changed = True
            self._on_change()


def _signature(path: Path) -> tuple[int, ...] | None:
    """Return values that differ for another file and after each write; None: no file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
