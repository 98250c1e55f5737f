# SPDX-License-Identifier: Apache-2.0
"""The first events of an agent: two Services with three endpoints; and a kernel whose maps are
full.
"""

import errno

from ebpflb.errors import KernelError
from ebpflb.model.events import Kind
from tests.agent.fakes import listed, service, slices

SERVICES = listed(Kind.SERVICE, service("a", "10.96.0.1"), service("b", "10.96.0.2"))
SLICES = listed(Kind.ENDPOINT_SLICE, slices("a", "10.1.0.1", "10.1.0.2"), slices("b", "10.1.0.3"))
NODES = listed(Kind.NODE)
EVERYTHING = (SERVICES, SLICES, NODES)
FULL = KernelError("map update", errno.E2BIG, "Argument list too long")
