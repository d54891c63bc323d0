"""Runs the shim under uvicorn, with a drain on SIGTERM."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from shoal.backend.garbage import settle
from shoal.client.errors import draining
from shoal.client.openai.app import create_app
from shoal.client.openai.http_protocol import limited_protocol
from shoal.client.openai.middleware import RequestTracker
from shoal.client.openai.settings import ShimSettings
from shoal.client.openai.tls import check_tls

logger = logging.getLogger("shoal.openai")

DRAIN_POLL_S = 0.05
CUT_OFF_S = 1.0  # for the last words to those who are cut off


class PortTakenError(OSError):
    """The address cannot be listened on; the message names the flag to change."""


class DrainingServer(uvicorn.Server):
    """On the first SIGTERM or SIGINT goes on listening (readiness says no, new requests get 503)
    until the open answers are finished or the time is up; on the second stops at once."""

    def __init__(
        self,
        config: uvicorn.Config,
        tracker: RequestTracker,
        timeout_s: float,
        cut_off: Callable[[], None],
    ) -> None:
        """``cut_off`` ends the answers that are still open when the time is up."""
        super().__init__(config)
        self._cut_off = cut_off
        self._tracker = tracker
        self._drain_timeout_s = timeout_s
        self._drain_task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        settle()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not handed on to uvicorn: it would raise the signal again after a clean exit.
        if self._tracker.draining or self._loop is None:
            self.should_exit = self.force_exit = True
            return
        self._tracker.draining = True
        self._loop.call_soon_threadsafe(self._start_drain, signal.Signals(sig).name)

    def _start_drain(self, signal_name: str) -> None:
        logger.info("%s: draining, %d requests open", signal_name, self._tracker.num_open)
        self._drain_task = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        await self._wait_for_open(self._drain_timeout_s)
        if self._tracker.num_open:
            logger.warning("%d requests cut off by the drain timeout", self._tracker.num_open)
            self._cut_off()
            await self._wait_for_open(CUT_OFF_S)
        self.should_exit = True

    async def _wait_for_open(self, timeout_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._tracker.num_open and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)


def make_server(settings: ShimSettings) -> DrainingServer:
    """A server that is not yet listening."""
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=limited_protocol(settings.max_head_bytes, settings.max_headers),
        ws="none",
        lifespan="on",
        access_log=False,
        server_header=False,
        log_config=None,
        timeout_graceful_shutdown=1,  # the drain came before
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        timeout_keep_alive=65,  # longer than that of usual proxies, so that they close first
    )
    shim = app.state.shim
    return DrainingServer(
        config,
        shim.tracker,
        settings.drain_timeout_s,
        lambda: shim.served.fail_streams(draining()),
    )


def listen(settings: ShimSettings) -> socket.socket:
    """Bind the listening socket. Raises PortTakenError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server(
            (settings.host, settings.port),
            family=family,
            backlog=2048,
            # The kernel then gives each connection to one of the processes, by its address.
            reuse_port=settings.num_workers > 1,
        )
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        raise PortTakenError(
            f"cannot listen on {where} ({error.strerror}). Choose another with --port or --host."
        ) from error


def run(settings: ShimSettings) -> None:
    """Serve until told to stop."""
    check_tls(settings.tls_cert, settings.tls_key)
    server = make_server(settings)
    listener = listen(settings)
    scheme = "http" if settings.tls_cert is None else "https"
    port = listener.getsockname()[1]
    logger.info("OpenAI API at %s://%s:%d/v1", scheme, settings.host, port)
    server.run(sockets=[listener])
