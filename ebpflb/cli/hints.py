# SPDX-License-Identifier: Apache-2.0
"""What was probably meant by a wrong use, beyond what click suggests. Only errors import this."""

import re
from difflib import get_close_matches

import click

# What kubectl's users type first.
VERBS = {"get": "services list", "list": "services list", "describe": "services get"}
SHOWS = {"services": "get", "flows": "list", "maps": "dump"}  # what a group has instead of them
# Commands of earlier versions.
REMOVED = {"audit": "`ebpflb doctor` answers what it answered; `status` does without an agent."}
# Commands and options that remove something: a mistyped word never leads to one of them.
REMOVING = {"cleanup", "flush", "--cleanup", "--kube-proxy", "--force", "--all", "--remove"}
_CHOICES = re.compile(r"is not one of .*")
_LONG = 200  # characters of an error, beyond which its list of words is left out
_ALIKE = 0.8  # from 0 to 1


def with_hint(error: click.UsageError) -> click.UsageError:
    """Return the error with what was probably meant; as it is if that is unknown."""
    possible: list[str] = getattr(error, "possibilities", None) or []
    possible[:] = [name for name in possible if name not in REMOVING]
    hint = _hint(error)
    if not hint:
        return error
    text = error.format_message().rstrip(".")
    if len(text) > _LONG:
        text = _CHOICES.sub("is not a known word", text)
    return click.UsageError(f"{text}. {hint}", error.ctx)


def _hint(error: click.UsageError) -> str:
    if isinstance(error, click.exceptions.NoSuchCommand):
        return _command(error)
    if isinstance(error, click.MissingParameter):
        is_service = error.param and "NAMESPACE/NAME" in (error.param.metavar or "")
        return "`ebpflb services list` shows the names." if is_service else ""
    if isinstance(error, click.BadParameter):
        return _choice(error)
    return _extra_argument(error)


def _extra_argument(error: click.UsageError) -> str:
    extra = re.search(r"unexpected extra argument \((.*)\)", error.message)
    options = {each.name for each in error.ctx.command.params} if error.ctx else set()
    if extra and "service" in options:
        return "Name a Service with --service NAMESPACE/NAME."
    is_service = extra and extra[1].count("/") == 1
    return f"`ebpflb services get {extra[1]}` shows a Service." if extra and is_service else ""


def _command(error: click.exceptions.NoSuchCommand) -> str:
    name = error.command_name
    if name in REMOVED:
        return REMOVED[name]
    if not error.ctx or error.possibilities:
        return ""
    if name in VERBS:
        group = error.ctx.command.name
        meant = f"{group} {SHOWS[group]}" if group in SHOWS else VERBS[name]
        return f"Did you mean `ebpflb {meant}`?"
    is_service = error.ctx.command.name == "services"
    return f"`ebpflb services get {name}` shows a Service." if is_service else ""


def _choice(error: click.BadParameter) -> str:
    """Of the words that an option or argument takes: those that begin so, or are like it."""
    given = re.match(r"'(.*)' is not one of ", error.message)
    if not (given and error.param and isinstance(error.param.type, click.Choice)):
        return ""
    names = [*map(str, error.param.type.choices)]
    close = [name for name in names if name.startswith(given[1])]
    close = close or get_close_matches(given[1], names, cutoff=_ALIKE)
    return f"Did you mean {' or '.join(close)}?" if close else ""
