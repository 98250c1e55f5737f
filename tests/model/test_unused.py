# SPDX-License-Identifier: Apache-2.0
"""Each unused endpoint has one true reason."""

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from ebpflb.model import endpoints, objects, services
from ebpflb.model.endpoints import Endpoint, LeftOut, Topology, UnusedReason, Use
from ebpflb.model.services import ServicePort
from tests.model import builders
from tests.model.builders import entry
from tests.model.policies import ENDPOINTS, HERE, POLICIES


def uses(port: ServicePort, *found: Endpoint, topology: Topology = HERE) -> list[Use]:
    return endpoints.uses(port, found, endpoints.select(found, topology), topology)


@given(some.sampled_from(POLICIES), ENDPOINTS)
def test_each_endpoint_is_used_or_has_a_reason(
    port: ServicePort, found: tuple[Endpoint, ...]
) -> None:
    """In each list in use, every endpoint is either a member or has a reason why it is not."""
    chosen = endpoints.select(found, HERE)
    in_use = endpoints.uses_cluster(port), endpoints.uses_local(port)
    for use in endpoints.uses(port, found, chosen, HERE):
        in_cluster = in_use[0] and any(use.endpoint is each for each in chosen.cluster)
        in_local = in_use[1] and any(use.endpoint is each for each in chosen.local)
        assert in_cluster + (use.not_in_cluster is not None) == in_use[0]
        assert in_local + (use.not_in_local is not None) == in_use[1]


def without(each: Endpoint, reason: UnusedReason) -> Endpoint:
    """Return the endpoint changed so that this reason no longer holds."""
    match reason:
        case UnusedReason.NOT_LOCAL:
            return msgspec.structs.replace(each, local=True)
        case UnusedReason.OTHER_NODES:
            hints = each.hints._replace(nodes=each.hints.nodes | {HERE.node})
            return msgspec.structs.replace(each, hints=hints)
        case UnusedReason.OTHER_ZONES:
            hints = each.hints._replace(zones=each.hints.zones | {HERE.zone})
            return msgspec.structs.replace(each, hints=hints)
        case _:
            return msgspec.structs.replace(each, ready=True)


LISTS: list[Callable[[Use], UnusedReason | None]] = [
    lambda use: use.not_in_cluster,
    lambda use: use.not_in_local,
]


@pytest.mark.parametrize("reason_of", LISTS, ids=["cluster", "local"])
@given(some.sampled_from(POLICIES), ENDPOINTS)
def test_reasons_are_true(
    reason_of: Callable[[Use], UnusedReason | None], port: ServicePort, found: tuple[Endpoint, ...]
) -> None:
    """An endpoint is used once its reasons have been removed, and no reason comes back."""
    for index in range(len(found)):
        changed, seen = list(found), set[UnusedReason]()
        while (reason := reason_of(uses(port, *changed)[index])) is not None:
            assert reason not in seen
            seen.add(reason)
            changed[index] = without(changed[index], reason)


def left_out(*slices: objects.EndpointSlice, ports: tuple[ServicePort, ...]) -> list[LeftOut]:
    return list(endpoints.left_out(map(builders.stored, slices), ports))


WEB = services.parse(builders.service(ports=[{"name": "http", "port": 80}])).ports


@pytest.mark.parametrize(
    ("slice", "reason"),
    [
        (
            builders.slice(entry("10.1.0.1"), ports=[{"name": "web", "port": 80}]),
            UnusedReason.NO_SUCH_PORT,
        ),
        (
            builders.slice(
                entry("10.1.0.1"), ports=[{"name": "http", "port": 80, "protocol": "UDP"}]
            ),
            UnusedReason.NO_SUCH_PORT,
        ),
        (builders.slice(entry("10.1.0.1"), ports=[{"name": "http"}]), UnusedReason.NO_SUCH_PORT),
        (builders.slice(entry("fd00::1"), family="IPv6"), UnusedReason.OTHER_FAMILY),
        (builders.slice(entry("a.example"), family="FQDN"), UnusedReason.ADDRESS_TYPE),
        (builders.slice(entry(), ports=[{"name": "http", "port": 80}]), UnusedReason.NO_ADDRESS),
        (
            builders.slice(entry("10.1.0"), ports=[{"name": "http", "port": 80}]),
            UnusedReason.NO_ADDRESS,
        ),
    ],
)
def test_left_out(slice: objects.EndpointSlice, reason: UnusedReason) -> None:
    """An entry that is not an endpoint is named with its slice and the reason."""
    (found,) = left_out(slice, ports=WEB)
    assert (found.slice, found.reason) == ("web-abcde", reason)
    assert found.port == (WEB[0].name if reason == UnusedReason.NO_SUCH_PORT else None)


SLICES = some.lists(
    some.builds(
        lambda name, family, listed, ports: builders.slice(
            *(entry(*each) for each in listed), name=name, family=family, ports=ports
        ),
        some.sampled_from(["a", "b"]),
        some.sampled_from(["IPv4", "IPv6", "FQDN"]),
        some.lists(some.sampled_from([("10.1.0.1",), ("10.1.0.2", "10.1.0.3"), ("fd00::1",), ()])),
        some.lists(
            some.fixed_dictionaries(
                {
                    "name": some.sampled_from(["http", "grpc"]),
                    "port": some.sampled_from([None, 8080]),
                    "protocol": some.sampled_from(["TCP", "UDP"]),
                }
            ),
            max_size=2,
        ),
    ),
    max_size=3,
)
PORTS = [
    services.parse(build(ports=[{"name": "http", "port": 80}, {"name": "grpc", "port": 81}])).ports
    for build in (builders.service, builders.dual_stack)
]


@given(some.sampled_from(PORTS), SLICES)
def test_every_entry_is_told(
    ports: tuple[ServicePort, ...], slices: list[objects.EndpointSlice]
) -> None:
    """For each service port of a family, an entry is an endpoint or left out."""
    for slice in slices:
        for each in slice.endpoints or ():
            one = msgspec.structs.replace(slice, endpoints=[each])
            told = [it.port for it in left_out(one, ports=ports)]
            of_family = [port.name for port in ports if str(port.name.family) == slice.address_type]
            assert of_family or told == [None]
            for name in of_family:
                merged = bool(endpoints.merge([builders.stored(one)], name, HERE.node))
                assert merged != (name in told or None in told)
