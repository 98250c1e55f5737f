# SPDX-License-Identifier: Apache-2.0
"""The access to the API server: address, TLS and credentials, from a kubeconfig or from a pod.

Only this module and ``api`` import ``kubernetes``. Everything is checked before anything is sent.
No error quotes a credential, or the output of a credential plugin.
"""

import base64
import binascii
import hashlib
import os
import re
import ssl
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import yaml
from kubernetes import config
from kubernetes.client import Configuration
from kubernetes.config.dateutil import parse_rfc3339
from kubernetes.config.exec_provider import ExecProvider
from kubernetes.config.kube_config import KubeConfigLoader

from ebpflb import redaction
from ebpflb.cluster import manifest_file
from ebpflb.errors import ClusterError, in_words
from ebpflb.files import UnusableFile, read_regular

# Files that exist in this process only: they disappear when it is killed.
#
# TLS keys have to be files, and a kubeconfig may contain its keys as text.


class MemoryFiles:
    """Files that are closed when no reference to this object is left."""

    def __init__(self) -> None:
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


# A kubeconfig -> the values that the Kubernetes client takes.
#
# File names become absolute paths. Certificates and keys in the text are put into memory files,
# whereas the client would write them to /tmp. No error quotes the text.

_FILES = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
_INLINE = {f"{name}-data": name for name in _FILES[:3]}
_SECRET = {"token", "password", "client-secret", "id-token", "refresh-token", "access-token"}
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


def parse_kubeconfig(data: bytes, folder: Path, files: MemoryFiles) -> dict[str, Any]:
    """Parse a kubeconfig; relative paths begin at ``folder``. Raises ClusterError."""
    try:
        config = next(manifest_file.load_documents(data), None)
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
    """Return where the text is wrong, without quotations, since one may contain a token."""
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
    """Return the path, and refuse pipes and devices; a missing file is reported by its reader."""
    if path.exists() and not path.is_file():
        raise ClusterError(f"{name}: {path}: not a regular file")
    return path


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


_EXIT_STATUS = re.compile(r"process returned (-?\d+)")


class Access:
    """The client's configuration, by the kubeconfig at this object's creation.

    Without ``path`` it is that of the pod, or ``master`` alone, without credentials. ``master``
    always overrides the server's URL. Raises ClusterError.
    """

    def __init__(self, path: Path | None, master: str = "") -> None:
        self._path, self._digest = path, b""
        self._files = MemoryFiles()
        self.configuration = Configuration()
        try:
            if path is not None:
                self._load(path)
            elif not master:
                cast(Any, config).load_incluster_config(self.configuration)
            self._use_server(master or self.configuration.host)
        except Exception as error:  # the loaders do not translate their errors
            where = path or "no kubeconfig given, and not in a pod"
            raise ClusterError(f"{where}: {_without_output(error)}") from None
        self.url: str = self.configuration.host

    @property
    def is_outdated(self) -> bool:
        """Whether the kubeconfig has changed since."""
        try:
            return self._path is not None and _digest(read_regular(self._path)) != self._digest
        except (OSError, UnusableFile):
            return False

    def headers(self) -> dict[str, str]:
        """Return the headers for one request: the client renews expired tokens.

        A pod or a credential plugin may have such tokens. Raises ClusterError.
        """
        try:
            settings: Any = self.configuration.auth_settings()
        except Exception as error:  # of a credential plugin
            raise ClusterError(_without_output(error)) from None
        return {each["key"]: _header(each["value"]) for each in settings.values() if each["value"]}

    def _load(self, path: Path) -> None:
        try:
            data = read_regular(path)
        except OSError as error:
            raise ClusterError(str(error.strerror)) from None
        except UnusableFile as error:
            raise ClusterError(str(error)) from None
        folder = path.absolute().parent
        values = parse_kubeconfig(data, folder, self._files)
        make: Any = _Loader  # the client's functions have no types
        loader = make(values, config_base_path=str(folder))
        loader.files = self._files
        loader.load_and_set(self.configuration)
        self._digest = _digest(data)

    def _use_server(self, url: str) -> None:
        host = redaction.without_user(url).rstrip("/")
        if urlsplit(host).scheme not in ("http", "https") or not urlsplit(host).hostname:
            raise ClusterError(
                f'"{host}" is not the URL of a server such as https://192.0.2.1:6443'
            )
        self.configuration.host = host
        redaction.without_user(self.configuration.proxy or "")
        if host.startswith("https:"):
            _check_tls(self.configuration)


class _Loader(KubeConfigLoader):
    """The client's loader; but errors stop the start, and a plugin's output is never quoted."""

    files: MemoryFiles

    def _load_from_exec_plugin(self) -> bool | None:
        user: Any = self._user
        if "exec" not in user:
            return None
        plugin, run = user["exec"], cast(Any, ExecProvider)
        try:
            status = run(plugin, self._config_base_path, self._cluster).run()
            return self._use(status)
        except Exception as error:
            name = plugin.value.get("command")
            raise ClusterError(f"credential plugin {name}: {_without_output(error)}") from None

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


def _without_output(error: Exception) -> str:
    """Return the error in words, without the output of a process."""
    if isinstance(error, config.ConfigException):
        text = str(error)
        if found := _EXIT_STATUS.search(text):
            return f"exit status {found[1]}: run it by hand to see why"
        if "plugin api version" in text:
            return "it answered with another apiVersion than the kubeconfig's"
        return in_words(ValueError(text.partition("\n")[0]))
    known = isinstance(error, ClusterError | OSError)
    return in_words(error) if known else f"unusable ({type(error).__name__})"


def _check_tls(configuration: Configuration) -> None:
    """Check the files. Raises ClusterError for files that are no certificates, or keys."""
    context = ssl.create_default_context()
    for what, file in (
        ("certificate-authority", configuration.ssl_ca_cert),
        ("client-certificate and client-key", configuration.cert_file),
    ):
        try:
            if file and file == configuration.ssl_ca_cert:
                context.load_verify_locations(file)
            elif file:
                context.load_cert_chain(file, configuration.key_file, password=lambda: "")
        except (OSError, ValueError) as error:
            raise ClusterError(f"{what}: not usable as PEM: {in_words(error)}") from None


def _header(value: str) -> str:
    """Return "Bearer TOKEN" as it can be sent; a token's file may end in a line break."""
    scheme, _, credential = value.partition(" ")
    credential = credential.strip()
    redaction.remember(credential)
    if not credential:
        raise ClusterError("the token is empty")
    if not (credential.isascii() and credential.isprintable()):
        raise ClusterError(
            "the token has characters that cannot be sent: is its file the right one?"
        )
    return f"{scheme} {credential}"


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
