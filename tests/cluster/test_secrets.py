# SPDX-License-Identifier: Apache-2.0
"""No token, key or password is in a log, a status or an error, and none is left on a disk."""

import base64
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebpflb import redaction
from ebpflb.cluster.api import Server
from ebpflb.cluster.list_watch import ApiSource
from ebpflb.cluster.source import RetryLoop, ServerOptions
from ebpflb.errors import ClusterError
from ebpflb.model.events import Kind, PartStatus
from ebpflb.options import Paths
from ebpflb.serve import status
from tests.cluster.event_log import QUICK, Begin, EventLog
from tests.kit.api_server import FakeApiServer
from tests.kit.certificates import self_signed
from tests.kit.failing import Failing

TOKEN = "eyJhbGciOiJSUzI1NiJ9.c2VjcmV0.dG9rZW4"
PASSWORD = "correct horse"


@pytest.fixture
def api() -> Iterator[FakeApiServer]:
    with FakeApiServer(token=TOKEN) as server:
        yield server


@pytest.fixture(autouse=True)
def said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """Return everything that is logged, even by libraries, as the agent's handler formats it."""
    monkeypatch.setattr(redaction, "known_secrets", {})
    caplog.set_level(logging.DEBUG)
    caplog.handler.setFormatter(redaction.Formatter("%(message)s"))
    yield caplog
    for secret in (TOKEN, PASSWORD):
        assert secret not in caplog.text


def change(kubeconfig: Path, kind: str, values: dict[str, Any]) -> Path:
    """Change a kubeconfig: replace its user, or add to its cluster."""
    content = json.loads(kubeconfig.read_text())
    section = content[f"{kind}s"][0]
    section[kind] = values if kind == "user" else section[kind] | values
    kubeconfig.write_text(json.dumps(content))
    return kubeconfig


@pytest.mark.parametrize("end", ["\n", "\r\n", " \n\n", ""])
@pytest.mark.parametrize("how", ["token", "tokenFile"])
def test_a_token_is_trimmed(api: FakeApiServer, tmp_path: Path, how: str, end: str) -> None:
    """An editor, or `echo`, ends a file with a line break; a header cannot have one."""
    (tmp_path / "token").write_text(f"{TOKEN}{end}")
    user = {"token": f"{TOKEN}{end}"} if how == "token" else {"tokenFile": "token"}
    kubeconfig = change(api.kubeconfig(tmp_path), "user", user)
    assert list(Server(ServerOptions(kubeconfig), QUICK).page(Kind.SERVICE, {}))


def error_of(kubeconfig: Path) -> str:
    """Return why a server cannot be reached, including the underlying errors."""
    with pytest.raises(ClusterError) as failed:
        list(Server(ServerOptions(kubeconfig), QUICK).page(Kind.SERVICE, {}))
    at: BaseException | None = failed.value
    while at is not None:
        for secret in (TOKEN, PASSWORD):
            assert secret not in repr(at)
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return str(failed.value)


@pytest.mark.parametrize("between", ["\n", "\0", "é", "\r\nX-Evil: 1"])
def test_an_unusable_token_is_not_quoted(api: FakeApiServer, tmp_path: Path, between: str) -> None:
    """No error quotes an unusable token, though http.client's own error would."""
    user = {"token": f"{TOKEN}{between}{TOKEN}"}
    reason = error_of(change(api.kubeconfig(tmp_path), "user", user))
    assert "the token has characters that cannot be sent" in reason


def plugin(folder: Path, script: str) -> dict[str, Any]:
    (program := folder / "plugin").write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    version = "client.authentication.k8s.io/v1"
    return {"exec": {"command": str(program), "apiVersion": version}}


@pytest.mark.parametrize(
    "script",
    [
        f"echo '{TOKEN}' >&2; echo '{PASSWORD}'; exit 3",
        f"echo 'not json {TOKEN}'",
        f'echo \'{{"apiVersion": "{TOKEN}", "kind": "x", "status": {{}}}}\'',
        f'echo \'{{"status": "{TOKEN}"}}\'',
        f"printf '\\377{TOKEN}'",
    ],
)
def test_a_credential_plugins_output_is_not_said(
    api: FakeApiServer, tmp_path: Path, script: str
) -> None:
    """Only the plugin's name and exit status are reported, neither its stdout nor its stderr."""
    reason = error_of(change(api.kubeconfig(tmp_path), "user", plugin(tmp_path, script)))
    assert f"credential plugin {tmp_path / 'plugin'}" in reason
    assert "\n" not in reason
    if "exit 3" in script:
        assert "exit status 3" in reason


