# SPDX-License-Identifier: Apache-2.0
"""Port 10256: /healthz and /livez, sentence by sentence of kube-proxy.md 13.1."""

import json
from typing import Any

import pytest

from ebpflb.model import nodes
from ebpflb.serve.health import Health, rfc3339
from ebpflb.serve.listener import Request, Response
from tests.model import builders
from tests.serve.conftest import Serve, ask

TIMEOUT = 60.0
PATHS = ("/healthz", "/livez")
BEGUN = 1_700_000_000 * 10**9


class Time:
    """A clock that a test sets: ``seconds`` have passed."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> int:
        return BEGUN + int(self.seconds * 10**9)

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def health(time: Time) -> Health:
    """Return the health of an eligible node, at the start."""
    health = Health(TIMEOUT, now=time.now, monotonic=time.monotonic)
    health.set_node(builders.node())
    health.synced()
    return health


def get(health: Health, path: str = "/healthz") -> Response:
    return health.respond(Request(path, ""))


def body(health: Health, path: str = "/healthz") -> Any:
    return json.loads(get(health, path).body)


def codes(health: Health) -> dict[str, int]:
    return {path: get(health, path).status for path in PATHS}


def test_update_queued_and_not_applied_for_the_timeout_is_unhealthy(
    health: Health, time: Time
) -> None:
    """A waiting change makes the agent unhealthy once it has waited for the timeout."""
    health.queued()
    time.seconds = TIMEOUT - 0.001
    assert health.healthy
    assert codes(health) == {"/healthz": 200, "/livez": 200}
    time.seconds = TIMEOUT
    assert not health.healthy
    assert codes(health) == {"/healthz": 503, "/livez": 503}


def test_clock_starts_at_the_oldest_queued_change(health: Health, time: Time) -> None:
    """Later changes do not move the deadline."""
    health.queued()
    time.seconds = TIMEOUT - 1
    health.queued()
    time.seconds = TIMEOUT
    assert not health.healthy


def test_clock_is_cleared_by_the_next_successful_sync(health: Health, time: Time) -> None:
    """After a sync the agent is healthy, and the next change has the whole timeout."""
    health.queued()
    time.seconds = TIMEOUT
    health.synced()
    assert health.healthy
    health.queued()
    time.seconds += TIMEOUT - 1
    assert health.healthy
    time.seconds += 1
    assert not health.healthy


def test_marked_updated_at_loop_start(serve: Serve) -> None:
    """Each family has a time from the first answer on, before anything is programmed."""
    serve()
    status = json.loads(ask("/livez", 10256).body)["status"]
    assert list(status) == ["IPv4", "IPv6"]
    assert all(entry["healthy"] for entry in status.values())


def test_waiting_for_its_first_lists_it_stays_healthy(health: Health, time: Time) -> None:
    """Without a zone label the Node queues nothing, so the agent stays healthy without its
    lists.
    """
    time.seconds = 10 * TIMEOUT
    health.set_node(builders.node(labels={"other": "label"}))
    time.seconds = 20 * TIMEOUT
    assert health.healthy


def test_first_sight_of_the_zone_label_queues_an_update(health: Health, time: Time) -> None:
    """With a zone label the agent becomes unhealthy if the lists stay incomplete for the
    timeout.
    """
    zone = {nodes.ZONE_LABEL: "z1"}
    health.set_node(builders.node(labels=zone))
    time.seconds = TIMEOUT
    assert not health.healthy
    health.synced()
    health.set_node(builders.node(("InternalIP", "10.0.0.1"), labels=zone))
    time.seconds = 3 * TIMEOUT
    assert health.healthy, "the same zone again is no change"


def test_livez_ignores_eligibility(time: Time) -> None:
    """/livez is 200 on a node that is about to be deleted, and its body does not mention the
    deletion.
    """
    health = Health(TIMEOUT, now=time.now, monotonic=time.monotonic)
    assert codes(health) == {"/healthz": 503, "/livez": 200}
    assert "nodeEligible" not in body(health, "/livez")


def test_healthz_is_200_iff_healthy_and_eligible(health: Health, time: Time) -> None:
    """/healthz is 200 only if the agent is healthy and the node is eligible."""
    found = {}
    for late in (False, True):
        for doomed in (False, True):
            health.synced()
            health.queued()
            time.seconds += TIMEOUT * late
            taints = [{"key": nodes.DELETION_TAINT}] if doomed else None
            health.set_node(builders.node(taints=taints))
            found[late, doomed] = get(health).status
    assert found == {(False, False): 200, (False, True): 503, (True, False): 503, (True, True): 503}


def test_deleted_node_is_kept_as_it_was(health: Health) -> None:
    """A deleted Node object changes nothing: the node stays eligible, or not eligible."""
    health.set_node(None)
    assert health.eligible
    health.set_node(builders.node(taints=[{"key": nodes.DELETION_TAINT}]))
    health.set_node(None)
    assert not health.eligible


def test_node_that_never_existed_is_not_eligible() -> None:
    """Without a Node object the node is not eligible."""
    health = Health(TIMEOUT)
    health.set_node(None)
    assert not health.eligible
    assert body(health)["nodeEligible"] is False


def test_body_of_healthz(health: Health, time: Time) -> None:
    """The keys are in kube-proxy's order; with status 200, lastUpdated is the current time."""
    time.seconds = 1.5
    assert get(health).body.decode() == (
        '{"lastUpdated":"2023-11-14T22:13:21.5Z","currentTime":"2023-11-14T22:13:21.5Z",'
        '"nodeEligible":true,"healthy":true,"status":{'
        '"IPv4":{"lastUpdated":"2023-11-14T22:13:20Z","healthy":true},'
        '"IPv6":{"lastUpdated":"2023-11-14T22:13:20Z","healthy":true}}}'
    )


