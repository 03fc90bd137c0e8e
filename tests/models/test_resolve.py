"""Finding models on this machine: known names, folders, the hub's local cache; and what is said when there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal import models
from tests.support.tiny_model import make_tiny_model

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny")


def test_a_known_name_that_was_not_pulled_says_how(home: Path) -> None:
    with pytest.raises(models.ModelError, match=r"not on this machine yet: run `shoal pull smollm2-135m`"):
        models.resolve("smollm2-135m")
    assert not home.exists()  # looking leaves nothing


@pytest.mark.parametrize("name", ["smollm3", "", "no such model", "a/b/c", "-x/y"])
def test_an_unknown_name_says_what_is_allowed(home: Path, name: str) -> None:
    for find in (models.resolve, models.pull):
        with pytest.raises(models.ModelError, match=r"known name \(smollm2-135m\), the path of a folder .* hub id"):
            find(name)


def test_a_folder_is_used_where_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    for name in (str(folder), "./tiny", "tiny"):
        assert models.resolve(name) == models.pull(name) == folder
    assert sorted(folder.parent.iterdir()) == [folder]  # nothing copied


def test_a_folder_wins_over_a_hub_id_of_the_same_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert models.resolve("org/name") == folder


def test_the_default_home_is_in_the_users_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.shoal_home() == tmp_path / "shoal"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.shoal_home() == tmp_path / ".cache" / "shoal"


def break_index(folder: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "names no architecture"),
        (lambda folder: (folder / "config.json").write_text("{}"), "names no architecture"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[1]"), "cannot be read"),
        (break_index, r"model-00001-of-00002.safetensors is missing \(1 of 2 files\)"),
        (only_pickle, "no \\*.safetensors: weights in other formats are never loaded"),
    ],
)
def test_a_folder_that_is_no_model_says_what_is_wrong(folder: Path, spoil, reason: str) -> None:
    spoil(folder)
    for find in (models.resolve, models.pull):
        with pytest.raises(models.ModelError, match=reason):
            find(str(folder))


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(models.ModelError, match="no such folder"):
        models.resolve(str(tmp_path / "nowhere"))


def in_hub_cache(cache: Path, model: Path) -> Path:
    """The hub's own layout: models--org--name with refs and snapshots."""
    snapshot = cache / "models--org--tiny" / "snapshots" / REVISION
    snapshot.parent.mkdir(parents=True)
    model.rename(snapshot)
    refs = cache / "models--org--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text(REVISION)
    return snapshot


def find_offline(cache: Path) -> list[str]:
    """What `resolve` and `pull` say of org/tiny, in a process of its own: the hub's library reads its environment when
    it is imported."""
    code = (
        "import sys; from shoal import models\n"
        "for find in (models.resolve, models.pull):\n"
        "    try: print(find('org/tiny'))\n"
        "    except models.ModelError as error: print('ModelError:', error)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()


def test_a_hub_id_is_found_in_the_hubs_cache_without_a_network(tmp_path: Path, folder: Path) -> None:
    snapshot = in_hub_cache(tmp_path / "hub", folder)
    assert find_offline(tmp_path / "hub") == [str(snapshot)] * 2


def test_a_hub_id_that_is_not_in_the_cache_says_how(tmp_path: Path) -> None:
    resolved, pulled = find_offline(tmp_path / "hub")
    assert resolved.startswith("ModelError:") and "run `shoal pull org/tiny`" in resolved
    assert pulled.startswith("ModelError:") and "the hub cannot be reached" in pulled


def test_an_incomplete_snapshot_is_not_used(tmp_path: Path, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    in_hub_cache(tmp_path / "hub", folder)
    assert all("has no *.safetensors" in line for line in find_offline(tmp_path / "hub"))


def test_from_the_hub_nothing_but_safetensors_json_and_templates_is_asked_for(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The patterns, applied by the hub's library itself to a repository's listing."""
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    listing = [
        *("config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "chat_template.jinja"),
        *(
            "tokenizer.json",
            "pytorch_model.bin",
            "consolidated.safetensors",
            "consolidated.00.pth",
            "training_args.bin",
        ),
        *("original/params.json", "onnx/model.onnx", "onnx/config.json", "modeling_custom.py", "README.md", "x.pkl"),
    ]
    asked: list[str] = []

    def snapshot_download(repo_id: str, *, allow_patterns, ignore_patterns, local_files_only: bool) -> str:
        asked.extend(filter_repo_objects(listing, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert models.pull("org/tiny") == folder
    assert asked == [
        *("config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "chat_template.jinja"),
        "tokenizer.json",
    ]
