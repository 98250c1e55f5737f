# SPDX-License-Identifier: Apache-2.0
"""The access to the API server: address, TLS and credentials, from a kubeconfig or from a pod.

Everything is checked before anything is sent. No error quotes a credential.
"""

import hashlib
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from kubernetes.client.configuration import Configuration
from kubernetes.config.incluster_config import load_incluster_config

from ebpflb import redaction
from ebpflb.cluster import kubernetes_parts
from ebpflb.errors import ClusterError, in_words
from ebpflb.files import UnusableFile, read_regular

if TYPE_CHECKING:
    from ebpflb.cluster.kubeconfig import MemoryFiles


class Access:
    """The client's configuration, by the kubeconfig at this object's creation.

    Without ``path`` it is that of the pod, or ``master`` alone, without credentials. ``master``
    always overrides the server's URL. ``servers`` are URLs that are used instead, with these
    credentials. Raises ClusterError.
    """

    def __init__(self, path: Path | None, master: str = "", servers: Sequence[str] = ()) -> None:
        self._path, self._digest = path, b""
        self._files: MemoryFiles | None = None
        self.configuration = Configuration()
        try:
            if path is not None:
                self._load(path)
            elif not master:
                cast(Any, load_incluster_config)(self.configuration)
            for url in [*servers, master or self.configuration.host]:
                self._use_server(url)
        except Exception as error:  # the loaders do not translate their errors
            where = path or "no kubeconfig given, and not in a pod"
            raise ClusterError(f"{where}: {kubernetes_parts.reason(error)}") from None
        self.url: str = self.configuration.host

    @property
    def lacks_credentials(self) -> bool:
        """Whether the credential plugin failed, and has to be asked again."""
        return bool(self._files and self._files.failure)

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
        except Exception as error:  # of the client's own providers
            raise ClusterError(kubernetes_parts.reason(error)) from None
        if self._files and self._files.failure:
            raise ClusterError(self._files.failure)
        return {each["key"]: _header(each["value"]) for each in settings.values() if each["value"]}

    def _load(self, path: Path) -> None:
        try:
            data = read_regular(path)
        except OSError as error:
            raise ClusterError(str(error.strerror)) from None
        except UnusableFile as error:
            raise ClusterError(str(error)) from None
        from ebpflb.cluster import kubeconfig

        self._files = kubeconfig.load(data, path.absolute().parent, self.configuration)
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