def test_a_credential_plugin_that_fails_is_asked_again(
    api: FakeApiServer, events: EventLog, tmp_path: Path, begin: Begin
) -> None:
    """At the start, and when its token has expired, the source reports why the plugin failed, and
    waits.
    """
    answer = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}
    token, is_up = tmp_path / "token.json", tmp_path / "up"
    token.write_text(json.dumps(answer | {"status": {"token": api.token}}))
    user = plugin(tmp_path, f"[ -e {is_up} ] && cat {token}")
    kubeconfig = change(api.kubeconfig(tmp_path), "user", user)
    begin(
        ApiSource(
            events, node_name="node-1", server_options=ServerOptions(kubeconfig), timing=QUICK
        )
    )
    failure = f"credential plugin {tmp_path / 'plugin'}: exit status 1: run it by hand to see why"
    for number in (1, 2):
        while events.source_status().error != failure:
            pass
        is_up.touch()
        for kind in Kind:
            api.wait_for_watch(kind, number)
        is_up.unlink()
        api.token = f"token {number}"
        token.write_text(json.dumps(answer | {"status": {"token": api.token}}))
        api.drop()
        events.all()
    is_up.touch()


def test_an_empty_token_file_is_none(api: FakeApiServer, tmp_path: Path) -> None:
    """An empty token file is ignored, and the token is used."""
    user = {"token": api.token, "tokenFile": ""}
    kubeconfig = change(api.kubeconfig(tmp_path), "user", user)
    assert list(Server(ServerOptions(kubeconfig), QUICK).page(Kind.SERVICE, {}))


def test_what_a_server_repeats_is_not_said(
    api: FakeApiServer, tmp_path: Path, events: EventLog, begin: Begin
) -> None:
    """No message repeats a secret that a hostile API server, or a proxy in between, sends back."""
    body = json.dumps({"message": f"no rights for Bearer {TOKEN}"}).encode()
    api.fail("Service", 403, body, times=1000)
    kubeconfig = api.kubeconfig(tmp_path)
    begin(
        ApiSource(
            events, node_name="node-1", server_options=ServerOptions(kubeconfig), timing=QUICK
        )
    )
    assert events.source_status().error == "403 no rights for Bearer ***"


@pytest.mark.parametrize(
    "line", [f'token: "{TOKEN}', f"token: *{TOKEN}", f"token: [{TOKEN}", f"{TOKEN}\n{TOKEN}: a: b"]
)
def test_a_kubeconfig_that_cannot_be_parsed_is_not_quoted(tmp_path: Path, line: str) -> None:
    """A kubeconfig that cannot be parsed is named, not quoted."""
    (path := tmp_path / "kubeconfig").write_text(f"apiVersion: v1\nusers:\n- name: a\n  {line}\n")
    assert str(path) in error_of(path)


@pytest.mark.parametrize("where", ["proxy-url", "HTTP_PROXY", "server"])
@pytest.mark.parametrize("url", ["http://me:{}@127.0.0.1:9", "http://me:{}@[", "me:{}@x://y"])
def test_passwords_of_urls_are_not_said(
    api: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, url: str
) -> None:
    """No message contains the password of a server's or proxy's URL, even of an invalid one."""
    url = url.format(PASSWORD.replace(" ", "-"))
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    kubeconfig = api.kubeconfig(tmp_path)
    if where == "HTTP_PROXY":
        monkeypatch.setenv(where.lower(), url)
    else:
        change(kubeconfig, "cluster", {where: url})
    with pytest.raises(ClusterError) as failed:
        list(Server(ServerOptions(kubeconfig), QUICK).page(Kind.SERVICE, {}))
    assert PASSWORD.replace(" ", "-") not in repr(failed.value)


def test_an_unexpected_error_does_not_quote_what_it_was_about(
    events: EventLog, failing: Failing, said: pytest.LogCaptureFixture
) -> None:
    """Errors whose repr has the whole text, such as a codec's, are not quoted."""
    redaction.remember(TOKEN)

    def fail() -> None:
        raise ValueError(f"Invalid header value b'Bearer {TOKEN}\\n'")

    RetryLoop("it", events, QUICK, threading.Event()).run_once(fail)
    assert failing.told == [PartStatus("it", "ValueError: Invalid header value b'Bearer ***\\n'")]
    assert "Traceback" in said.text
    said.clear()


