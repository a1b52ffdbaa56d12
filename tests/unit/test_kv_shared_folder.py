"""A folder of extents that servers share: what was written is read back, and nothing else ever is."""

from __future__ import annotations

import errno
import json
import os
import random
import stat
import struct
import threading
from hashlib import blake2b
from pathlib import Path

import pytest

from tokenmill.core.errors import ConfigError
from tokenmill.kv.connector.worker.transfers import open_folder
from tokenmill.kv.transfer.disk.extent import PARTIAL, BadExtent, extent_name
from tokenmill.kv.transfer.disk.folder import SharedFolder, claim
from tokenmill.kv.transfer.disk.whole import StoredBlock, open_extent, read_blocks, write_extents

SIZES = (4000, 3000)
MODEL = "0123456789abcdef0123456789abcdef"


def some_blocks(seed: int, count: int = 6) -> list[StoredBlock]:
    rng = random.Random(seed)
    groups = [rng.randrange(2) for _ in range(count)]
    return [StoredBlock(group, rng.randbytes(16), rng.randbytes(SIZES[group])) for group in groups]


def folder_at(path: Path, max_bytes: int = 1 << 20, model: str = MODEL) -> SharedFolder:
    folder = SharedFolder(path, model, SIZES, max_bytes)
    folder.open()
    return folder


def files(folder: Path) -> list[Path]:
    """All but the lock."""
    return [path for path in folder.iterdir() if path.name != "lock"]


def written(folder: Path, blocks: list[StoredBlock], model: str = MODEL, sizes: tuple[int, ...] = SIZES) -> Path:
    """An extent of these blocks."""
    (extent,) = write_extents(folder, model, sizes, blocks)
    return extent.path


def test_blocks_are_read_back(tmp_path: Path) -> None:
    """By group and key, in any order, by a later process too; only the owner may read them."""
    folder = folder_at(tmp_path / "saved")
    first, second = some_blocks(1), some_blocks(2)
    folder.save(first)
    folder.save(second)
    for reader in (folder, folder_at(tmp_path / "saved")):
        mixed = [*second[::2], *first[::-1], *second]
        assert reader.read([(block.group, block.key) for block in mixed]) == [block.data for block in mixed]
        assert [set(keys) for keys in reader.keys] == [
            {block.key for block in first + second if block.group == group} for group in (0, 1)
        ]
    assert (folder.num_saved, folder.num_read) == (12, 15)
    paths = files(tmp_path / "saved")
    assert len(paths) == 2 and not any(path.name.endswith(PARTIAL) for path in paths)
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    assert stat.S_IMODE((tmp_path / "saved").stat().st_mode) == 0o700


