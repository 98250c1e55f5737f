# SPDX-License-Identifier: Apache-2.0
"""The agent's log on stderr, as text or JSON, and the signals that change it."""

import json
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from ebpflb import redaction
from ebpflb.errors import EbpflbError, in_words, plain
from ebpflb.serve.servers import stacks

log = logging.getLogger(__name__)

DEBUG_VERBOSITY = 4  # from this verbosity on, details are logged
_LIBRARIES = ("urllib3", "kubernetes", "pyroute2")  # their details are of no use to an operator
_SIGNALS = {signal.SIGUSR1, signal.SIGUSR2}


class TextFormatter(redaction.Formatter):
    """Writes times as every command does: RFC 3339 with the offset of the local zone."""

    def formatTime(self, record: logging.LogRecord, _: str | None = None) -> str:
        return (
            datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
        )


class JsonFormatter(logging.Formatter):
    """Writes a line of JSON for each record, with the keys of Kubernetes' JSON logs and a level.

    ``ts`` is in milliseconds since the epoch, as in Kubernetes; ``err`` is the traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": round(record.created * 1000, 3),
            "level": record.levelname.lower(),
            "caller": f"{record.filename}:{record.lineno}",
            "msg": redaction.redact(record.getMessage()),
            "v": DEBUG_VERBOSITY if record.levelno < logging.INFO else 0,
        }
        if record.exc_info:
            line["err"] = redaction.redact(self.formatException(record.exc_info))
        return json.dumps(line)


_FORMATTERS = {
    "text": TextFormatter("%(asctime)s %(levelname).1s %(message)s"),
    "json": JsonFormatter(),
}


def set_up(format: str | None) -> None:
    """Log to stderr in this format.

    If the format is unknown, log text until the configuration is read.
    """
    handler = logging.StreamHandler()
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for verbose in _LIBRARIES:
        logging.getLogger(verbose).setLevel(logging.WARNING)
    logging.getLogger().addFilter(name_api_credentials)
    set_format(format if format in _FORMATTERS else "text")


def set_format(format: str) -> None:
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_FORMATTERS[format])


def set_verbosity(verbosity: int) -> None:
    is_debug = verbosity >= DEBUG_VERBOSITY
    logging.getLogger().setLevel(logging.DEBUG if is_debug else logging.INFO)


@contextmanager
def last_error(format: str) -> Iterator[None]:
    """Log the error that ends the agent, if the log is JSON; ``main`` prints it for a text log."""
    try:
        yield
    except Exception as error:
        if format != "json":
            raise
        log.critical("%s", in_words(error), exc_info=not isinstance(error, EbpflbError))
        sys.exit(1)


def name_api_credentials(record: logging.LogRecord) -> bool:
    """Begin each message with "API credentials". Used as a filter of the root logger.

    Only the Kubernetes client logs there: it reports why a credential plugin failed, in Python's
    words.
    """
    record.msg, record.args = f"API credentials: {plain(record.getMessage())}", None
    return True


def act_on_signals() -> None:
    """From now on SIGUSR1 logs all stacks, and SIGUSR2 turns details on or off.

    A separate thread waits for these signals, so that they work while the loop hangs in a system
    call. Start no thread before this call: it would not block these signals, which would end the
    process.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    threading.Thread(target=_wait_for_signals, name="signals", daemon=True).start()


def _wait_for_signals() -> None:
    while True:
        if signal.sigwait(_SIGNALS) == signal.SIGUSR1:
            for stack in stacks():
                log.warning("SIGUSR1: thread %s", stack)
            continue
        is_debug = logging.getLogger().level <= logging.DEBUG
        set_verbosity(0 if is_debug else DEBUG_VERBOSITY)
        log.warning("SIGUSR2: details are %s", "no longer logged" if is_debug else "logged now")
