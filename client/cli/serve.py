"""``shoal serve``: checks and fetches what is needed, then hands over to the supervisor."""

import asyncio
import logging
import os
import secrets
import sys
from pathlib import Path

from shoal.backend.engine_config import ConfigError, EngineConfig
from shoal.backend.garbage import settle
from shoal.backend.weights.catalogue import CATALOGUE
from shoal.client.cli.console import Console, ConsoleHandler
from shoal.client.cli.fetch import fetch_model, repair_runtime
from shoal.client.cli.managed_process import ProcessSpec
from shoal.client.cli.ports import check_ports
from shoal.client.cli.progress import Reporter
from shoal.client.cli.run_dir import RunDir
from shoal.client.cli.runtime import (
    TritonPorts,
    TritonRuntime,
    build_backend_directory,
    kill_stubs,
    packaged_model_repository,
    prepare_runtime,
    remove_shared_memory,
    server_command,
    server_environment,
)
from shoal.client.cli.settings import ServeSettings
from shoal.client.openai.tls import trusted_by

BEAT_MS = 500  # whoever asks for more beats takes time from the models: some ms for each
# What a gRPC client reads wakes one thread, not three in turn, each of which would take a core from
# the model.
GRPC_EXPERIMENTS = "-event_engine_client"


def serve(settings: ServeSettings) -> int:
    """Serve until told to stop; returns the exit status. Raises ConfigError before the start."""
    # Refuse what is wrong before anything is fetched, and fetch before anything is started.
    check_ports(settings.port_uses)
    check_access(settings)
    run_dir = RunDir(settings.resolved_run_dir)
    run_dir.claim()
    try:
        runtime = prepare_all(settings)
        return asyncio.run(_supervise(settings, runtime, run_dir))
    finally:
        run_dir.release()


def check_access(settings: ServeSettings) -> None:
    """Raise ConfigError for keys or TLS files that the OpenAI endpoint could not use."""
    from shoal.client.openai.api_keys import read_keys
    from shoal.client.openai.tls import check_tls

    check_tls(settings.tls_cert, settings.tls_key)
    if settings.keys_file is not None:
        read_keys(settings.keys_file)


def prepare_all(settings: ServeSettings) -> TritonRuntime:
    """Check the models' settings, then fetch what is missing or damaged of runtime and weights."""
    configs = engine_configs(settings)
    for name, config in zip(settings.model, configs, strict=True):
        check_weights(model_repository(settings), name, config.weights)
    reporter = Reporter()
    repair_runtime(settings.cache_dir, reporter)
    runtime = prepare_runtime(settings.cache_dir, reporter)
    for config in configs:
        if config.weights in CATALOGUE:
            fetch_model(config.weights, settings.cache_dir, reporter)
    return runtime


def model_repository(settings: ServeSettings) -> Path:
    """The repository to serve from."""
    return settings.model_repository or packaged_model_repository()


def engine_configs(settings: ServeSettings) -> list[EngineConfig]:
    """The engine settings of every model to serve. Raises ConfigError naming the file."""
    return [read_engine_config(model_repository(settings), name) for name in settings.model]


def read_engine_config(repository: Path, name: str) -> EngineConfig:
    """The settings of a model's highest version, the one that tritonserver loads by default."""
    path = engine_config_path(repository, name)
    try:
        config = EngineConfig.from_file(path)
        _check_absolute("weights", None if config.weights in CATALOGUE else config.weights)
        _check_absolute("step_log", config.step_log)
    except ConfigError as error:
        raise ConfigError(f"{path.parent}: {error}") from error
    return config


def check_weights(repository: Path, name: str, weights: str) -> None:
    """Raise ConfigError, naming the file, unless weights given as a path are there."""
    if weights not in CATALOGUE and not Path(weights).expanduser().exists():
        raise ConfigError(
            f"{engine_config_path(repository, name)}: weights: there is no file or folder "
            f"{weights}. Set it to a GGUF file, a checkpoint folder, or a name in the catalogue: "
            f"{', '.join(CATALOGUE)}."
        )