def test_the_same_key_in_two_groups_is_two_blocks(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    folder.save([StoredBlock(0, b"k" * 16, b"a" * 4000), StoredBlock(1, b"k" * 16, b"b" * 3000)])
    assert folder.read([(1, b"k" * 16)]) == [b"b" * 3000]


@pytest.mark.parametrize("seed", range(4))
def test_damaged_files_never_give_wrong_bytes(tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Cut short anywhere, lengthened, or with bits flipped: refused when opened or read, or read as written."""
    rng = random.Random(seed)
    blocks = some_blocks(seed)
    path = written(tmp_path, blocks)
    whole = path.read_bytes()
    num_refused = 0
    for _ in range(150):
        data = bytearray(whole)
        kind = rng.randrange(4)
        if kind == 0:
            del data[rng.randrange(len(data)) :]
        elif kind == 1:
            data += rng.randbytes(rng.randint(1, 9))
        else:
            for _ in range(kind):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            extent = open_extent(path, MODEL, SIZES)
        except (BadExtent, ValueError):
            num_refused += 1
            continue
        for slot, block in enumerate(blocks):
            try:
                assert read_blocks(extent, [slot]) == [block.data]
            except BadExtent:
                num_refused += 1
    assert num_refused >= 100
    path.write_bytes(whole[:-1])
    assert folder_at(tmp_path).keys == ((), ()) and "is cut short" in caplog.text


def test_swapped_blocks_are_noticed(tmp_path: Path) -> None:
    """Two blocks of a size whose bytes changed places: each checksum covers the block's key."""
    path = written(tmp_path, [StoredBlock(0, bytes([n]) * 16, bytes([n]) * 4000) for n in (1, 2)])
    extent = open_extent(path, MODEL, SIZES)
    data = path.read_bytes()
    path.write_bytes(data[:-8192] + data[-4096:] + data[-8192:-4096])
    with pytest.raises(BadExtent, match="damaged"):
        read_blocks(extent, [0])


def test_groups_of_other_sizes_have_extents_of_their_own(tmp_path: Path) -> None:
    """A slot is a multiple of 4096 bytes; all extents of what is saved at once stay, whatever the folder may hold."""
    sizes = (5000, 300)
    blocks = [StoredBlock(n % 2, bytes([n + 1]) * 16, bytes([n]) * sizes[n % 2]) for n in range(5)]
    folder = SharedFolder(tmp_path, MODEL, sizes, 1)
    folder.open()
    folder.save(blocks)
    assert sorted(len(path.read_bytes()) for path in files(tmp_path)) == [8192 + 2 * 4096, 8192 + 3 * 8192]
    again = SharedFolder(tmp_path, MODEL, sizes, 1)
    again.open()
    assert again.read([(block.group, block.key) for block in blocks]) == [block.data for block in blocks]


def test_foreign_files_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another model's extents, another geometry, another version and other files are told of, kept and not read."""
    folder_at(tmp_path, model="f" * 32).save(some_blocks(1))
    written(tmp_path, some_blocks(1), sizes=(4000, 3001)).rename(tmp_path / "other.blocks")
    (tmp_path / "notes.blocks").write_text("not an extent")
    (tmp_path / "new.blocks").write_bytes(b"TMKVD\x00\x00\x02" + bytes(5000))
    (tmp_path / f"{extent_name(MODEL, 3)}{PARTIAL}").write_bytes(b"half")
    folder = folder_at(tmp_path)
    assert folder.keys == ((), ()) and folder.num_bytes == 0
    for reason in ("is of another model", "is no extent", "is of another version"):
        assert reason in caplog.text
    assert len(files(tmp_path)) == 4, "a file that was being written is removed, others stay"


def test_the_oldest_extents_go_first(tmp_path: Path) -> None:
    """The folder keeps to its size once the new extent is whole; what both hold is read from the new one."""
    batches = [some_blocks(seed) for seed in range(5)]
    one = written(tmp_path, batches[0]).stat().st_size
    folder = folder_at(tmp_path / "saved", max_bytes=int(3.5 * one))
    for batch in batches:
        folder.save([*batch, batches[0][0]])
    assert folder.num_bytes <= 3.5 * one and len(files(tmp_path / "saved")) == len(folder._extents)
    assert folder.read([(batches[0][0].group, batches[0][0].key)]) == [batches[0][0].data]
    with pytest.raises(BadExtent, match="gone"):
        folder.read([(batches[0][1].group, batches[0][1].key)])
    again = folder_at(tmp_path / "saved", max_bytes=int(3.5 * one))
    assert [set(keys) for keys in again.keys] == [set(keys) for keys in folder.keys]
    again.save(some_blocks(9))
    assert folder_at(tmp_path / "saved").read([(b.group, b.key) for b in some_blocks(9)])


def test_a_failed_write_leaves_what_was_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full as the file is made durable: no new file, no partial one, and the old blocks are still read."""
    folder = folder_at(tmp_path)
    blocks = some_blocks(1)
    folder.save(blocks)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            folder.save(some_blocks(2))
    assert len(files(tmp_path)) == 1
    assert folder.read([(blocks[0].group, blocks[0].key)]) == [blocks[0].data]


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    """Neither overwrites what the other wrote, and the one with less room may delete what the other knows of."""
    batches = [some_blocks(seed) for seed in range(3)]
    one = written(tmp_path, batches[0]).stat().st_size
    folder_at(tmp_path / "saved").save(batches[0])
    large, small = folder_at(tmp_path / "saved"), folder_at(tmp_path / "saved", max_bytes=int(1.5 * one))
    large.save(batches[1])
    small.save(batches[2])
    reader = folder_at(tmp_path / "saved")
    for batch in batches[1:]:
        assert reader.read([(block.group, block.key) for block in batch]) == [block.data for block in batch]
    with pytest.raises(OSError, match="No such file"):
        large.read([(batches[0][0].group, batches[0][0].key)])
    large._max_bytes = one
    large.save(batches[0])
    assert large.read([(batches[0][0].group, batches[0][0].key)]) == [batches[0][0].data]


def test_a_look_finds_what_others_wrote(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And lets go of what they deleted; the oldest file of both goes first, and a bad one is told of once."""
    (tmp_path / "notes.blocks").write_text("not an extent")
    batches = [some_blocks(seed) for seed in range(3)]
    wanted = [[(block.group, block.key) for block in batch] for batch in batches]
    first, second = folder_at(tmp_path), folder_at(tmp_path)
    caplog.clear()
    first.save(batches[0])
    assert not any(second.holds(wanted[0]))
    second.refresh()
    assert all(second.holds(wanted[0]))
    assert second.read(wanted[0]) == [block.data for block in batches[0]]
    second.save(batches[1])
    first.save(batches[2])
    second.refresh()
    assert second.read([*wanted[2], *wanted[1]]) == [block.data for block in batches[2] + batches[1]]
    second._max_bytes = 0
    second.save(some_blocks(3))
    first.refresh()
    assert not any(first.holds(wanted[0] + wanted[1] + wanted[2]))
    assert all(first.holds([(block.group, block.key) for block in some_blocks(3)]))
    assert not caplog.text


def old_file(path: Path, blocks: list[StoredBlock]) -> bytes:
    """As such a folder had them before there were slots (`whole`)."""
    head = json.dumps({"numerics_id": MODEL, "block_bytes": list(SIZES)}).encode()
    index = b"".join(
        struct.pack("<H16s16s", block.group, block.key, blake2b(block.key + block.data, digest_size=16).digest())
        for block in blocks
    )
    front = b"TMKV\x00\x00\x00\x01" + struct.pack("<I", len(head)) + head + struct.pack("<I", len(blocks)) + index
    data = front + blake2b(front, digest_size=16).digest() + b"".join(bytes(block.data) for block in blocks)
    path.write_bytes(data)
    return data


def test_files_of_the_old_format_become_extents(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All blocks of whole files are had as before; what is damaged stays, is told of and gives nothing."""
    blocks, others = some_blocks(1), some_blocks(2)
    old_file(tmp_path / f"{MODEL[:16]}-00000000.kv", blocks)
    cut = tmp_path / f"{MODEL[:16]}-00000001.kv"
    cut.write_bytes(old_file(cut, others)[:-1])
    (tmp_path / f"{MODEL[:16]}-00000002.kv{PARTIAL}").write_bytes(b"half")
    data = bytearray(old_file(tmp_path / "c.kv", some_blocks(3)))
    data[-1] ^= 1
    (tmp_path / "c.kv").write_bytes(data)
    for folder in (folder_at(tmp_path), folder_at(tmp_path)):
        kept = [*blocks, *some_blocks(3)[:-1]]
        assert folder.read([(block.group, block.key) for block in kept]) == [block.data for block in kept]
        assert sum(map(len, folder.keys)) == len(kept)
    assert {path.name for path in files(tmp_path)} == {extent_name(MODEL, 0), extent_name(MODEL, 1), cut.name}
    assert "is cut short" in caplog.text


def test_an_old_file_that_cannot_be_rewritten_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a full disk, until there is room; and one that names a KV group which the model does not have."""
    blocks = some_blocks(1)
    old_file(tmp_path / "a.kv", blocks)
    old_file(tmp_path / "b.kv", [StoredBlock(7, b"k" * 16, b"")])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert folder_at(tmp_path).keys == ((), ())
    assert "a.kv is not used: it cannot be rewritten (No space left on device)" in caplog.text
    assert "b.kv is not used: it is damaged" in caplog.text
    assert {path.name for path in files(tmp_path)} == {"a.kv", "b.kv"}
    wanted = [(block.group, block.key) for block in blocks]
    assert folder_at(tmp_path).read(wanted) == [block.data for block in blocks]
    assert {path.name for path in files(tmp_path)} == {extent_name(MODEL, 0), "b.kv"}


def test_a_kv_store_has_the_folder_alone(tmp_path: Path) -> None:
    """Servers that share it keep a store out, which would write over what they read, and the other way round."""
    os.close(claim(tmp_path))
    folder, other = folder_at(tmp_path), folder_at(tmp_path)
    with pytest.raises(OSError, match="used by servers that have it as --kv-save"):
        claim(tmp_path)
    folder.close()
    other.close()
    lock = claim(tmp_path)
    with pytest.raises(ConfigError, match=rf"used by another KV store \(process {os.getpid()}\).*one KV store\.$"):
        open_folder(tmp_path, MODEL, [])
    os.close(lock)
    folder_at(tmp_path)


def test_a_file_being_written_is_no_relic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process opens the folder, which removes what killed ones left, just before the file gets its name."""
    writer = folder_at(tmp_path)
    opening = threading.Thread(target=folder_at, args=(tmp_path,))
    replace = os.replace

    def replace_late(source: Path, target: Path) -> None:
        opening.start()
        opening.join(0.1)
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_late)
    blocks = some_blocks(1)
    writer.save(blocks)
    opening.join()
    assert folder_at(tmp_path).read([(block.group, block.key) for block in blocks]) == [b.data for b in blocks]


def test_a_folder_that_everyone_may_write_to_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever knows the model can make an extent that is taken for KV: checksums are no signatures."""
    folder_at(tmp_path)
    assert not caplog.text
    tmp_path.chmod(0o777)
    folder_at(tmp_path)
    assert "Everyone on this machine may write" in caplog.text


def test_a_folder_may_be_named_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python no shell replaces the ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_folder(Path("~/kv"), MODEL, []).path == tmp_path / "kv"
    assert (tmp_path / "kv").is_dir()


def test_a_folder_that_may_only_be_read_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a lock in it, and with what a killed process and an earlier version left there."""
    blocks = some_blocks(1)
    written(tmp_path, blocks)
    for name in (extent_name(MODEL, 7), f"{MODEL[:16]}-00000007.kv"):
        (tmp_path / (name + PARTIAL)).write_bytes(b"half")
    old_file(tmp_path / f"{MODEL[:16]}-00000000.kv", some_blocks(2))
    before, real_open = set(tmp_path.iterdir()), os.open

    def no_write(path: str | Path, flags: int = 0, *rest: int, **named: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR) or (flags & os.O_CREAT and not os.path.exists(path)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real_open(path, flags, *rest, **named)

    def no_unlink(path: str | Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    wanted = [(block.group, block.key) for block in blocks]
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", no_write)
        patch.setattr(os, "unlink", no_unlink)
        assert folder_at(tmp_path).read(wanted) == [block.data for block in blocks]
        with pytest.raises(OSError, match="Read-only"):
            claim(tmp_path)
    assert set(tmp_path.iterdir()) == before
    os.close(claim(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", no_write)
        patch.setattr(os, "unlink", no_unlink)
        folder = folder_at(tmp_path)
    assert folder.read(wanted) == [block.data for block in blocks]
    with pytest.raises(OSError, match="used by servers"):
        claim(tmp_path)
    folder.close()
