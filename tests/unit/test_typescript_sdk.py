"""The TypeScript SDK: its own tests against a scripted server, its types, and what is published."""

import json
import re
import tarfile
from pathlib import Path

import pytest
from typescript_sdk import FOLDER, needs_node, run, run_vitest


@needs_node
def test_its_own_tests() -> None:
    run_vitest("tests/client.test.ts")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's project that has installed what `npm pack` makes."""
    folder = tmp_path_factory.mktemp("user")
    run("npm", "pack", "--silent", "--pack-destination", str(folder))
    (archive,) = folder.glob("shoal-client-*.tgz")
    target = folder / "node_modules" / "shoal-client"
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    target.parent.mkdir()
    (folder / "package").rename(target)
    (folder / "node_modules" / "@types").symlink_to(FOLDER / "node_modules" / "@types")
    (folder / "node_modules" / "undici-types").symlink_to(FOLDER / "node_modules" / "undici-types")
    (folder / "package.json").write_text('{"type": "module"}')
    return folder


@needs_node
@pytest.mark.parametrize(
    ("module", "resolution", "lib"),
    [
        ("node16", "node16", ["ES2022"]),  # Node: its own types, none of a browser
        ("ES2022", "bundler", ["ES2022", "DOM", "DOM.Iterable", "DOM.AsyncIterable"]),
    ],
)
def test_the_readmes_examples_compile_in_a_users_project(
    published: Path, module: str, resolution: str, lib: list[str]
) -> None:
    examples = re.findall(r"```ts\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
    assert examples
    for idx, example in enumerate(examples):
        (published / f"example{idx}.ts").write_text(example)
    options = {
        "module": module,
        "moduleResolution": resolution,
        "lib": lib,
        "target": "ES2022",
        "types": ["node"],
        "strict": True,
        "noEmit": True,
        "skipLibCheck": False,
    }
    settings = published / "tsconfig.json"
    settings.write_text(json.dumps({"compilerOptions": options, "include": ["example*.ts"]}))
    run("node_modules/.bin/tsc", "-p", str(settings))


@needs_node
def test_the_package_is_imported_by_its_name(published: Path) -> None:
    script = published / "use.mjs"
    script.write_text('import { Client } from "shoal-client"; console.log(typeof Client);')
    assert run("node", str(script)).strip() == "function"
    names = {path.name for path in (published / "node_modules" / "shoal-client").iterdir()}
    assert {"dist", "src", "README.md", "LICENSE", "package.json"} <= names
    assert "tests" not in names


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