def engine_config_path(repository: Path, name: str) -> Path:
    """``model.yaml`` of a model's highest version. Raises ConfigError when there is none."""
    folder = repository / name
    if not (folder / "config.pbtxt").is_file():
        known = ", ".join(repository_models(repository)) or "none"
        raise ConfigError(
            f"The model repository {repository} has no model {name!r} "
            f"(a folder with a config.pbtxt). It has: {known}. Set --model or --model-repository."
        )
    versions = [int(path.name) for path in folder.iterdir() if path.name.isdigit()]
    if not versions:
        raise ConfigError(f"{folder} has no version folder such as 1/ with a model.yaml.")
    return folder / str(max(versions)) / "model.yaml"


def _check_absolute(name: str, value: str | None) -> None:
    """The backend does not run in the folder that ``shoal serve`` was called in."""
    if value is not None and not Path(value).expanduser().is_absolute():
        known = f"; or a name in the catalogue: {', '.join(CATALOGUE)}" if name == "weights" else ""
        raise ConfigError(f"{name} must be an absolute path, not {value[:80]!r}{known}.")


def repository_models(repository: Path) -> list[str]:
    """Names of the models in a repository."""
    return sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))


async def _supervise(settings: ServeSettings, runtime: TritonRuntime, run_dir: RunDir) -> int:
    control_key = secrets.token_urlsafe(24)
    shm_prefix = f"shoal_{os.getuid()}_{settings.grpc_port}_"
    server = _server_spec(settings, runtime, run_dir, shm_prefix, control_key)
    shims = _shim_specs(settings, run_dir, control_key)
    # For our own client, not for tritonserver.
    os.environ.setdefault("GRPC_EXPERIMENTS", GRPC_EXPERIMENTS)
    # tritonclient takes half a second to import: only now.
    from shoal.client.cli.supervisor import ServePlan, Supervisor
    from shoal.client.cli.triton_control import TritonControl
    from shoal.client.heartbeat_monitor import HeartbeatMonitor

    # The gRPC port was free, so whoever left regions of that name is gone.
    remove_shared_memory(shm_prefix)
    console = Console(settings.log_level, settings.log_format)
    logging.getLogger("shoal").addHandler(ConsoleHandler(console))

    def on_ready() -> None:
        print(ready_text(settings, run_dir.logs), flush=True)
        settle()

    plan = ServePlan(
        server=server,
        shims=shims,
        models=settings.model,
        drain_timeout_s=settings.drain_timeout_s,
        control=lambda: TritonControl(settings.grpc_url, control_key),
        monitor=lambda name: HeartbeatMonitor(settings.grpc_url, name, interval_ms=BEAT_MS),
        shim_is_ready=lambda: shims_ready(settings),
        on_ready=on_ready,
        after_server=lambda: remove_shared_memory(shm_prefix),
        kill_stub=lambda pid, name: kill_stubs(pid, model_repository(settings) / name),
    )
    if settings.open_to_all:
        console.event(
            f"warning: anybody who reaches {settings.host} can use this server. "
            "Make keys (shoal keys add) and give --keys-file."
        )
    console.event(
        f"Starting tritonserver ({runtime.source}) and the OpenAI API; logs in {run_dir.logs}"
    )
    return await Supervisor(plan, console).run()


def _server_spec(
    settings: ServeSettings,
    runtime: TritonRuntime,
    run_dir: RunDir,
    shm_prefix: str,
    control_key: str,
) -> ProcessSpec:
    backends = build_backend_directory(runtime, run_dir.backends, settings.cache_dir)
    command = server_command(
        runtime,
        model_repository=model_repository(settings),
        backend_directory=backends,
        ports=TritonPorts(
            host=settings.resolved_triton_host,
            http=settings.http_port,
            grpc=settings.grpc_port,
            metrics=settings.metrics_port,
        ),
        exit_timeout_s=max(1, settings.drain_timeout_s),
        shm_prefix=shm_prefix,
        control_key=control_key,
    )
    environment = server_environment(runtime, settings.cache_dir)
    environment["SHOAL_LOG_LEVEL"] = settings.log_level
    if settings.self_test is not None:
        environment["SHOAL_SELF_TEST"] = str(settings.self_test)
    # The stub looks for its model.py in the current folder first: start it in an empty one.
    log = run_dir.logs / "tritonserver.log"
    return ProcessSpec("tritonserver", command, environment, log, folder=run_dir.empty)


