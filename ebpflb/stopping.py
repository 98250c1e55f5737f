# SPDX-License-Identifier: Apache-2.0
"""The steps of an end: each is taken, whatever those before it did."""

import logging
from collections.abc import Callable

from ebpflb.errors import EbpflbError, in_words

log = logging.getLogger(__name__)


def run_all(*steps: Callable[[], object], failed: str = "stopping") -> None:
    """In this order. What one of them raises is logged, as ``failed`` and the reason."""
    for step in steps:
        try:
            step()
        except (EbpflbError, OSError) as error:
            log.error("%s: %s", failed, in_words(error))
        except Exception:
            log.exception("%s: unexpected", failed)
