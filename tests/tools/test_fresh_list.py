# SPDX-License-Identifier: Apache-2.0
"""The state of the cluster by a fresh list, for `ebpflb audit` and `ebpflb doctor`."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.errors import ClusterError
from ebpflb.model.events import Key
from ebpflb.options import Options, Paths
from ebpflb.tools import fresh_list
from tests.cluster.objects import service
from tests.kit.api_server import FakeApiServer


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApiServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with FakeApiServer() as server:
        yield server


@pytest.fixture
def options(api: FakeApiServer, tmp_path: Path) -> Options:
    return Options(Paths(tmp_path), "node-1", tmp_path, kubeconfig=api.kubeconfig(tmp_path))


def test_all_kinds_are_listed(api: FakeApiServer, options: Options) -> None:
    api.put(service("web"))
    cluster = fresh_list.listed(options)
    assert cluster.complete
    assert cluster.services.keys() == {Key("default", "web")}


def test_why_a_list_is_incomplete(
    api: FakeApiServer, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the last reason."""
    monkeypatch.setattr(fresh_list, "LIST_SECONDS", 3.0)
    refusal = json.dumps({"message": "etcd is away"}).encode()
    api.fail("Service", 500, refusal, times=1000)
    with pytest.raises(ClusterError, match=r"cannot be listed: .*etcd is away"):
        fresh_list.listed(options)


def test_a_forbidden_list_is_not_tried_again(api: FakeApiServer, options: Options) -> None:
    """Of Services; but nobody needs the ranges of cluster IPs, which older roles do not allow."""
    refusal = json.dumps({"message": "it is forbidden"}).encode()
    api.fail("ServiceCIDR", 403, refusal, times=1000)
    assert fresh_list.listed(options).complete
    api.fail("Service", 403, refusal, times=1)
    with pytest.raises(ClusterError, match=r"cannot be listed: 403 it is forbidden"):
        fresh_list.listed(options)
