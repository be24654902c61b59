"""Compiled programs on disk: an entry that a killed process left unfinished is deleted, a whole one is kept."""

import os
import zlib

import pytest

from flaxformer_lite import runtime

WHOLE = zlib.compress(bytes(range(256)) * 50)


@pytest.fixture
def cache(tmp_path):
    (tmp_path / "jit_whole-cache").write_bytes(WHOLE)
    (tmp_path / "jit_torn-cache").write_bytes(WHOLE[: len(WHOLE) // 2])
    (tmp_path / "jit_torn-atime").write_bytes(b"12345678")
    return tmp_path


def entries(folder):
    return sorted(path.name for path in folder.glob("*-cache"))


def test_a_truncated_entry_is_deleted_and_a_whole_one_kept(cache):
    runtime.remove_truncated(cache)
    assert entries(cache) == ["jit_whole-cache"]


def test_an_empty_entry_counts_as_truncated(cache):
    (cache / "jit_empty-cache").write_bytes(b"")
    runtime.remove_truncated(cache)
    assert entries(cache) == ["jit_whole-cache"]


def test_what_was_checked_before_is_not_read_again(cache):
    runtime.remove_truncated(cache)
    old = (cache / runtime.STAMP).stat().st_mtime - 10
    (cache / "jit_old-cache").write_bytes(b"torn, but from before the last check")
    os.utime(cache / "jit_old-cache", (old, old))
    (cache / "jit_new-cache").write_bytes(b"torn")
    runtime.remove_truncated(cache)
    assert entries(cache) == ["jit_old-cache", "jit_whole-cache"]


def test_an_empty_folder_stays_empty(tmp_path):
    runtime.remove_truncated(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_entry_by_zstandard_counts_as_whole_where_it_cannot_be_read():
    magic = b"\x28\xb5\x2f\xfd"
    try:
        import zstandard
    except ImportError:
        assert runtime.is_whole(magic + b"anything")
    else:
        whole = zstandard.ZstdCompressor().compress(WHOLE)
        assert runtime.is_whole(whole)
        assert not runtime.is_whole(whole[:-9])


def test_a_folder_that_cannot_be_made_is_told_and_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    runtime.enable_compilation_cache(tmp_path / "file" / "cache")
    assert "no compiled programs are kept there" in caplog.text
