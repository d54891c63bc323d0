"""``python -m shoal.client.openai``: the OpenAI shim as a process."""

import argparse
import logging
import sys
from pathlib import Path

from shoal.backend.engine_config import ConfigError
from shoal.client.openai.server import PortTakenError, run
from shoal.client.openai.settings import ShimSettings


def main() -> int:
    """Parse the flags and serve; returns the exit code."""
    defaults = ShimSettings()
    parser = argparse.ArgumentParser(prog="shoal.client.openai", description=__doc__)
    parser.add_argument("--host", default=defaults.host)
    parser.add_argument("--port", type=int, default=defaults.port)
    parser.add_argument("--triton-grpc", default=defaults.triton_grpc, metavar="HOST:PORT")
    parser.add_argument("--drain-timeout", type=float, default=defaults.drain_timeout_s)
    parser.add_argument("--keys-file", type=Path, metavar="FILE", help="YAML, see `shoal keys`")
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="PEM chain; needs --tls-key")
    parser.add_argument("--tls-key", type=Path, metavar="FILE")
    parser.add_argument("--cors-origin", action="append", default=[], metavar="ORIGIN")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the port")
    parser.add_argument("--shared-dir", type=Path, metavar="DIR", help="what they share")
    parser.add_argument("--log-level", default=defaults.log_level)
    flags = parser.parse_args()
    logging.basicConfig(
        level=flags.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    settings = ShimSettings(
        triton_grpc=flags.triton_grpc,
        host=flags.host,
        port=flags.port,
        drain_timeout_s=flags.drain_timeout,
        keys_file=flags.keys_file,
        tls_cert=flags.tls_cert,
        tls_key=flags.tls_key,
        cors_origins=tuple(flags.cors_origin),
        log_level=flags.log_level,
        num_workers=flags.workers,
        shared_dir=flags.shared_dir,
    )
    try:
        run(settings)
    except (PortTakenError, ConfigError) as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