def _shim_specs(settings: ServeSettings, run_dir: RunDir, control_key: str) -> list[ProcessSpec]:
    """One for each process; they differ in name only."""
    num_workers = settings.shim_workers
    command = [
        *(sys.executable, "-m", "shoal.client.openai"),
        *("--host", settings.host, "--port", str(settings.openai_port)),
        *("--triton-grpc", settings.grpc_url),
        *("--drain-timeout", str(settings.drain_timeout_s)),
        *("--log-level", settings.log_level),
        *(f"--cors-origin={origin}" for origin in settings.cors_origin),
    ]
    if settings.keys_file is not None:
        command += ["--keys-file", str(settings.keys_file)]
    if settings.tls_cert is not None:
        command += ["--tls-cert", str(settings.tls_cert), "--tls-key", str(settings.tls_key)]
    if num_workers > 1:
        command += ["--workers", str(num_workers), "--shared-dir", str(run_dir.fresh_shared())]
    # The folder `shoal serve` is started in must not shadow modules of ours.
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",
        "SHOAL_CONTROL_KEY": control_key,
        "GRPC_EXPERIMENTS": os.environ.get("GRPC_EXPERIMENTS", GRPC_EXPERIMENTS),
    }
    names = [f"openai-api-{number}" for number in range(1, num_workers + 1)]
    return [
        ProcessSpec(name, command, environment, run_dir.logs / f"{name}.log")
        for name in (names if num_workers > 1 else ["openai-api"])
    ]


async def shims_ready(settings: ServeSettings) -> bool:
    """Whether those that listen are ready: each new connection goes to one of them by chance."""
    url = f"{settings.openai_url}/health/ready"
    tries = 1 if settings.shim_workers == 1 else 4 * settings.shim_workers
    for _ in range(tries):
        if not await http_ok(url, settings.tls_cert):
            return False
    return True


async def http_ok(url: str, tls_cert: Path | None = None) -> bool:
    """Whether a GET answers 200."""
    import httpx

    try:
        # Not through a proxy: it is this machine.
        verify = trusted_by(tls_cert)
        async with httpx.AsyncClient(trust_env=False, timeout=2.0, verify=verify) as client:
            reply: httpx.Response = await client.get(url)
            return reply.status_code == 200
    except httpx.HTTPError:
        return False


def ready_text(settings: ServeSettings, logs: Path) -> str:
    """What is served where, and a command to try."""
    url, host = settings.openai_url, settings.local_triton_host
    key = "" if settings.keys_file is None else " -H 'authorization: Bearer KEY'"
    key += "" if settings.tls_cert is None else f" --cacert {settings.tls_cert}"
    model = settings.model[0]
    body = (
        f'{{"model":"{model}","stream":true,'
        '"messages":[{"role":"user","content":"What is the capital of France?"}]}'
    )
    return "\n".join(
        [
            "",
            f"Shoal is ready, serving {', '.join(settings.model)}.",
            f"  OpenAI API      {url}/v1",
            f"  Triton HTTP     http://{host}:{settings.http_port}",
            f"  Triton gRPC     {settings.grpc_url}",
            f"  Triton metrics  http://{host}:{settings.metrics_port}/metrics",
            f"  Logs            {logs}",
            "Try:",
            f"  curl -N {url}/v1/chat/completions -H 'content-type: application/json'{key} \\",
            f"    -d '{body}'",
            f"  {_run_command(settings, model)}        (in another terminal)",
            "Stop with Ctrl-C.",
        ]
    )


def _run_command(settings: ServeSettings, model: str) -> str:
    """``shoal run``, with what it needs to find this server."""
    default_port = ServeSettings.model_fields["openai_port"].default
    port = "" if settings.openai_port == default_port else f" --openai-port {settings.openai_port}"
    host = "" if settings.local_host == "127.0.0.1" else f"SHOAL_HOST={settings.local_host} "
    key = "" if settings.keys_file is None else "SHOAL_API_KEY=KEY "
    tls = "" if settings.tls_cert is None else f"SHOAL_TLS_CERT={settings.tls_cert} "
    return f"{key}{tls}{host}shoal run {model}{port}"
