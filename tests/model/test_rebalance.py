# SPDX-License-Identifier: Apache-2.0
"""The annotation by which idle connections move, and the ports that it is for."""

from typing import Any

import pytest

from ebpflb.model import annotations, services
from ebpflb.model.annotations import REBALANCE_ANNOTATION, REBALANCED_PROTOCOLS, Rebalance
from ebpflb.model.services import ParsedService
from tests.model import builders
from tests.model.builders import annotated

WHERE = f"metadata.annotations[{REBALANCE_ANNOTATION}]"
USUAL = "idle=5s,above=20%"


def parsed(text: str | None, app: str | None = "http", **spec: Any) -> ParsedService:
    given = annotated(REBALANCE_ANNOTATION, text) | spec.pop("also", {})
    port = {"port": 80, "protocol": "TCP"} | ({"appProtocol": app} if app else {})
    return services.parse(builders.service(annotations=given, **{"ports": [port]} | spec))


@pytest.mark.parametrize(
    "text, value",
    [
        (None, None),
        (USUAL, Rebalance(5.0, 0.2)),
        ("idle=1s,above=1%", Rebalance(1.0, 0.01)),
        ("idle=1h,above=999%", Rebalance(3600.0, 9.99)),
    ],
)
def test_the_annotation_says_which_connections_move(text: str | None, value: object) -> None:
    found = parsed(text)
    assert [port.rebalance for port in found.ports] == [value]
    assert not found.warnings


@pytest.mark.parametrize(
    "text",
    [
        *("", "on", "idle=5s", "above=20%", "idle=5s,above=20", "idle=5s,above=0%"),
        *("idle=0.5s,above=20%", "idle=2h,above=20%", "idle=5s,above=1000%", "idle=5,above=20%"),
        "above=20%,idle=5s",
    ],
)
def test_what_cannot_be_read_is_named_and_connections_stay(text: str) -> None:
    (port,), (warning,) = parsed(text)
    assert port.rebalance is None
    assert warning.startswith(WHERE)
    assert warning.endswith("so connections stay")


@pytest.mark.parametrize("app", REBALANCED_PROTOCOLS)
def test_ports_that_speak_http_move(app: str) -> None:
    (port,), warnings = parsed(USUAL, app)
    assert (port.rebalance, warnings) == (Rebalance(5.0, 0.2), ())


@pytest.mark.parametrize("app", [None, "postgresql", "HTTP", "kubernetes.io/ws", "redis", "tcp"])
def test_others_never_do_and_are_named(app: str | None) -> None:
    """An idle connection to a database may hold a transaction, or a lock."""
    (port,), (warning,) = parsed(USUAL, app)
    assert port.rebalance is None
    known = "http, https, kubernetes.io/h2c, grpc"
    text = f"spec.ports[0].appProtocol is not one of {known}, so its connections stay"
    assert warning == f"{WHERE}: {text}"


def test_each_port_for_itself() -> None:
    """UDP neither moves nor is named, even with the number of a port that moves."""
    ports = [
        {"name": "a", "port": 443, "protocol": "UDP", "appProtocol": "https"},
        {"name": "b", "port": 443, "protocol": "TCP", "appProtocol": "https"},
        {"name": "c", "port": 5432, "protocol": "TCP"},
        {"name": "d", "port": 444, "protocol": "UDP", "appProtocol": "https"},
        {"name": "e", "port": 444, "protocol": "TCP"},
    ]
    found = parsed(USUAL, ports=ports)
    assert [it.name.port for it in found.ports if it.rebalance] == ["b"]
    assert [it.split(": ")[1].split(".")[1] for it in found.warnings] == ["ports[2]", "ports[4]"]


@pytest.mark.parametrize(
    "spec",
    [
        {"sessionAffinity": "ClientIP"},
        {"also": {annotations.SCHEDULER_ANNOTATION: annotations.SOURCE_HASH}},
    ],
)
def test_a_client_that_keeps_its_endpoint_moves_nothing(spec: dict[str, Any]) -> None:
    """It would connect to the same endpoint again."""
    (port,), (warning,) = parsed(USUAL, **spec)
    assert port.rebalance is None
    assert warning == f"{WHERE}: has no effect: a client's connections go to one endpoint"
