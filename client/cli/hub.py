"""Fetches a checkpoint by its name on a Hugging Face hub, ``owner/name``, into the cache folder.

$HF_ENDPOINT names another hub, $HF_TOKEN is sent where it is set. Only weights, configs and
tokenizers come, never code; the folder appears whole or not at all.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import httpx

from shoal.backend.engine_config import ConfigError
from shoal.backend.weights.catalogue import hub_folder
from shoal.client.cli.fetch import set_up_lock
from shoal.client.cli.progress import Reporter

DEFAULT_HUB = "https://huggingface.co"
_WANTED = (".safetensors", ".json", ".jinja", ".model")
_TIMEOUT_S = 30.0


def fetch_from_hub(name: str, cache_root: Path, reporter: Reporter) -> Path:
    """Make sure that the checkpoint is in the cache; returns its folder. Raises ConfigError."""
    target = hub_folder(name, cache_root)
    if target is None:
        raise ConfigError(f"{name[:64]!r} is no name of a hub's model: it must be owner/name.")
    if target.is_dir():
        return target
    hub = os.environ.get("HF_ENDPOINT", DEFAULT_HUB).rstrip("/")
    token = os.environ.get("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with (
            set_up_lock(cache_root, reporter),
            httpx.Client(timeout=_TIMEOUT_S, follow_redirects=True, headers=headers) as client,
        ):
            if not target.is_dir():  # another set-up may have fetched it meanwhile
                _fetch(client, hub, name, target, reporter)
    except (httpx.HTTPError, ValueError) as error:
        reason = str(error).split("\n")[0][:200]
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{name} cannot be fetched from {hub}: {reason or type(error).__name__}. Without that "
            "network, copy a folder with config.json, safetensors and tokenizer.json here and name "
            "its path as weights in model.yaml."
        ) from error
    return target


def _fetch(client: httpx.Client, hub: str, name: str, target: Path, reporter: Reporter) -> None:
    reply = client.get(f"{hub}/api/models/{name}", params={"blobs": "true"})
    reply.raise_for_status()
    files = _files(reply.json())
    if "config.json" not in files or not any(file.endswith(_WANTED[0]) for file in files):
        raise ConfigError(f"{name} has no config.json with safetensors: no other form is fetched.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pull-") as scratch:
        folder = Path(scratch) / "checkpoint"
        folder.mkdir()
        for file, size in files.items():
            _download(client, f"{hub}/{name}/resolve/main/{file}", folder / file, size, reporter)
        folder.rename(target)


def _files(description: Any) -> dict[str, int]:
    """Sizes of the wanted files by name; those in subfolders are other forms of the same."""
    siblings = description.get("siblings", []) if isinstance(description, dict) else []
    sizes = {str(item.get("rfilename")): int(item.get("size") or 0) for item in siblings}
    return {
        file: size
        for file, size in sizes.items()
        if file.endswith(_WANTED) and file == Path(file).name and not file.startswith(".")
    }


def _download(client: httpx.Client, url: str, path: Path, size: int, reporter: Reporter) -> None:
    done = 0
    with (
        client.stream("GET", url) as reply,
        reporter.transfer(path.name, size) as progress,
        path.open("wb") as sink,
    ):
        reply.raise_for_status()
        for chunk in reply.iter_bytes():
            done += len(chunk)
            if size and done > size:
                break
            sink.write(chunk)
            progress.update(done)
    if size and done != size:
        raise ConfigError(f"{path.name} came with {done} bytes instead of {size}; pull it again.")