def test_the_status_file_has_no_secret(tmp_path: Path) -> None:
    """The status file has no secret of any origin, and only its owner may read it."""
    redaction.remember(f'"{TOKEN}"')
    paths = Paths(Path("/s"), tmp_path)
    shown = status.initial(node="n", source="s").changed(sync_error=f'a "{TOKEN}" b')
    status.StatusFile(paths).write(shown)
    assert TOKEN not in paths.status_file.read_text()
    assert status.read(paths) == shown.changed(sync_error="a *** b")
    assert paths.status_file.stat().st_mode & 0o777 == 0o600


def test_no_traceback_has_a_secret() -> None:
    """No traceback has a secret, even after an uncaught error in any thread."""
    program = (
        "import sys, threading; from ebpflb import redaction;"
        "redaction.guard_tracebacks(); redaction.remember(sys.argv[1]);"
        "fail = lambda: {}[sys.argv[1]];"
        "thread = threading.Thread(target=fail); thread.start(); thread.join(); fail()"
    )
    command = [sys.executable, "-c", program, TOKEN]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr.count("KeyError: '***'") == 2
    assert TOKEN not in done.stderr


KEY_USER = """
import sys, time
from pathlib import Path
from ebpflb.cluster.api import Server
from ebpflb.cluster.source import ServerOptions, Timing
server = Server(ServerOptions(Path(sys.argv[1])), Timing())
print(server._access._configuration.key_file, flush=True)
time.sleep(600)
"""


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def test_a_kill_leaves_no_key(tmp_path: Path) -> None:
    """A key in the kubeconfig's text is never written to a file system."""
    (temporary := tmp_path / "tmp").mkdir()
    both = self_signed(tmp_path, "IP:127.0.0.1").read_bytes()
    key, begin, made = both.partition(b"-----BEGIN CERTIFICATE")
    with FakeApiServer(token=TOKEN) as api:
        kubeconfig = api.kubeconfig(tmp_path)
    user = {"client-key-data": encoded(key), "client-certificate-data": encoded(begin + made)}
    change(kubeconfig, "user", user)
    change(kubeconfig, "cluster", {"server": "https://127.0.0.1:9"})
    command = [sys.executable, "-c", KEY_USER, str(kubeconfig)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout
        file = process.stdout.readline().strip()
        seen = Path(f"/proc/{process.pid}/fd") / Path(file).name
        assert seen.read_bytes() == key
        assert os.readlink(seen).startswith("/memfd:")
        process.send_signal(signal.SIGKILL)
    assert list(temporary.iterdir()) == []
    assert tempfile.gettempdir() != str(temporary)


def test_an_inline_ca_that_is_renewed_is_used(
    tmp_path: Path, events: EventLog, begin: Begin
) -> None:
    """The kubeconfig is read again when the server's certificate does not match, as for a token."""
    port, certificates = 0, []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        pem = self_signed(tmp_path / name, "IP:127.0.0.1")
        certificates.append((pem, encoded((tmp_path / name / "certificate.pem").read_bytes())))
    (first, first_ca), (second, second_ca) = certificates
    with FakeApiServer(token=TOKEN, certificate=first) as api:
        port = int(api.url.rpartition(":")[2])
        kubeconfig = api.kubeconfig(tmp_path)
        content = json.loads(kubeconfig.read_text())
        content["clusters"][0]["cluster"] = {
            "server": api.url,
            "certificate-authority-data": first_ca,
        }
        kubeconfig.write_text(json.dumps(content))
        source = begin(
            ApiSource(
                events, node_name="node-1", server_options=ServerOptions(kubeconfig), timing=QUICK
            )
        )
        events.next(Kind.SERVICE)
        api.wait_for_watch("Service")
    with FakeApiServer(token=TOKEN, certificate=second, port=port) as api:
        while "certificate verify failed" not in str(events.source_status().error):
            pass
        kubeconfig.write_text(kubeconfig.read_text().replace(first_ca, second_ca))
        while events.source_status().error is not None:
            pass
        source.stop()
