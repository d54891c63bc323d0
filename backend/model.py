"""The Triton Python backend: one instance per loaded model version, decoupled.

Thin on purpose. It decodes requests and hands them on; nothing here waits for a model.
"""

import dataclasses
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

# Before anything that imports numpy: it brings the numpy that the stub was built for.
import triton_python_backend_utils as pb_utils

from shoal.backend import codec
from shoal.backend.channels import Channels
from shoal.backend.chunk import Chunk
from shoal.backend.engine_config import ConfigError, EngineConfig
from shoal.backend.garbage import settle
from shoal.backend.heartbeat import ControlRequest, HeartbeatThread
from shoal.backend.metrics import MetricsPublisher
from shoal.backend.parent_watch import ParentWatch
from shoal.backend.responder import Responder
from shoal.backend.service import Service
from shoal.backend.text_ops import TextRequest
from shoal.scheduler.errors import RequestError

DRAIN_S = 5.0
PROGRESS_INTERVAL_S = 1.0

log = logging.getLogger("shoal.backend.model")


class TritonPythonModel:
    """What the stub calls: auto_complete_config, initialize, execute, finalize."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Declare inputs and outputs, so that a config.pbtxt needs only the backend's name."""
        for name, (data_type, dims) in codec.INPUTS.items():
            auto_complete_model_config.add_input(
                {"name": name, "data_type": data_type, "dims": dims, "optional": True}
            )
        for name, (data_type, dims) in codec.OUTPUTS.items():
            auto_complete_model_config.add_output(
                {"name": name, "data_type": data_type, "dims": dims}
            )
        auto_complete_model_config.set_max_batch_size(0)
        auto_complete_model_config.set_model_transaction_policy({"decoupled": True})
        return auto_complete_model_config

    def initialize(self, args: dict[str, str]) -> None:
        """Start the service; the model counts as loaded when its worker is ready."""
        name, version = args["model_name"], args["model_version"]
        _set_up_logging(f"{name}/{version}")
        self._parent_watch = ParentWatch(self._die)
        try:
            _check_instances(args)
            config = _read_config(_version_dir(args) / "model.yaml")
            self._responder = Responder()
            self._service = Service(config, name, version)
            self._service.start(_ProgressLog(), self._responder.holding)
        except ConfigError as error:
            self._abandon_start()
            raise pb_utils.TritonModelException(f"model {name!r}: {error}") from None
        except BaseException:
            self._abandon_start()
            raise
        self._channels = Channels(self._responder, self._service)
        self._heartbeat = HeartbeatThread(self._service.status)
        labels = {"model": name, "version": version}
        self._metrics = MetricsPublisher(pb_utils, labels, self._service.counts)
        settle()
        log.info("serving")

    def execute(self, requests: list[Any]) -> None:
        """Take requests. A fault with one is answered to its sender and harms no other."""
        for request in requests:
            reply = codec.TritonReply(request)
            try:
                orders = codec.read_channel(request)
                if orders is not None:
                    self._channels.take(orders, reply)
                    continue
                returns = reply.returns = codec.read_returns(request)
                self._take(request, reply, returns)
            except RequestError as error:
                _refuse(reply, error)
            except Exception:
                log.exception("a request could not be decoded")
                _refuse(reply, RequestError("The request failed.", code="internal", status=500))

    def finalize(self) -> None:
        """Drain, answer whoever is left, end the worker and all threads."""
        log.info("stopping")
        self._service.stop(DRAIN_S)
        self._responder.close()
        self._heartbeat.close()
        self._metrics.close()
        self._parent_watch.close()

    def _take(self, request: Any, reply: codec.TritonReply, returns: codec.Returns) -> None:
        control = codec.read_control(request)
        text_request = None if control is None else TextRequest.from_control(control)
        if text_request is not None:
            raw = codec.read_request(request, returns)
            self._service.answer_text(text_request, raw, _ControlAnswer(reply))
            return
        if control is not None:
            asked = ControlRequest.from_json(control)
            self._heartbeat.add(asked, reply)
            self._service.note_refused(asked.refused)
            return
        raw = codec.read_request(request, returns)
        every_token = returns.token_ids or returns.logprobs
        stream = self._responder.open(reply, raw.stream, every_token)
        seq_id = self._service.submit(raw, stream.post)
        self._responder.watch(stream, lambda: self._service.cancel(seq_id))

    def _die(self) -> None:
        """The server is dead: threads that wait for its answer would keep this process for ever."""
        log.error("the server is gone; leaving")
        os._exit(1)

    def _abandon_start(self) -> None:
        self._parent_watch.close()
        service = getattr(self, "_service", None)
        if service is not None:
            service.stop(0)
        responder = getattr(self, "_responder", None)
        if responder is not None:
            responder.close(0)


class _ControlAnswer:
    """The one answer to a control request, or why there is none."""

    def __init__(self, reply: codec.TritonReply) -> None:
        self._reply = reply

    def send(self, answer: dict[str, Any]) -> None:
        self._reply.send_control(json.dumps(answer), final=True)

    def refuse(self, error: RequestError) -> None:
        _refuse(self._reply, error)


class _ProgressLog:
    """Writes the progress of loading as log lines: each new phase, then one a second."""

    def __init__(self) -> None:
        self._phase = ""
        self._logged_at = 0.0

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        if phase == self._phase and done < total and now - self._logged_at < PROGRESS_INTERVAL_S:
            return
        self._phase, self._logged_at = phase, now
        share = f" {100 * done // total}% of {total / 2**20:.0f} MiB" if total else ""
        log.info("loading: %s%s", phase, share)


def _refuse(reply: codec.TritonReply, error: RequestError) -> None:
    try:
        reply.send(Chunk.of_error(error))
    except Exception:
        log.exception("a refusal could not be sent")
        reply.abandon()


def _version_dir(args: dict[str, str]) -> Path:
    # The server's own view of the folder; the repository path alone may be of another file system.
    return Path(args["model_repository"]) / args["model_version"]


def _check_instances(args: dict[str, str]) -> None:
    """One instance holds one engine; the server's default on several GPUs is one for each."""
    groups = json.loads(args["model_config"]).get("instance_group", [])
    num_instances = sum(
        int(group.get("count", 1)) * max(1, len(group.get("gpus", []))) for group in groups
    )
    if num_instances > 1:
        raise ConfigError(
            f"instance_group makes {num_instances} instances; set "
            "`instance_group [{ kind: KIND_MODEL count: 1 }]` in config.pbtxt."
        )


def _read_config(path: Path) -> EngineConfig:
    """The model's settings; ``shoal serve --self-test`` overrides that one of all models."""
    config = EngineConfig.from_file(path)
    num_prompts = os.environ.get("SHOAL_SELF_TEST")
    if num_prompts is None:
        return config
    if not num_prompts.isdecimal():
        raise ConfigError("SHOAL_SELF_TEST must be a number of prompts.")
    return dataclasses.replace(config, self_test=int(num_prompts))


def _set_up_logging(who: str) -> None:
    """Log lines of ours go to the stub's standard error, which is the server's."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"shoal {who} %(levelname)s %(message)s"))
    logger = logging.getLogger("shoal")
    logger.handlers[:] = [handler]
    logger.setLevel(os.environ.get("SHOAL_LOG_LEVEL", "INFO").upper())
    logger.propagate = False