def test_body_of_livez_is_without_node_eligible(health: Health) -> None:
    """The body of /livez has all keys except nodeEligible."""
    assert list(body(health, "/livez")) == ["lastUpdated", "currentTime", "healthy", "status"]
    assert set(body(health)) - set(body(health, "/livez")) == {"nodeEligible"}


@pytest.mark.parametrize("path", PATHS)
def test_last_updated_with_503_is_the_newest_real_sync(
    health: Health, time: Time, path: str
) -> None:
    """With 503, lastUpdated is the time of the last sync, not now, for each family too."""
    time.seconds = 7
    health.synced()
    health.queued()
    time.seconds = 7 + TIMEOUT
    said = body(health, path)
    assert said["lastUpdated"] == "2023-11-14T22:13:27Z"
    assert said["currentTime"] == "2023-11-14T22:14:27Z"
    entry = {"lastUpdated": "2023-11-14T22:13:27Z", "healthy": False}
    assert said["status"] == {"IPv4": entry, "IPv6": entry}


def test_status_is_omitted_if_empty() -> None:
    """Before the loop starts there are no families and no time."""
    said = body(Health(TIMEOUT))
    assert "status" not in said
    assert said["lastUpdated"] == "0001-01-01T00:00:00Z"


def test_times_are_rfc3339_with_nanoseconds() -> None:
    """Times are written as in Go: up to nine digits, without trailing zeros."""
    assert rfc3339(BEGUN + 123_456_789) == "2023-11-14T22:13:20.123456789Z"
    assert rfc3339(BEGUN + 1) == "2023-11-14T22:13:20.000000001Z"
    assert rfc3339(BEGUN + 120_000_000) == "2023-11-14T22:13:20.12Z"
    assert rfc3339(BEGUN) == "2023-11-14T22:13:20Z"


def test_responses_are_counted_by_code(time: Time) -> None:
    """kubeproxy_proxy_healthz_total and livez_total count the status of each response."""
    counted: list[tuple[str, int]] = []
    health = Health(
        TIMEOUT, now=time.now, monotonic=time.monotonic, on_response=lambda *it: counted.append(it)
    )
    for path in (*PATHS, "/other"):
        get(health, path)
    health.set_node(builders.node())
    get(health)
    assert counted == [("/healthz", 503), ("/livez", 200), ("/healthz", 200)]
