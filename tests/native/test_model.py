# SPDX-License-Identifier: Apache-2.0
"""The C code and an independent model decide the same, for all services and calls."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as some

from ebpflb.model.addresses import Address
from tests.load import scaled
from tests.native import model
from tests.native.model import Cluster, Request, Service, plain
from tests.native.node import HOST, POD, SECOND, NativeNode, Socket
from tests.publishing import frontend, place

OURS = ["172.30.0.1", "172.30.0.2", "203.0.113.1", "192.0.2.1", "fd00:30::1", "2001:db8::1"]
ANY = ["0.0.0.0", "::"]
DESTINATIONS = [
    *OURS, *ANY, "127.0.0.1", "::1", "192.0.2.2", "::ffff:172.30.0.1", "::ffff:192.0.2.1",
    "::ffff:127.0.0.1", "::ffff:0.0.0.0",
]  # fmt: skip
NODE = ["192.0.2.1", "2001:db8::1", "172.30.0.2"]
PORTS, PROTOCOLS = [80, 30080], ["tcp", "udp"]

backends = some.lists(some.integers(1, 4), unique=True, max_size=3)


@some.composite
def services(draw: some.DrawFn) -> Service:
    """Draw a few services of one family and protocol."""
    number = draw(some.integers(1, 3))
    protocol = draw(some.sampled_from(PROTOCOLS))
    version = draw(some.sampled_from([4, 6]))
    addresses = [ip_address(a) for a in OURS + ANY if ip_address(a).version == version]
    keys = some.tuples(some.sampled_from(addresses), some.sampled_from(PORTS))
    found = draw(some.dictionaries(keys, some.tuples(some.booleans(), some.booleans()), max_size=4))
    frontends = {(a, port, protocol): kind for (a, port), kind in found.items()}
    host = "10.1.{}.{}:8080" if version == 4 else "[fd00:{}::{}]:8080"
    cluster, local, leaving = (
        [host.format(number, n) for n in draw(backends)] for _ in ("cluster", "local", "leaving")
    )
    ordered = [b for b in cluster if b not in local] + [b for b in cluster if b in local]
    both = [b for b in ordered if b in local]
    return Service(
        number, frontends, tuple(ordered), tuple(both + [b for b in local if b not in both]),
        tuple(b for b in leaving if b not in cluster + local), draw(some.sampled_from([0, 0, 5])),
    )  # fmt: skip


def asks(protocol: str, netns: int) -> some.SearchStrategy[Request]:
    return some.builds(
        Request,
        some.integers(0, 2),
        some.just(netns),
        some.just(protocol),
        some.sampled_from(DESTINATIONS).map(ip_address),
        some.sampled_from(PORTS),
    )


Step = Service | Request | int

steps = some.one_of(
    services(),
    *(asks(protocol, netns) for protocol in PROTOCOLS for netns in (HOST, POD)),
    some.integers(1, 4),
)


def text(key: tuple[Address, int, str]) -> str:
    address, port, protocol = key
    return (
        f"[{address}]:{port}/{protocol}" if address.version == 6 else f"{address}:{port}/{protocol}"
    )


def publish(node: NativeNode, cluster: Cluster, service: Service) -> None:
    """Publish to both the hooks and the model. If two services want a frontend, the later service
    gets it.
    """
    former = cluster.services.pop(service.number, None)
    for other in cluster.services.values():
        for key in service.frontends.keys() & other.frontends.keys():
            del other.frontends[key]
    for key in former.frontends.keys() - service.frontends.keys() if former else ():
        node.kernel.drop("services", frontend(text(key)))
    words = {
        text(key): " ".join(["external"] * external + ["local"] * is_local)
        for key, (external, is_local) in service.frontends.items()
    }
    lists = {"cluster": service.cluster, "local": service.local, "leaving": service.leaving}
    node.publish(service.number, words, **lists, affinity=service.affinity)
    cluster.services[service.number] = service


def outcome(node: NativeNode, socket: Socket, request: Request) -> str:
    """Return the hook's result for a request, in the model's words."""
    before = Counter(node.counted())
    asked = text((request.address, request.port, request.protocol)).partition("/")[0]
    answer = socket.connect(asked)
    [(verdict, count)] = (Counter(node.counted()) - before).items()
    assert count == 1
    if verdict == "translated":
        address, port = place(answer.place)
        return text((plain(address), port, "")).removesuffix("/")
    if verdict == model.NO_LOCAL_ENDPOINT and request.netns == HOST:
        assert not answer.allowed or place(answer.place)[1] == 0, "no device would drop it"
    elif verdict != model.REFUSED:
        assert place(answer.place) == (request.address, request.port)
    return verdict


@settings(max_examples=scaled(400))
@given(script=some.lists(steps, max_size=30), dice=some.randoms(use_true_random=False))
def test_hooks_and_model_decide_alike(
    new_node: Callable[[], NativeNode], script: list[Step], dice: Random
) -> None:
    """Each request has the same outcome in both, step by step."""
    node = new_node()
    node.owns(*NODE)
    cluster = Cluster(frozenset(map(ip_address, NODE)))
    sockets: dict[tuple[int, int, str], Socket] = {}
    for step in script:
        if isinstance(step, Service):
            publish(node, cluster, step)
        elif isinstance(step, int):
            node.kernel.now += step * SECOND
        else:
            new = node.socket(step.protocol, netns=step.netns)
            socket = sockets.setdefault((step.socket, step.netns, step.protocol), new)
            number = dice.getrandbits(32)
            node.kernel.dice = partial(int, number)
            asked = step._replace(socket=socket.cookie)
            expected = cluster.decide(asked, node.kernel.now // SECOND, number)
            assert outcome(node, socket, step) == expected
