"""Certificates of our own, and the options that make a redis-server speak TLS with them. Must not enter: what is tested."""

from __future__ import annotations

import subprocess
from pathlib import Path

from server import Server, free_port


class Certificates:
    """In one folder: ca.crt, and server, client signed by it; stranger.crt is another authority's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run("req", "-x509", *self.new_key("ca"), "-subj", "/CN=tidegate test authority", "-days", "2", "-out", "ca.crt")
        self.run("req", "-x509", *self.new_key("stranger"), "-subj", "/CN=another authority", "-days", "2",
                 "-out", "stranger.crt")  # fmt: skip
        self.sign("server", "IP:127.0.0.1,DNS:localhost,DNS:redis.test")
        self.sign("client", "DNS:client.test")

    def run(self, *words: str) -> None:
        subprocess.run(["openssl", *words], cwd=self.folder, check=True, capture_output=True)

    def new_key(self, name: str) -> list[str]:
        return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key"]

    def sign(self, name: str, names: str) -> None:
        self.run("req", *self.new_key(name), "-subj", f"/CN={name}", "-out", f"{name}.csr")
        (self.folder / f"{name}.ext").write_text(f"subjectAltName={names}\n")
        self.run("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
                 "-extfile", f"{name}.ext", "-out", f"{name}.crt")  # fmt: skip

    def path(self, name: str) -> Path:
        return self.folder / name

    def options(self, *, clients: str = "no") -> list[str]:
        return [
            "--tls-cert-file", str(self.path("server.crt")), "--tls-key-file", str(self.path("server.key")),
            "--tls-ca-cert-file", str(self.path("ca.crt")), "--tls-auth-clients", clients,
        ]  # fmt: skip

    @property
    def client_options(self) -> str:
        return f"cert={self.path('client.crt')}&key={self.path('client.key')}"


def tls_server(certificates: Certificates, *, clients: str = "no") -> tuple[Server, int]:
    """Besides its socket it speaks only TLS, on the port that is returned."""
    port = free_port()
    return Server("--tls-port", str(port), *certificates.options(clients=clients)), port
