"""The TypeScript SDK: its own tests against a scripted server, its types, and what is published."""

import json
from pathlib import Path

from typescript_sdk import FOLDER, needs_node, run, run_vitest


@needs_node
def test_its_own_tests() -> None:
    run_vitest("tests/client.test.ts")


@needs_node
def test_it_builds_without_nodes_types_and_loads_in_plain_node(tmp_path: Path) -> None:
    tsc = "node_modules/.bin/tsc"
    run(tsc, "-p", "tsconfig.json", "--outDir", str(tmp_path))
    (tmp_path / "package.json").write_text('{"type": "module"}')
    assert (tmp_path / "index.d.ts").is_file()
    load = f"import * as sdk from {json.dumps(str(tmp_path / 'index.js'))}; "
    output = run(
        "node", "--input-type=module", "-e", load + "console.log(Object.keys(sdk).sort().join())"
    )
    assert output.strip() == "Client,DeltaStream,RetryPolicy,ShoalError"


def test_nothing_is_needed_at_run_time() -> None:
    package = json.loads((FOLDER / "package.json").read_text())
    assert package["type"] == "module"
    assert not {"dependencies", "peerDependencies", "optionalDependencies"} & set(package)
    sources = "".join(path.read_text() for path in (FOLDER / "src").glob("*.ts"))
    assert 'from "node:' not in sources


def test_the_lock_names_no_registry() -> None:
    assert "://" not in "".join(
        line
        for line in (FOLDER / "package-lock.json").read_text().splitlines(keepends=True)
        if '"url"' not in line  # of funding
    )
