# SPDX-License-Identifier: Apache-2.0
"""What is imported of the Kubernetes client: its configuration and its HTTP pool.

Its packages would import every part of it with their first module: models, OAuth, requests and
pydantic, 0.15 s of processor time and 18 MB. Packages of the same names without content take their
places, before any module of it is imported. What a module asks such a package for is imported then;
what only renews tokens of OpenID Connect, 0.14 s, when it is used.
"""

import re
import sys
from typing import Any

from ebpflb import empty_package
from ebpflb.errors import ClusterError, in_words

_CLIENT, _OAUTH, _OAUTH2 = "kubernetes.client", "requests_oauthlib", "oauthlib.oauth2"
_EXIT_STATUS = re.compile(r"process returned (-?\d+)")


def import_no_more_than_asked() -> None:
    """Does nothing where the client is imported already, or not installed."""
    if not empty_package.put("kubernetes"):
        return
    empty_package.put("kubernetes.config")
    empty_package.put("kubernetes.utils")
    empty_package.put(_CLIENT)
    vars(sys.modules[_CLIENT])["__getattr__"] = _part_of_the_client
    if empty_package.put(_OAUTH):
        vars(sys.modules[_OAUTH])["OAuth2Session"] = _oauth2_session
    if empty_package.put(_OAUTH2):
        vars(sys.modules[_OAUTH2])["__getattr__"] = _part_of_oauth2


def _part_of_the_client(name: str) -> Any:
    """Return what the modules of kubernetes.config take from kubernetes.client."""
    match name:
        case "Configuration":
            from kubernetes.client.configuration import Configuration

            return Configuration
        case "ApiClient":
            return _api_client
    raise AttributeError(f"{_CLIENT} has no {name} here")


def _api_client(**arguments: Any) -> Any:
    from kubernetes.client.api_client import ApiClient

    return ApiClient(**arguments)


def _oauth2_session(**arguments: Any) -> Any:
    from requests_oauthlib.oauth2_session import OAuth2Session

    return OAuth2Session(**arguments)


def _part_of_oauth2(name: str) -> Any:
    """Fill the package with its content; return a part of it."""
    package = sys.modules[_OAUTH2]
    del vars(package)["__getattr__"]
    spec = package.__spec__
    assert spec and spec.loader
    spec.loader.exec_module(package)
    return getattr(package, name)


def reason(error: Exception) -> str:
    """Return the error in words, without the output of a process."""
    from kubernetes.config.config_exception import ConfigException

    if isinstance(error, ConfigException):
        text = str(error)
        if found := _EXIT_STATUS.search(text):
            return f"exit status {found[1]}: run it by hand to see why"
        if "plugin api version" in text:
            return "it answered with another apiVersion than the kubeconfig's"
        return in_words(ValueError(text.partition("\n")[0]))
    known = isinstance(error, ClusterError | OSError)
    return in_words(error) if known else f"unusable ({type(error).__name__})"
