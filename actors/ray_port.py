"""Asks whether a Ray cluster answers at an address, before Ray joins it. Ray would go on trying for minutes, deaf to
Ctrl-C, and its errors do not say that TLS is the reason. Blocks, on the calling thread."""

from __future__ import annotations

import os
import socket
import ssl
from pathlib import Path

import grpc

from kvservice.actors.ray_auth import TLS_FILES, USE_TLS
from kvservice.errors import ConfigError
from kvservice.units import bracketed

ANSWER_SECONDS = 10.0  # for a cluster to answer. It takes milliseconds, and seconds on a machine that is overloaded.
# A Ctrl-C that comes just before a wait begins is noticed when the wait ends.
INTERRUPT_SECONDS = 0.2
METHOD = "/kvservice.Are/YouThere"
CONNECT_SECONDS = 3.0  # for a TCP connection, and for the beginning of TLS


def check_answers(host: str, port: int) -> None:
    """Raises ConfigError, and says what to do, if what listens there does not answer as Ray does, with the TLS that is
    set for this process."""
    address = f"{bracketed(host)}:{port}"
    with_tls = os.environ.get(USE_TLS, "").lower() in ("1", "true")
    if missing := [name for name in TLS_FILES if with_tls and not os.environ.get(name)]:
        raise ConfigError(f"{USE_TLS}=1 needs {', '.join(missing)} too: name the files of the Ray cluster's nodes")
    try:
        channel = _channel(address, with_tls=with_tls)
    except OSError as error:
        raise ConfigError(f"cannot read the certificate for Ray, {error.filename}: {error.strerror}") from error
    with channel:
        if _answers(channel):
            return
    if with_tls:
        raise ConfigError(
            f"what listens at {address} does not answer with the certificates that {USE_TLS}=1 asks for: name the CA "
            f"of that Ray cluster with RAY_TLS_CA_CERT, or set {USE_TLS}=0 if it has no TLS"
        )
    if _speaks_tls(host, port):
        names = ", ".join(TLS_FILES)
        raise ConfigError(f"the Ray cluster at {address} asks for TLS: set {USE_TLS}=1 and {names} as on its nodes")
    raise ConfigError(
        f"what listens at {address} does not answer as a Ray cluster: name another address, or end it (`ray stop`, if "
        "it is a Ray that hangs)"
    )


def _answers(channel: grpc.Channel) -> bool:
    """Whether a call comes back. Ray does not know the method, and says so."""
    call = channel.unary_unary(METHOD, None, None).future(b"", timeout=ANSWER_SECONDS, wait_for_ready=True)
    while True:
        try:
            call.result(INTERRUPT_SECONDS)
        except grpc.FutureTimeoutError:
            continue
        except grpc.RpcError as error:
            return error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
        return True


def _channel(address: str, *, with_tls: bool) -> grpc.Channel:
    """Raises OSError for a file of a certificate that cannot be read."""
    options = (("grpc.enable_http_proxy", 0),)  # Ray asks no proxy
    if not with_tls:
        return grpc.insecure_channel(address, options)
    certificate, key, authority = (Path(os.environ[name]).read_bytes() for name in TLS_FILES)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(authority, key, certificate), options)


def _speaks_tls(host: str, port: int) -> bool:
    """Whether TLS begins here, with whatever certificate. A server that wants ours says so in an alert."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((host, port), CONNECT_SECONDS) as plain, context.wrap_socket(plain):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except OSError:
        return False
