# SPDX-License-Identifier: Apache-2.0
"""How a new connection gets its endpoint: by a Service's annotation, else by --scheduler.

kube-proxy has a choice only in mode ipvs, and there one for the whole node: ``BY_IPVS`` maps the
names of the kernel's schedulers to ours, "" being its default, rr.
"""

from ebpflb.model import objects
from ebpflb.model.annotations import annotation_field

SCHEDULER_ANNOTATION = objects.SCHEDULER
SCHEDULERS = (RANDOM, ROUND_ROBIN, LEAST_CONNECTIONS, MAGLEV, SOURCE_HASH) = (
    "random",
    "round-robin",
    "least-connections",
    "maglev",
    "source-hash",
)
HASHING = frozenset({MAGLEV, SOURCE_HASH})
BY_IPVS = {
    "": ROUND_ROBIN,
    "rr": ROUND_ROBIN,
    "wrr": ROUND_ROBIN,
    **dict.fromkeys(("lc", "wlc", "sed", "nq"), LEAST_CONNECTIONS),
    "sh": SOURCE_HASH,
    "mh": SOURCE_HASH,
}


def of(service: objects.Service, default: str, warnings: list[str]) -> str:
    """One of SCHEDULERS. A name that is none is a warning, and the default counts."""
    name = service.metadata.annotation(SCHEDULER_ANNOTATION)
    if name is None or name in SCHEDULERS:
        return name or default
    known = ", ".join(SCHEDULERS)
    reason = f'"{name}" is not one of {known}, so it is {default}'
    warnings.append(f"{annotation_field(SCHEDULER_ANNOTATION)}: {reason}")
    return default
