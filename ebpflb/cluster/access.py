# SPDX-License-Identifier: Apache-2.0
"""The access to the API server: address, TLS and credentials, from a kubeconfig or from a pod.

Everything is checked before anything is sent. No error quotes a credential.
"""

import math
import os
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from urllib3 import PoolManager, ProxyManager

from ebpflb import redaction
from ebpflb.errors import ClusterError, in_words

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # of a pod
TOKEN_SECONDS = 60.0  # then the pod's token is read again: the kubelet renews the file
_CONNECTIONS = 16  # kept open to a server: more than the agent's threads


class Access(Protocol):
    """How to ask an API server, as it was configured when this object was made."""

    url: str
    proxy: str  # "": none
    is_verified: bool  # the server's certificate

    @property
    def lacks_credentials(self) -> bool:
        """Whether the credential plugin failed, and has to be asked again."""

    @property
    def is_outdated(self) -> bool:
        """Whether the kubeconfig has changed since."""

    def headers(self) -> dict[str, str]:
        """Return the headers for one request, with the current token. Raises ClusterError."""

    def pool(self, socket_options: Any) -> PoolManager:
        """Return the connections to the server. Raises HTTPError or ValueError for the proxy."""


def open_access(path: Path | None, master: str = "", servers: Sequence[str] = ()) -> Access:
    """Return the access by a kubeconfig, or without ``path`` the one of the pod.

    ``master`` overrides the server's URL; alone it means no credentials. ``servers`` are URLs that
    are used instead, with these credentials. Only a kubeconfig needs the Kubernetes client, 25 MB.
    Raises ClusterError.
    """
    if path is None:
        return PodAccess(master, servers)
    from ebpflb.cluster.kubeconfig import KubeconfigAccess

    return KubeconfigAccess(path, master, servers)


class PodAccess:
    """The access by the pod's service account, or to ``master`` without credentials."""

    lacks_credentials = is_outdated = False
    is_verified = True

    def __init__(self, master: str, servers: Sequence[str]) -> None:
        self._account = None if master else SERVICE_ACCOUNT
        self._token, self._read_at = "", -math.inf
        self._authority = str(self._account / "ca.crt") if self._account else None
        self.url = [server_url(url) for url in (*servers, master or _server_of_pod())][-1]
        check_tls(self._authority)
        self.headers()
        self.proxy = proxy_for(self.url)

    def headers(self) -> dict[str, str]:
        if not self._account:
            return {}
        if time.monotonic() - self._read_at > TOKEN_SECONDS:
            try:
                self._token = (self._account / "token").read_text()
            except (OSError, ValueError) as error:
                raise ClusterError(f"the token of this pod: {in_words(error)}") from None
            self._read_at = time.monotonic()
        return {"Authorization": f"Bearer {checked(self._token)}"}

    def pool(self, socket_options: Any) -> PoolManager:
        how: dict[str, Any] = {"ca_certs": self._authority, "cert_reqs": ssl.CERT_REQUIRED}
        how |= {"maxsize": _CONNECTIONS, "socket_options": socket_options}
        return ProxyManager(self.proxy, **how) if self.proxy else PoolManager(**how)


def _server_of_pod() -> str:
    """Return the URL of the API server by the environment that every pod has."""
    names = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
    host, port = map(os.environ.get, names)
    if not (host and port):
        raise ClusterError(
            f"no kubeconfig given, and not in a pod: {' or '.join(names)} is not set"
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def server_url(url: str) -> str:
    """Return a server's URL without a user. Raises ClusterError if it is not one."""
    host = redaction.without_user(url).rstrip("/")
    if urlsplit(host).scheme not in ("http", "https") or not urlsplit(host).hostname:
        raise ClusterError(f'"{host}" is not the URL of a server such as https://192.0.2.1:6443')
    return host


def check_tls(
    authority: str | None, certificate: str | None = None, key: str | None = None
) -> None:
    """Check the files. Raises ClusterError for files that are no certificates, or keys."""
    context = ssl.create_default_context()
    try:
        what = "certificate-authority"
        if authority:
            context.load_verify_locations(authority)
        what = "client-certificate and client-key"
        if certificate:
            context.load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise ClusterError(f"{what}: not usable as PEM: {in_words(error)}") from None


def checked(token: str) -> str:
    """Return a token as it can be sent; its file may end in a line break. Raises ClusterError."""
    credential = token.strip()
    redaction.remember(credential)
    if not credential:
        raise ClusterError("the token is empty")
    if not (credential.isascii() and credential.isprintable()):
        raise ClusterError(
            "the token has characters that cannot be sent: is its file the right one?"
        )
    return credential


# Proxies, by the environment, as the Kubernetes client takes them.


def proxy_for(url: str) -> str:
    """Return the proxy of a server; "" means none."""
    proxies = getproxies_environment()
    proxy = proxies.get(urlsplit(url).scheme) or proxies.get("all", "")
    redaction.without_user(proxy)
    return "" if bypasses_proxy(url, proxies.get("no", "")) else proxy


def bypasses_proxy(url: str, no_proxy: str) -> bool:
    """Whether an entry of NO_PROXY names the server: *, a network, a domain, HOST or HOST:PORT."""
    parts = urlsplit(url.lower())
    is_named = proxy_bypass(parts.netloc, {"no": no_proxy.lower()})
    entries = (each.strip() for each in no_proxy.split(","))
    return bool(is_named) or any(_is_in(parts.hostname or "", each) for each in entries)


def _is_in(host: str, network: str) -> bool:
    with suppress(ValueError):
        return ip_address(host) in ip_network(network, strict=False)
    return False
