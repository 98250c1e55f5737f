# SPDX-License-Identifier: Apache-2.0
"""The source of the cluster's objects: a directory of manifests, or the API server."""

from pathlib import Path
from typing import Any

from ebpflb.cluster.source import Emit, Source


def make_source(emit: Emit, *, node_name: str, manifests: Path | None, **api: Any) -> Source:
    """Return the source of the cluster's objects, not yet started.

    ``api``: the arguments of ApiSource, for which ``manifests`` is None. Only the source that is
    chosen is imported.
    """
    if manifests is not None:
        from ebpflb.cluster.manifest_source import ManifestSource

        return ManifestSource(emit, directory=manifests, node_name=node_name)
    from ebpflb.cluster.api_source import ApiSource

    return ApiSource(emit, node_name=node_name, **api)
