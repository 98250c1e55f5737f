# SPDX-License-Identifier: Apache-2.0
"""A service port for each policy, and the node for which its endpoints are selected."""

import dataclasses

from hypothesis import strategies as some

from ebpflb.model.endpoints import Topology
from tests.model import builders
from tests.model.builders import endpoint

HERE = Topology(node="node-1", zone="z1")

CLUSTER = builders.only_port(builders.service())
INTERNAL_LOCAL = dataclasses.replace(CLUSTER, internal_local=True)
NODE_PORT = dataclasses.replace(CLUSTER, node_port=30080)
EXTERNAL_LOCAL = dataclasses.replace(NODE_PORT, external_local=True)
BOTH_LOCAL = dataclasses.replace(EXTERNAL_LOCAL, internal_local=True)
INTERNAL_LOCAL_NODE_PORT = dataclasses.replace(NODE_PORT, internal_local=True)
EXTERNAL_LOCAL_UNREACHED = dataclasses.replace(CLUSTER, external_local=True)
POLICIES = [
    CLUSTER,
    INTERNAL_LOCAL,
    NODE_PORT,
    EXTERNAL_LOCAL,
    BOTH_LOCAL,
    INTERNAL_LOCAL_NODE_PORT,
    EXTERNAL_LOCAL_UNREACHED,
]
ENDPOINTS = some.lists(
    some.builds(
        endpoint,
        some.sampled_from("abcdef"),
        ready=some.booleans(),
        serving=some.booleans(),
        terminating=some.booleans(),
        local=some.booleans(),
        zones=some.sampled_from(["", "z1", "z2", "z1 z2"]),
        nodes=some.sampled_from(["", "node-1", "node-2"]),
    ),
    unique_by=lambda each: each.name.target,
).map(tuple)
