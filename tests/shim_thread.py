"""The real OpenAI shim under uvicorn, in a thread of the test process."""

import threading
import time
from typing import Any

import httpx
from openai_document import CheckedApp

from shoal.client.openai.server import DrainingServer, listen, make_server
from shoal.client.openai.settings import ShimSettings

START_TIMEOUT_S = 20.0


class ShimThread:
    """Starts the shim on a free port and stops it at the end of the ``with``. What it answers is
    checked against OpenAI's document (``openai_document``)."""

    def __init__(self, triton_grpc: str, **settings: Any) -> None:
        self._settings = ShimSettings(
            triton_grpc=triton_grpc, port=0, **{"discovery_interval_s": 0.1, **settings}
        )
        self._listener = listen(self._settings)
        self.port = self._listener.getsockname()[1]
        self.server: DrainingServer = make_server(self._settings)
        self.app: Any = self.server.config.app
        self.server.config.app = CheckedApp(self.app)
        self._thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [self._listener]}, daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "ShimThread":
        self._thread.start()
        wait_until(lambda: self.server.started, "the shim did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()

    def wait_ready(self) -> None:
        wait_until(lambda: self.readiness() == 200, "the shim did not become ready")

    def readiness(self) -> int:
        return httpx.get(f"{self.url}/health/ready").status_code


def wait_until(condition: Any, what: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """Poll until true; fails the test when that takes too long."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
