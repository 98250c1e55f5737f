# SPDX-License-Identifier: Apache-2.0
"""Quantiles of a Prometheus histogram, as ClusterLoader2 reads them of kube-proxy's.

Its rule is histogram_quantile(0.99, sum(rate(NAME_bucket[5m])) by (le)), also for 0.90 and 0.50.
"""

import math
from collections import defaultdict
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

PROGRAMMING = "kubeproxy_network_programming_duration_seconds"


def samples(exposition: str, name: str) -> dict[str, float]:
    """Return ``count``, ``sum`` and each bucket by its ``le``, summed over the other labels."""
    found: dict[str, float] = defaultdict(float)
    for metric in text_string_to_metric_families(exposition):
        for sample in metric.samples if metric.name == name else ():
            kind = sample.name.removeprefix(f"{name}_")
            found[sample.labels["le"] if kind == "bucket" else kind] += sample.value
    return found


def quantile(share: float, of: Mapping[str, float]) -> float:
    """What histogram_quantile() answers for such samples, or for their increase; nan without any.

    It takes a bucket's observations to lie evenly between its bounds, the first one's from 0 on.
    """
    bounds = sorted((float(le), count) for le, count in of.items() if le not in ("count", "sum"))
    total, low, below = bounds[-1][1], 0.0, 0.0
    for bound, count in bounds if total else ():
        if count >= share * total:
            inside = (share * total - below) / (count - below)
            return low + (bound - low) * inside if bound < math.inf else low
        low, below = bound, count
    return math.nan
