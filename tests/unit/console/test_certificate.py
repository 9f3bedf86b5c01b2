"""The console's certificate while its files are replaced, by handshakes in memory."""

from __future__ import annotations

import contextlib
import shutil
import ssl
from pathlib import Path

from kvservice.console.settings import Certificate
from tests.integration import certificates


def shakes_hands(server: ssl.SSLContext) -> bool:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.check_hostname, asking.verify_mode = False, ssl.CERT_NONE
    waiting = [asking.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, True)]
    for _ in range(8):
        for end in list(waiting):
            try:
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
                    waiting.remove(end)
            except ssl.SSLError:
                return False
    return not waiting


def test_a_pair_that_does_not_fit_leaves_the_one_that_serves(tmp_path: Path) -> None:
    """As while the two files are replaced, one after the other, or for ever when the wrong key was copied."""
    served, other = certificates.write(tmp_path / "a"), certificates.write(tmp_path / "b")
    certificate = Certificate(served / "tls.crt", served / "tls.key")
    assert shakes_hands(certificate.context)
    shutil.copy(other / "tls.crt", served / "tls.crt")
    assert not certificate.renew() and shakes_hands(certificate.context)
    shutil.copy(other / "tls.key", served / "tls.key")
    assert certificate.renew() and shakes_hands(certificate.context)
