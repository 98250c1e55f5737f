# SPDX-License-Identifier: Apache-2.0
"""The access to the API server by a kubeconfig: its values, with the Kubernetes client's loader.

Only this module imports the client. No error quotes a credential, or the output of a credential
plugin.
"""

import base64
import binascii
import hashlib
import os
import re
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from kubernetes.client.configuration import Configuration
from kubernetes.client.rest import RESTClientObject
from kubernetes.config.config_exception import ConfigException
from kubernetes.config.dateutil import parse_rfc3339
from kubernetes.config.exec_provider import ExecProvider
from kubernetes.config.kube_config import KubeConfigLoader
from urllib3 import PoolManager

from ebpflb import redaction
from ebpflb.cluster import manifests
from ebpflb.cluster.access import check_tls, checked, server_url
from ebpflb.errors import ClusterError, in_words
from ebpflb.files import UnusableFile, read_regular

_EXIT_STATUS = re.compile(r"process returned (-?\d+)")


class KubeconfigAccess:
    """The access by the kubeconfig, as it is at this object's creation."""

    def __init__(self, path: Path, master: str, servers: Sequence[str]) -> None:
        """Raises ClusterError."""
        self._path, self._configuration = path, Configuration()
        try:
            self._load(path)
            for url in (*servers, master or self._configuration.host):
                self._use_server(url)
        except Exception as error:  # the loader does not translate its errors
            raise ClusterError(f"{path}: {_why(error)}") from None
        self.url: str = self._configuration.host
        self.proxy: str = self._configuration.proxy or ""
        self.is_verified = bool(self._configuration.verify_ssl)

    @property
    def lacks_credentials(self) -> bool:
        return bool(self._files.failure)

    @property
    def is_outdated(self) -> bool:
        try:
            return _digest(read_regular(self._path)) != self._digest
        except (OSError, UnusableFile):
            return False

    def headers(self) -> dict[str, str]:
        """Return the headers for one request: the client renews tokens that a plugin gave."""
        try:
            settings: Any = self._configuration.auth_settings()
        except Exception as error:  # of the client's own providers
            raise ClusterError(_why(error)) from None
        if self._files.failure:
            raise ClusterError(self._files.failure)
        return {each["key"]: _header(each["value"]) for each in settings.values() if each["value"]}

    def pool(self, socket_options: Any) -> PoolManager:
        self._configuration.socket_options = socket_options
        pool: PoolManager = RESTClientObject(self._configuration).pool_manager
        weakref.finalize(pool, id, self._files)  # which last as long as the pool
        return pool

    def _load(self, path: Path) -> None:
        try:
            data = read_regular(path)
        except OSError as error:
            raise ClusterError(str(error.strerror)) from None
        except UnusableFile as error:
            raise ClusterError(str(error)) from None
        self._files = load(data, path.absolute().parent, self._configuration)
        self._digest = _digest(data)

    def _use_server(self, url: str) -> None:
        found = self._configuration
        found.host = host = server_url(url)
        redaction.without_user(found.proxy or "")
        if host.startswith("https:"):
            check_tls(found.ssl_ca_cert, found.cert_file, found.key_file)


def _header(value: str) -> str:
    """Return "Bearer TOKEN", or another scheme's credential, as it can be sent."""
    scheme, _, credential = value.partition(" ")
    return f"{scheme} {checked(credential)}"


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _why(error: Exception) -> str:
    """Return the error in words, without the output of a process."""
    if isinstance(error, ConfigException):
        text = str(error)
        if found := _EXIT_STATUS.search(text):
            return f"exit status {found[1]}: run it by hand to see why"
        if "plugin api version" in text:
            return "it answered with another apiVersion than the kubeconfig's"
        return in_words(ValueError(text.partition("\n")[0]))
    known = isinstance(error, ClusterError | OSError)
    return in_words(error) if known else f"unusable ({type(error).__name__})"


# Files that exist in this process only: they disappear when it is killed.
#
# TLS keys have to be files, and a kubeconfig may contain its keys as text.


class MemoryFiles:
    """Files that are closed when no reference to this object is left.

    ``failure``: why the credential plugin failed, if it did when it was last asked.
    """

    def __init__(self) -> None:
        self.failure = ""
        self._opened: list[int] = []

    def add(self, content: bytes) -> Path:
        """Return a path at which this process can open a file with this content."""
        opened = os.memfd_create("ebpflb")
        self._opened.append(opened)
        with open(opened, "wb", closefd=False) as file:
            file.write(content)
        return Path(f"/proc/self/fd/{opened}")

    def __del__(self) -> None:
        for opened in self._opened:
            os.close(opened)


