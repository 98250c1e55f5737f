# SPDX-License-Identifier: Apache-2.0
"""Known secrets are removed from every log line, status and traceback.

Credentials are validated before use, so that no library quotes them in an error. This module is for
other cases, such as a server that repeats a token in its answer.
"""

import json
import logging
import re
import sys
import threading
import traceback
from types import TracebackType
from urllib.parse import quote

SHOWN = "***"  # shorter than any secret, so it is never replaced itself
_SHORTEST = 4  # characters: shorter ones would be found in any text
_MOST = 256  # secrets that are remembered; a token is renewed every hour
_USER_INFO = re.compile(r"(?<=//)[^/?#\s]*@|^[^/?#\s]*@")

known_secrets: dict[str, None] = {}
_lock = threading.Lock()


def remember(secret: object) -> None:
    """Hide this text, and its usual encodings, from now on."""
    if not isinstance(secret, str) or len(secret.strip()) < _SHORTEST:
        return
    plain = secret.strip()
    written = (plain, repr(plain)[1:-1], json.dumps(plain)[1:-1], quote(plain, safe=""))
    with _lock:
        for text in written:
            known_secrets.pop(text, None)
            known_secrets[text] = None
        while len(known_secrets) > _MOST:
            del known_secrets[next(iter(known_secrets))]


def without_user(url: str) -> str:
    """Return a URL without "user:password@", which is remembered as a secret."""
    for found in _USER_INFO.findall(url):
        user_info = found.removesuffix("@")
        remember(user_info)
        remember(user_info.partition(":")[2])
    return _USER_INFO.sub("", url)


def redact(text: str) -> str:
    """Return the text with every secret replaced by SHOWN."""
    with _lock:
        known = sorted(known_secrets, key=len, reverse=True)
    for secret in known:
        text = text.replace(secret, SHOWN)
    return text


# Secrets that were not remembered, by their form: for texts of other programs. No form may take
# more than linear time, because a tenant's words are in a log.

_VALUE = r"""\\+"[^"\n]*"|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|[^\s,{}\[\]"']+"""
_FIELD = re.compile(
    r"""(?ix) ((?:token|password|passwd|secret|authorization|api[-_]?key|access[-_]?key
        |client-key|client-key-data|client-certificate-data)
        \\*["']? \s* [:=] \s* (?:[|>]-?\s+)?)"""
    rf"({_VALUE})"
)
_FORMS = (
    (
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*KEY-----|\Z)", re.S),
        SHOWN,
    ),
    (re.compile(r"LS0tLS1CRUdJTi[\w+/=]*"), SHOWN),  # the same in base64
    (re.compile(r"(?<![\w-])eyJ[\w-]+\.[\w-]+\.[\w-]*"), SHOWN),  # a JSON web token
    (re.compile(r"(?i)\b(bearer|basic) +[\w+/=.~-]{4,}"), rf"\1 {SHOWN}"),
    (re.compile(r"(?<=//)[^/?#\s\"']*@"), f"{SHOWN}@"),
    (  # up to the message's own words, or to the line's end if it was shortened
        re.compile(r'(annotations\[[^\]\n]{1,400}\]: )\\*"(?:[^\n]*"(?= (?:is|has)\b)|[^\n]*)'),
        rf"\1{SHOWN}",
    ),
    (_FIELD, rf'\1"{SHOWN}"'),
)


def remember_fields(text: str) -> None:
    """Remember the values of a kubeconfig's secret fields."""
    for _, value in _FIELD.findall(text):
        remember(value.strip("\\\"'"))


def without_secrets(text: str) -> str:
    """Return the text without known secrets, and without text that looks like a secret.

    The values of annotations, which messages quote, are removed too.
    """
    text = redact(text)
    for form, instead in _FORMS:
        text = form.sub(instead, text)
    return text


class Formatter(logging.Formatter):
    """Formats log lines and their tracebacks without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def guard_tracebacks() -> None:
    """Hide secrets in the tracebacks of uncaught errors, in any thread."""
    sys.excepthook = _print
    threading.excepthook = _print_of_thread


def _print(kind: type[BaseException], error: BaseException, trace: TracebackType | None, /) -> None:
    sys.stderr.write(redact("".join(traceback.format_exception(kind, error, trace))))


def _print_of_thread(args: threading.ExceptHookArgs, /) -> None:
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        _print(args.exc_type, args.exc_value, args.exc_traceback)
