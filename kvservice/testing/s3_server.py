"""A real S3 API on this machine: moto's server as a process of its own, with one bucket.

    with S3Server() as s3:
        os.environ.update(s3.environment())
        tier = ObjectTier(s3.url)

It keeps objects in its memory and is slow: right for tests and demonstrations, not for figures about stores. Needs the
package moto with flask. Everything here blocks.
"""

from __future__ import annotations

import http.client
import subprocess
import sys
from types import TracebackType

from kvservice.testing.cluster import START_SECONDS, free_port
from kvservice.testing.eventually import eventually

BUCKET = "kvservice-blocks"
END_SECONDS = 5.0  # for the server to end by itself; then it is killed


class S3Server:
    """One server with the bucket BUCKET. Ended by `close`, or by leaving its block."""

    def __init__(self) -> None:
        """Starts the server and waits until its bucket is there. Raises NotInTime, or AssertionError if it dies."""
        self.port = free_port()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            eventually(self._makes_bucket, "the S3 server answers", START_SECONDS)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> S3Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """For the setting objects_url."""
        return f"s3://{BUCKET}/pool"

    def environment(self, address: str = "") -> dict[str, str]:
        """What a process needs to use this server, or the server at `address` in front of it."""
        return {
            "AWS_ENDPOINT_URL": f"http://{address or self.address}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "kvservice",
            "AWS_SECRET_ACCESS_KEY": "not-a-secret",
        }

    def check_credentials(self, checks: bool) -> None:
        """Whether requests with unknown credentials are refused from now on. They are not at first."""
        count = b"0" if checks else b"1e18"
        assert self.request("POST", "/moto-api/reset-auth", count) == 200

    def empty(self) -> None:
        """Remove all objects, and what requests left behind."""
        assert self.request("POST", "/moto-api/reset") == 200
        assert self._makes_bucket()

    def request(self, method: str, path: str, body: bytes = b"") -> int:
        """One plain request, without credentials. Returns the status; 0 when the server does not answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30.0)
        try:
            connection.request(method, path, body, {"Content-Type": "text/plain"})
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def close(self) -> None:
        """End the server. Idempotent."""
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _makes_bucket(self) -> bool:
        assert self._process.poll() is None, "the S3 server died at its start: is moto installed, with flask?"
        return self.request("PUT", f"/{BUCKET}") == 200