def load(data: bytes, folder: Path, configuration: Configuration) -> MemoryFiles:
    """Set the client's configuration; the files that are returned must live as long as it.

    Relative paths begin at ``folder``. Raises ClusterError and the errors of the client's loader.
    """
    files = MemoryFiles()
    make: Any = _Loader  # the client's functions have no types
    loader = make(_parse(data, files), config_base_path=str(folder))
    loader.files = files
    loader.load_and_set(configuration)
    return files


# A kubeconfig -> the values that the Kubernetes client takes.
#
# Certificates and keys in the text are put into memory files, whereas the client would write them
# to /tmp. No error quotes the text.

_FILES = ("certificate-authority", "client-certificate", "client-key")
_INLINE = {f"{name}-data": name for name in _FILES}
_SECRET = {"token", "password", "client-secret", "id-token", "refresh-token", "access-token"}
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


def _parse(data: bytes, files: MemoryFiles) -> dict[str, Any]:
    """Raises ClusterError."""
    try:
        config = next(manifests.load_documents(data), None)
    except ValueError as error:
        raise ClusterError(_reason(error)) from None
    if not isinstance(config, dict):
        raise ClusterError("Invalid kube-config file: not a mapping of fields")
    for kind, inner in (("clusters", "cluster"), ("users", "user")):
        entries = config.get(kind)
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and isinstance(entry.get(inner), dict):
                _remember_secrets(entry[inner])
                _complete(entry[inner], files)
    return config


def _reason(error: ValueError) -> str:
    """Return where the text is wrong, without quotations, since one may contain a token."""
    cause = error.__cause__
    if not isinstance(cause, yaml.MarkedYAMLError):
        return f"neither YAML nor JSON: {_QUOTED.sub('...', in_words(error))}"
    said = ": ".join(part for part in (cause.context, cause.problem) if part)
    mark = cause.problem_mark or cause.context_mark
    where = f", line {mark.line + 1}" if mark else ""
    return in_words(ValueError(_QUOTED.sub("...", said) + where))


def _complete(section: dict[str, Any], files: MemoryFiles) -> None:
    """Complete a cluster or user; of a token and its file the file counts, as in client-go."""
    section.pop("token" if section.get("tokenFile") else "tokenFile", None)
    for inline, name in _INLINE.items():
        if content := section.pop(inline, None):
            section[name] = str(files.add(_decoded(inline, content)))


def _decoded(name: str, content: object) -> bytes:
    try:
        return base64.b64decode(content if isinstance(content, str | bytes) else b"?")
    except (binascii.Error, ValueError):
        raise ClusterError(f"{name}: not base64") from None


def _remember_secrets(value: object) -> None:
    """Remember secrets: of a user, of the credential plugin's environment, and in URLs."""
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


class _Loader(KubeConfigLoader):
    """The client's loader; but a plugin's output is never quoted, and a plugin that fails is asked
    again. Other errors stop the start.
    """

    files: MemoryFiles

    def _load_from_exec_plugin(self) -> bool | None:
        user: Any = self._user
        if "exec" not in user:
            return None
        plugin, make = user["exec"], cast(Any, ExecProvider)
        self.files.failure, name = "", plugin.value.get("command")
        try:
            provider = make(plugin, self._config_base_path, self._cluster)
        except Exception as error:
            why = _why(error)
            raise ClusterError(f"credential plugin {name}: {why}") from None
        try:
            return self._use(provider.run())
        except Exception as error:
            self.files.failure = f"credential plugin {name}: {_why(error)}"
            return None

    def _use(self, status: dict[str, Any]) -> bool:
        if token := status.get("token"):
            redaction.remember(token)
            self.token = f"Bearer {token}"
        elif "clientCertificateData" in status and "clientKeyData" in status:
            self.cert_file = str(self.files.add(status["clientCertificateData"].encode()))
            self.key_file = str(self.files.add(status["clientKeyData"].encode()))
        else:
            raise ClusterError("it returned neither a token nor a certificate with its key")
        if "expirationTimestamp" in status:
            self.expiry = cast(Any, parse_rfc3339)(status["expirationTimestamp"])
        return True
