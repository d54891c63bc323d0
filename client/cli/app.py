"""The ``shoal`` command. Each subcommand imports what it needs itself, so that all start fast."""

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.backend.engine_config import ConfigError

if TYPE_CHECKING:
    from shoal.client.cli.settings import LayeredSettings

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Config = Annotated[Path | None, typer.Option("--config", help="YAML file of these settings.")]
Host = Annotated[str | None, typer.Option(help="Address to listen on. [127.0.0.1]")]
OpenaiPort = Annotated[int | None, typer.Option(help="Port of the OpenAI API. [9000]")]
HttpPort = Annotated[int | None, typer.Option(help="Port of Triton's HTTP API. [8000]")]
GrpcPort = Annotated[int | None, typer.Option(help="Port of Triton's gRPC API. [8001]")]
MetricsPort = Annotated[int | None, typer.Option(help="Port of Triton's metrics. [8002]")]
Repository = Annotated[
    Path | None, typer.Option(help="Model repository. [the one that comes with Shoal]")
]
CacheDir = Annotated[
    Path | None, typer.Option(help="Where runtime and models are kept. [~/.cache/shoal]")
]
RunDirOption = Annotated[Path | None, typer.Option(help="Logs and sockets of this server.")]
KeysFile = Annotated[
    Path | None, typer.Option(help="YAML file of API keys; with one, each request needs a key.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        typer.echo(version("shoal-llm"))
    except PackageNotFoundError:
        typer.echo("unknown (not installed)")
    raise typer.Exit


@app.callback()
def shoal(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version, and end."
        ),
    ] = False,
) -> None:
    """Shoal serves large language models from NVIDIA Triton Inference Server."""


@app.command()
def serve(
    config: Config = None,
    host: Host = None,
    openai_port: OpenaiPort = None,
    http_port: HttpPort = None,
    grpc_port: GrpcPort = None,
    metrics_port: MetricsPort = None,
    model_repository: Repository = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Model to serve; may be given several times.")
    ] = None,
    cache_dir: CacheDir = None,
    run_dir: RunDirOption = None,
    drain_timeout_s: Annotated[
        int | None, typer.Option(help="Seconds that open requests get on shutdown. [30]")
    ] = None,
    self_test: Annotated[
        int | None,
        typer.Option(help="Prompts to compare with transformers at start-up. [as in model.yaml]"),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error. [info]")
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json. [text]")] = None,
    keys_file: KeysFile = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM certificate chain of the OpenAI API.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM key of --tls-cert.")] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin whose pages may call the OpenAI API, or *. [none]"),
    ] = None,
    triton_host: Annotated[
        str | None,
        typer.Option(help="Address of Triton's ports. [--host; with keys 127.0.0.1]"),
    ] = None,
    shim_workers: Annotated[
        int | None, typer.Option(help="Processes that serve the OpenAI API. [1]")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Show each setting and its origin, and end.")
    ] = False,
) -> None:
    """Serve models: starts tritonserver and the OpenAI API and keeps them running.

    Each setting comes from its flag, else SHOAL_<NAME> in the environment, else --config, else
    the default.
    """
    flags = {
        "host": host,
        "openai_port": openai_port,
        "http_port": http_port,
        "grpc_port": grpc_port,
        "metrics_port": metrics_port,
        "model_repository": model_repository,
        "model": model,
        "cache_dir": cache_dir,
        "run_dir": run_dir,
        "drain_timeout_s": drain_timeout_s,
        "self_test": self_test,
        "log_level": log_level,
        "log_format": log_format,
        "keys_file": keys_file,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "cors_origin": cors_origin,
        "triton_host": triton_host,
        "shim_workers": shim_workers,
    }
    layered = _load_settings(flags, config)
    if print_config:
        for row in layered.rows():
            value = (", ".join(row.value) or None) if isinstance(row.value, list) else row.value
            typer.echo(f"{row.name:<18} {'-' if value is None else value!s:<40} {row.origin}")
        return
    from shoal.client.cli.serve import serve as serve_models

    raise typer.Exit(serve_models(layered.settings))


