"""Random requests after the server's own OpenAPI page: no 5xx, no slow answer, no odd shape.

    python -m shoal.load.api_fuzz http://127.0.0.1:9000 --examples 100

Needs schemathesis (of the ``dev`` extra). Ends with its exit code.
"""

import argparse
import subprocess
import sys
from pathlib import Path

CHECKS = (
    "not_a_server_error",
    "response_schema_conformance",
    "status_code_conformance",
    "content_type_conformance",
)
MAX_RESPONSE_S = 5.0


def command(
    url: str,
    examples: int,
    key: str | None = None,
    seed: int = 1,
    phases: str = "examples,coverage,fuzzing",
) -> list[str]:
    """The command line of one run. ``coverage`` takes hundreds of requests whatever the number of
    examples."""
    tool = Path(sys.executable).parent / "schemathesis"
    line = [str(tool), "run", f"{url}/openapi.json", "--checks", ",".join(CHECKS)]
    line += ["--max-response-time", str(MAX_RESPONSE_S), "--max-examples", str(examples)]
    line += ["--seed", str(seed), "--phases", phases]
    # Half of the inputs are wrong on purpose.
    line += ["--mode", "all", "--generation-database", "none", "--no-color"]
    return line if key is None else [*line, "--header", f"Authorization: Bearer {key}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url", help="of the OpenAI API, without /v1")
    parser.add_argument("--examples", type=int, default=100, help="of each endpoint")
    parser.add_argument("--key")
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    return subprocess.run(
        command(flags.url, flags.examples, flags.key, flags.seed), check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
