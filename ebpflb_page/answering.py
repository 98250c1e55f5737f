# SPDX-License-Identifier: Apache-2.0
"""Values as JSON, in which control characters are as_shown, and errors as one sentence."""

import logging
from typing import Any

import msgspec
from starlette.responses import Response

from ebpflb.errors import EbpflbError, NotFound, escaped, in_words, one_line
from ebpflb.redaction import redact

log = logging.getLogger(__name__)


class BadInput(Exception):
    """What is wrong with a request, for the one who made it; ``status`` is HTTP's."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


def as_shown(value: Any) -> Any:
    """The same with every text, also names of fields, as a table of the commands shows it."""
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, dict):
        return {as_shown(key): as_shown(it) for key, it in value.items()}
    if isinstance(value, list):
        return [as_shown(it) for it in value]
    return value


def as_json(value: Any, status: int = 200) -> Response:
    """A response with a value of the commands."""
    body = msgspec.json.encode(as_shown(msgspec.to_builtins(value)))
    return Response(body, status, media_type="application/json")


def as_error(error: BaseException) -> Response:
    """400 for bad input, 404 for an unknown name, 503 for what cannot be read now, 500 for an error
    of ebpflb itself.
    """
    return as_json({"error": sentence(error)}, status_of(error))


def status_of(error: BaseException) -> int:
    if isinstance(error, BadInput):
        return error.status
    if isinstance(error, NotFound):
        return 404
    return 503 if isinstance(error, EbpflbError | OSError) else 500


def sentence(error: BaseException) -> str:
    """For the operator; what is no error of ebpflb's is logged with its traceback."""
    if isinstance(error, BadInput | EbpflbError | OSError):
        return redact(one_line(in_words(error)))
    log.error("an error of ebpflb ui itself", exc_info=error)
    return "internal error, described in ebpflb's log: please report it"
