# SPDX-License-Identifier: Apache-2.0
"""A kubeconfig -> the values that the client of Kubernetes takes.

Files that it names are told by their absolute paths. What it contains of certificates and keys is
put into memory files, where the client would write it to /tmp. No error quotes the text.
"""

import base64
import binascii
import re
from pathlib import Path
from typing import Any

import yaml

from ebpflb import redaction
from ebpflb.cluster import yaml_documents
from ebpflb.cluster.memory_files import MemoryFiles
from ebpflb.errors import ClusterError, in_words

_FILES = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
_INLINE = {f"{name}-data": name for name in _FILES[:3]}
_SECRET = {"token", "password", "client-secret", "id-token", "refresh-token", "access-token"}
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


def parse(data: bytes, folder: Path, files: MemoryFiles) -> dict[str, Any]:
    """``folder`` is where relative paths begin. Raises ClusterError."""
    try:
        config = next(yaml_documents.load_all(data), None)
    except ValueError as error:
        raise ClusterError(_reason(error)) from None
    if not isinstance(config, dict):
        raise ClusterError("Invalid kube-config file: not a mapping of fields")
    for kind, inner in (("clusters", "cluster"), ("users", "user")):
        entries = config.get(kind)
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and isinstance(entry.get(inner), dict):
                _remember_secrets(entry[inner])
                _complete(entry[inner], folder, files)
    return config


def _reason(error: ValueError) -> str:
    """Where the text is wrong; what is quoted may be a token."""
    cause = error.__cause__
    if not isinstance(cause, yaml.MarkedYAMLError):
        return f"neither YAML nor JSON: {_QUOTED.sub('...', in_words(error))}"
    said = ": ".join(part for part in (cause.context, cause.problem) if part)
    mark = cause.problem_mark or cause.context_mark
    where = f", line {mark.line + 1}" if mark else ""
    return in_words(ValueError(_QUOTED.sub("...", said) + where))


def _complete(section: dict[str, Any], folder: Path, files: MemoryFiles) -> None:
    for name in _FILES:
        if isinstance(section.get(name), str) and section[name]:
            section[name] = str(_readable(name, (folder / section[name]).absolute()))
    for inline, name in _INLINE.items():
        if content := section.pop(inline, None):
            section[name] = str(files.add(_decoded(inline, content)))


def _readable(name: str, path: Path) -> Path:
    """A pipe or a device is never opened. Who reads a file that is not there names it."""
    if path.exists() and not path.is_file():
        raise ClusterError(f"{name}: {path}: not a regular file")
    return path


def _decoded(name: str, content: object) -> bytes:
    try:
        return base64.b64decode(content if isinstance(content, str | bytes) else b"?")
    except (binascii.Error, ValueError):
        raise ClusterError(f"{name}: not base64") from None


def _remember_secrets(value: object) -> None:
    """Those of a user, and of the credential plugin's environment; and passwords in URLs."""
    if isinstance(value, list):
        for each in value:
            _remember_secrets(each)
    if not isinstance(value, dict):
        return
    for name, each in value.items():
        if name in _SECRET or (name == "value" and "name" in value):
            redaction.remember(each)
        elif name in ("server", "proxy-url") and isinstance(each, str):
            redaction.without_user(each)
        else:
            _remember_secrets(each)
