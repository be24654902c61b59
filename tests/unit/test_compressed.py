"""Compressed files: recognised by their first bytes, written by the end of their name."""

import bz2
import gzip
import importlib.util
import lzma
import os
import threading
from pathlib import Path

import pytest

from flaxformer_lite.system import compressed
from flaxformer_lite.system.errors import InputError

TEXT = "Grüße\n".encode() * 3011
HAS_ZSTD = any(map(importlib.util.find_spec, ("compression", "zstandard")))
COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("name", ["in{}", "in", "in.txt", "IN{}".upper()])
def test_a_file_is_decompressed_whatever_its_name(suffix, name, tmp_path):
    path = tmp_path / name.format(suffix.upper() if name.isupper() else suffix)
    path.write_bytes(COMPRESS[suffix](TEXT))
    with compressed.open_bytes(path) as file:
        assert compressed.is_compressed(file)
        assert (
            file.readline() == "Grüße\n".encode() and file.read() == TEXT[len("Grüße\n".encode()) :]
        )


@pytest.mark.parametrize(
    "content", [b"", b"a", b"BZh is a word\n", b"BZh91 and more\n", TEXT, b"\xef\xbb\xbfa\n"]
)
@pytest.mark.parametrize("name", ["in", "in.gz"])
def test_other_bytes_are_read_as_they_are(content, name, tmp_path):
    (tmp_path / name).write_bytes(content)
    with compressed.open_bytes(tmp_path / name) as file:
        assert not compressed.is_compressed(file) and file.read() == content


@pytest.mark.parametrize("suffix", COMPRESS)
def test_parts_one_after_another_are_one_file(suffix, tmp_path):
    compress = compressed.compressor(Path(f"out{suffix}"))
    (tmp_path / "out").write_bytes(compress(TEXT) + compress(b"") + compress(b"more\n"))
    with compressed.open_bytes(tmp_path / "out") as file:
        assert file.read() == TEXT + b"more\n"


@pytest.mark.parametrize("suffix", COMPRESS)
def test_the_same_content_is_compressed_to_the_same_bytes(suffix):
    compress = compressed.compressor(Path(f"out{suffix.upper()}"))
    assert compress(TEXT) == compress(TEXT) != TEXT


def test_a_pipe_is_decompressed_too(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(
        target=lambda: (tmp_path / "pipe").write_bytes(gzip.compress(TEXT)), daemon=True
    )
    writer.start()
    with compressed.open_bytes(tmp_path / "pipe") as file:
        assert file.read() == TEXT
    writer.join()


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kept", [11, -5])
def test_a_truncated_file_is_unreadable(suffix, kept, tmp_path):
    (tmp_path / "in").write_bytes(COMPRESS[suffix](os.urandom(5000))[:kept])
    with pytest.raises(compressed.UNREADABLE), compressed.open_bytes(tmp_path / "in") as file:
        file.read()


@pytest.mark.skipif(HAS_ZSTD, reason="zstd is installed")
def test_zstd_without_a_library_says_what_to_install(tmp_path):
    (tmp_path / "in").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    with pytest.raises(OSError, match=r"zstd needs Python 3\.14 or the package zstandard"):
        compressed.open_bytes(tmp_path / "in")
    with pytest.raises(InputError, match=r"^out\.zst: zstd needs Python 3\.14"):
        compressed.compressor(Path("out.zst"))


@pytest.mark.parametrize(
    ("name", "short"),
    [("a/b.en.gz", "a/b.en"), ("b.EN.XZ", "b.EN"), ("b.en", "b.en"), (".gz", ""), ("gz", "gz")],
)
def test_the_suffix_of_compression_is_removed(name, short):
    assert compressed.without_suffix(name) == short
