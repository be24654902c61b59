"""Lines are read in windows: their borders depend only on the bytes, and their size is bounded."""

import bz2
import gzip
import hashlib
import io
import lzma
import os
import threading

import pytest

from flaxformer_lite.lines import line_windows
from flaxformer_lite.lines.line_windows import LineReader, Window, as_text, decode_line

RAW = "".join(f"line {i} é\r\n" if i % 3 else "\n" for i in range(17)).encode() + b"the last"
LINES = [f"line {i} é" if i % 3 else "" for i in range(17)] + ["the last"]


@pytest.fixture
def path(tmp_path):
    (tmp_path / "in").write_bytes(RAW)
    return tmp_path / "in"


def windows_of(path, most=5, **skip):
    with LineReader(path) as reader:
        if skip:
            reader.skip(**skip)
        return list(reader.windows(most))


def test_windows_have_all_lines_in_order_with_their_numbers(path):
    windows = windows_of(path)
    assert [line for window in windows for line in window.lines] == LINES
    assert [len(window.lines) for window in windows] == [5, 5, 5, 3]
    assert [window.numbers for window in windows] == [
        range(1, 6),
        range(6, 11),
        range(11, 16),
        range(16, 19),
    ]
    assert {window.name for window in windows} == {f"{path}, line"}


def test_a_compressed_file_is_decompressed_and_its_size_is_unknown(path):
    packed = path.with_suffix(".gz")
    packed.write_bytes(gzip.compress(RAW))
    assert [window.lines for window in windows_of(packed)] == [
        window.lines for window in windows_of(path)
    ]
    with LineReader(packed) as reader:
        first = next(reader.windows(5))
        done = reader.done()
    rest = windows_of(packed, bytes=done["bytes"], lines=done["lines"])
    assert [*first.lines, *(line for window in rest for line in window.lines)] == LINES
    for file, size in ((packed, None), (path, len(RAW))):
        with LineReader(file) as reader:
            assert reader.size == size


def test_a_truncated_compressed_file_is_refused(tmp_path):
    (tmp_path / "in.gz").write_bytes(gzip.compress(RAW)[:-11])
    with pytest.raises(ValueError, match=r"^--input=.*in\.gz: cannot be read: \w+"):
        windows_of(tmp_path / "in.gz")


def test_a_window_ends_before_it_is_too_large_and_no_line_is_lost(path, monkeypatch):
    monkeypatch.setattr(line_windows, "WINDOW_BYTES", 31)
    windows = windows_of(path, most=7)
    assert [line for window in windows for line in window.lines] == LINES
    assert len(windows) > 5 and max(len(as_text(window.lines).encode()) for window in windows) <= 31


def test_a_line_larger_than_a_window_is_refused_by_number_after_the_windows_before_it(
    path, monkeypatch
):
    monkeypatch.setattr(line_windows, "WINDOW_BYTES", 31)
    path.write_bytes(b"a\n" * 7 + b"b" * 31 + b"\nc\n")
    with LineReader(path) as reader:
        windows = reader.windows(5)
        assert next(windows).lines == ["a"] * 5
        with pytest.raises(
            ValueError, match=r"^.*in, line 8: over 31 bytes; cut it into shorter lines"
        ):
            next(windows)


def test_a_reader_that_skips_the_done_part_yields_the_remaining_windows(path):
    with LineReader(path) as reader:
        windows = reader.windows(5)
        first, second = next(windows), next(windows)
        done, rest = reader.done(), list(windows)
        assert reader.bytes == reader.size == len(RAW) and reader.lines == len(LINES)
    assert done["lines"] == 10 and (first.first, second.first) == (0, 5)
    assert done["sha256"] == hashlib.sha256(RAW[: done["bytes"]]).hexdigest()
    with LineReader(path) as reader:
        assert reader.done() == LineReader.START
        assert reader.skip(bytes=done["bytes"], lines=done["lines"]) == done["sha256"]
        assert reader.done() == done and list(reader.windows(5)) == rest


def test_the_hash_of_the_skipped_part_changes_with_its_bytes_and_its_length(path):
    def fingerprint():
        with LineReader(path) as reader:
            return reader.skip(bytes=50, lines=5)

    before = fingerprint()
    path.write_bytes(RAW[:50] + b"something else")
    assert fingerprint() == before
    for changed in (RAW[:30] + b"x" + RAW[31:], RAW[:49]):
        path.write_bytes(changed)
        assert fingerprint() != before


def test_a_byte_order_mark_is_removed_at_the_start_of_a_line_only():
    mark = b"\xef\xbb\xbf"
    lines = [decode_line(mark + b"a" + mark + b"b\r\n", "a", number) for number in (1, 2)]
    assert lines == ["a\ufeffb", "a\ufeffb"]


def test_a_line_that_is_not_utf_8_is_refused_by_its_number_in_the_file(path):
    path.write_bytes(b"good\n" * 7 + b"no t\xe9\xe9n\n")
    with LineReader(path) as reader, pytest.raises(ValueError) as caught:
        list(reader.windows(5))
    assert str(caught.value).startswith(
        f"{path}, line 8: expected UTF-8, got byte 0xe9 at column 5;"
    )
    assert reader.lines == 5


def test_a_pipe_yields_a_window_as_soon_as_it_is_full_and_its_size_is_unknown(monkeypatch):
    read, write = os.pipe()
    with os.fdopen(read, "rb") as file, os.fdopen(write, "wb") as pipe:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(file))
        reader = LineReader(None)
        windows, found = reader.windows(2), []
        pipe.write(b"a\nb\nc\n")
        pipe.flush()
        waiting = threading.Thread(target=lambda: found.append(next(windows)))
        waiting.start()
        waiting.join(timeout=30)
        assert found == [Window(["a", "b"], 0, "standard input, line")] and reader.size is None
        pipe.close()
        assert [window.lines for window in windows] == [["c"]]


def test_the_end_of_the_input_is_read_once(monkeypatch):
    class Terminal(io.BytesIO):
        ends = 0

        def isatty(self):
            return True

        def readline(self, *size):
            line = super().readline(*size)
            self.ends += not line
            return line

    terminal = Terminal(RAW)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(terminal))
    with LineReader(None) as reader:
        assert [len(window.lines) for window in reader.windows(17)] == [17, 1]
    assert terminal.ends == 1


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_standard_input_is_decompressed(monkeypatch, compress):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(compress(RAW))))
    with LineReader(None) as reader:
        found = [line for window in reader.windows(17) for line in window.lines]
    assert found == LINES and reader.size is None


def test_a_compressed_file_as_standard_input_has_no_known_size(monkeypatch, tmp_path):
    (tmp_path / "in").write_bytes(gzip.compress(RAW))
    with open(tmp_path / "in", encoding="utf-8") as file:
        monkeypatch.setattr("sys.stdin", file)
        with LineReader(None) as reader:
            assert [line for window in reader.windows(17) for line in window.lines] == LINES
        assert reader.size is None


def test_an_empty_file_has_no_window_and_an_unreadable_file_is_refused(path, tmp_path):
    path.write_bytes(b"")
    assert windows_of(path) == []
    for name in ("missing", "."):
        with pytest.raises(ValueError, match=r"^--input=.*: cannot be read: "):
            LineReader(tmp_path / name)


def test_utf_16_is_refused_with_what_to_do(path):
    path.write_bytes("\ufeffone\n".encode("utf-16-le"))
    with pytest.raises(
        ValueError, match=rf"^{path}: expected UTF-8, got UTF-16; convert it with iconv"
    ):
        windows_of(path)
