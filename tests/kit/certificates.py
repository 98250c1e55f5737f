# SPDX-License-Identifier: Apache-2.0
"""Certificates for servers of tests, made by openssl(1)."""

import subprocess
from pathlib import Path


def self_signed(folder: Path, *names: str) -> Path:
    """Make a key and a certificate for these names, such as IP:192.0.2.1, in one file."""
    made, certificate = folder / "server.pem", folder / "certificate.pem"
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1"
    more = ["-subj", "/CN=it", "-addext", f"subjectAltName={','.join(names)}"]
    files = ["-keyout", str(made), "-out", str(certificate)]
    subprocess.run([*words.split(), *more, *files], check=True, capture_output=True)
    made.write_bytes(made.read_bytes() + certificate.read_bytes())
    return made