@app.command()
def run(
    model: Annotated[str | None, typer.Argument(help="Model to chat with.")] = None,
    prompt: Annotated[
        str | None, typer.Argument(help="Answer this alone instead of chatting.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    config: Config = None,
    openai_port: OpenaiPort = None,
    http_port: HttpPort = None,
    grpc_port: GrpcPort = None,
    metrics_port: MetricsPort = None,
    model_repository: Repository = None,
    cache_dir: CacheDir = None,
) -> None:
    """Chat in the terminal. Starts a server when none is running, and stops it at the end."""
    from shoal.client.cli.chat import run_chat
    from shoal.client.cli.serve import prepare_all

    flags: dict[str, Any] = {
        "openai_port": openai_port,
        "http_port": http_port,
        "grpc_port": grpc_port,
        "metrics_port": metrics_port,
        "model_repository": model_repository,
        "model": [model] if model else None,
        "cache_dir": cache_dir,
    }
    settings = _load_settings(flags, config).settings
    serve_flags = _as_flags({**flags, "model": None, "config": config})
    serve_flags += [f"--model={name}" for name in settings.model]
    raise typer.Exit(
        run_chat(
            settings,
            settings.model[0],
            prompt,
            max_tokens,
            serve_flags,
            prepare=lambda: prepare_all(settings),
        )
    )


@app.command()
def pull(
    names: Annotated[
        list[str] | None, typer.Argument(help="Models to fetch. [the default one]")
    ] = None,
    cache_dir: CacheDir = None,
) -> None:
    """Fetch the Triton runtime and models into the cache, and compile the CPU kernels.

    A model is one of the catalogue, or owner/name of the Hugging Face hub where it can be reached.

    What is there already is kept.
    """
    from shoal.backend.weights.catalogue import DEFAULT_MODEL
    from shoal.client.cli.fetch import fetch_model, repair_runtime
    from shoal.client.cli.hub import fetch_from_hub
    from shoal.client.cli.kernels import prepare_kernels
    from shoal.client.cli.progress import Reporter
    from shoal.client.cli.runtime import prepare_runtime

    root = _load_settings({"cache_dir": cache_dir}).settings.cache_dir
    reporter = Reporter()
    for name in names or [DEFAULT_MODEL]:
        fetch = fetch_from_hub if "/" in name else fetch_model
        typer.echo(f"{name}: {fetch(name, root, reporter)}")
    repair_runtime(root, reporter)
    runtime = prepare_runtime(root, reporter)
    typer.echo(f"tritonserver ({runtime.source}): {runtime.server}")
    typer.echo(f"CPU kernels: {prepare_kernels(root, reporter)}")


@app.command()
def models(
    config: Config = None,
    model_repository: Repository = None,
    openai_port: OpenaiPort = None,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """List models: what is here and served, family, format, context, and what fits in memory."""
    from shoal.client.cli.models_cmd import list_models, rows_as_json, rows_as_text

    flags = {
        "model_repository": model_repository,
        "openai_port": openai_port,
        "cache_dir": cache_dir,
    }
    rows = list_models(_load_settings(flags, config).settings)
    typer.echo(rows_as_json(rows) if as_json else rows_as_text(rows))


@app.command()
def quantize(
    source: Annotated[Path, typer.Argument(help="Folder with config.json and safetensors.")],
    target: Annotated[Path, typer.Argument(help="New folder for the quantised checkpoint.")],
    scheme: Annotated[str, typer.Option("--quantization", help="int8, int4 or fp8.")] = "int8",
) -> None:
    """Write a quantised copy of a checkpoint, as transformers and vLLM read it too."""
    from shoal.backend.weights.quantized_writer import write_quantized

    write_quantized(source, target, scheme)
    size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    typer.echo(f"{target}: {scheme}, {size / 2**20:.0f} MiB of weights")


@app.command()
def doctor(
    config: Config = None,
    host: Host = None,
    openai_port: OpenaiPort = None,
    http_port: HttpPort = None,
    grpc_port: GrpcPort = None,
    metrics_port: MetricsPort = None,
    model_repository: Repository = None,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Check what serving needs; each problem is shown with its fix. Exit status 1 on a problem."""
    from shoal.client.cli.doctor import examine, findings_as_json, findings_as_text, has_problem

    flags = {
        "host": host,
        "openai_port": openai_port,
        "http_port": http_port,
        "grpc_port": grpc_port,
        "metrics_port": metrics_port,
        "model_repository": model_repository,
        "cache_dir": cache_dir,
    }
    findings = examine(_load_settings(flags, config).settings)
    typer.echo(findings_as_json(findings) if as_json else findings_as_text(findings))
    if has_problem(findings):
        raise typer.Exit(1)


keys_app = typer.Typer(no_args_is_help=True, help="Keys of the OpenAI API.")
app.add_typer(keys_app, name="keys")
KeyName = Annotated[str, typer.Argument(help="What to call the key.")]


@keys_app.command("add")
def keys_add(
    name: KeyName,
    tenant: Annotated[str | None, typer.Option(help="Whose requests these are. [NAME]")] = None,
    slo_class: Annotated[str | None, typer.Option(help="Their tier. [the default one]")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="[no limit]")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Of prompts and answers. [no limit]")
    ] = None,
    max_concurrent: Annotated[int | None, typer.Option(help="Requests at once. [no limit]")] = None,
    keys_file: KeysFile = None,
    config: Config = None,
) -> None:
    """Make a key and print it. It is shown this once: the file holds only its hash."""
    from shoal.client.cli.keys import add_key

    limits = {
        "tenant": tenant,
        "slo_class": slo_class,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrent": max_concurrent,
    }
    path = _load_settings({"keys_file": keys_file}, config).settings.keys_file
    typer.echo(add_key(path, name, limits))


@keys_app.command("list")
def keys_list(keys_file: KeysFile = None, config: Config = None) -> None:
    """Show the keys of the file, with their tenants and limits."""
    from shoal.client.cli.keys import keys_as_text

    typer.echo(keys_as_text(_load_settings({"keys_file": keys_file}, config).settings.keys_file))


@keys_app.command("revoke")
def keys_revoke(name: KeyName, keys_file: KeysFile = None, config: Config = None) -> None:
    """Take a key out of the file. A running server stops taking it within two seconds."""
    from shoal.client.cli.keys import revoke_key

    revoke_key(_load_settings({"keys_file": keys_file}, config).settings.keys_file, name)
    typer.echo(f"{name} is revoked.")


@app.command("version")
def version_command() -> None:
    """Print the version."""
    _print_version(True)


def _load_settings(flags: dict[str, Any], config: Path | None = None) -> "LayeredSettings":
    """The settings, with a warning for what looks like a misspelt environment variable."""
    from shoal.client.cli.settings import load_settings, unknown_variables

    for text in unknown_variables(os.environ):
        print(f"warning: {text}", file=sys.stderr)
    return load_settings(flags, config)


def _as_flags(flags: dict[str, Any]) -> list[str]:
    return [
        f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if value is not None
    ]


def main() -> None:
    """Entry point: an operator's mistake is one message, not a traceback."""
    try:
        app()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
