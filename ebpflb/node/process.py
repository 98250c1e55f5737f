# SPDX-License-Identifier: Apache-2.0
"""What the kernel is to think of our own process."""

import logging
import resource
from pathlib import Path

log = logging.getLogger(__name__)

OOM_SCORE_ADJ = Path("/proc/self/oom_score_adj")


def adjust_oom_score(value: int, path: Path = OOM_SCORE_ADJ) -> None:
    """How gladly we are ended when memory is short: from -1000, never, to 1000. Where the kernel
    does not let us (less needs CAP_SYS_RESOURCE), that is said and no more: so does kube-proxy.
    """
    try:
        if int(path.read_text()) != value:
            path.write_text(f"{value}\n")
    except OSError as error:
        log.info("oom_score_adj: not set to %d: %s", value, error.strerror)


def raise_file_limit() -> None:
    """As many open files as we may have, as programs in Go do: each health-check NodePort is a
    socket of each family, and systemd and containerd begin with 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.info("RLIMIT_NOFILE: left at %d: %s", soft, error)
