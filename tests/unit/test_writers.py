"""metrics.jsonl, with a system call for each line; the progress bar, its log lines, and tables."""

import io
import json
import math
import os

import pytest

from flaxformer_lite.runs import metrics_log
from flaxformer_lite.runs.metrics_log import MetricsWriter, read_metrics, remove_torn_line
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training.progress import Progress
from flaxformer_lite.training.run_report import columns


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A fake clock: seconds, in a list of 1."""
    now = [1000.0]
    monkeypatch.setattr(metrics_log.time, "monotonic", lambda: now[0])
    return now


def write(path, *records, tail=b""):
    path.write_bytes(b"".join(json.dumps(record).encode() + b"\n" for record in records) + tail)


def record(step, split="train", **values):
    return {"step": step, "split": split, "seconds": 0.0, **values}


def test_every_line_of_json_is_written_by_one_system_call(path, monkeypatch):
    written, real = [], os.write
    writer = MetricsWriter(path.parent)

    def watched(file, data):
        if os.path.samestat(os.fstat(file), path.stat()):  # TensorBoard writes too
            written.append(data)
        return real(file, data)

    monkeypatch.setattr(metrics_log.os, "write", watched)
    writer.write(3, "train", {"loss": 1.5, "accuracy": 0.25})
    writer.write(5, "validation", {"loss": 1.25})
    writer.close()
    lines = path.read_bytes().splitlines(keepends=True)
    assert written == lines
    assert [json.loads(line) for line in lines] == [
        {"step": 3, "split": "train", "seconds": 0.0, "loss": 1.5, "accuracy": 0.25},
        {"step": 5, "split": "validation", "seconds": 0.0, "loss": 1.25},
    ]


def test_a_line_has_the_seconds_of_all_starts_and_an_old_log_without_them_counts_as_zero(
    path, clock
):
    write(path, {"step": 1, "split": "train", "loss": 3.0})  # of an older version
    for started, pause in ((None, 7.0), (1.0, 100.0)):
        clock[0] += pause  # between the starts
        writer = MetricsWriter(path.parent, started=started and clock[0] - started)
        for step in (2, 3):
            clock[0] += 2.54
            writer.write(step, "train", {"loss": 2.0})
        writer.close()
    seconds = [json.loads(line).get("seconds") for line in path.read_text().splitlines()]
    assert seconds == [None, 2.5, 5.1, pytest.approx(8.6), pytest.approx(11.2)]


def test_lines_can_be_read_before_the_writer_is_closed(path):
    writer = MetricsWriter(path.parent)
    writer.write(3, "train", {"loss": 1.5})
    assert read_metrics(path) == [record(3, loss=1.5)]
    writer.close()


def test_values_that_json_cannot_represent_become_null(path):
    writer = MetricsWriter(path.parent)
    writer.write(
        3, "train", {"loss": math.nan, "perplexity": math.inf, "low": -math.inf, "accuracy": 0.0}
    )
    writer.close()
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == record(
        3, loss=None, perplexity=None, low=None, accuracy=0.0
    )


def test_tensorboard_gets_the_same_values(path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        metrics_log.tensorboardX.SummaryWriter, "add_scalar", lambda self, *args: seen.append(args)
    )
    writer = MetricsWriter(path.parent)
    writer.write(3, "train", {"loss": 1.5, "accuracy": 0.25})
    writer.close()
    assert seen == [("train/loss", 1.5, 3), ("train/accuracy", 0.25, 3)]
    assert list(path.parent.glob("events.*"))


def test_a_second_writer_appends_and_removes_an_incomplete_last_line(path):
    write(path, record(1, loss=3.0), record(2, loss=2.0), tail=b'{"step": 3, "spl')
    writer = MetricsWriter(path.parent)
    writer.write(3, "train", {"loss": 1.0})
    writer.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        record(1, loss=3.0),
        record(2, loss=2.0),
        record(3, loss=1.0),
    ]


def test_a_disabled_writer_writes_nothing(path):
    writer = MetricsWriter(path.parent, enabled=False)
    writer.write(3, "train", {"loss": 1.5})
    writer.close()
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"", b""),
        (b"a\n", b"a\n"),
        (b"a\nbc", b"a\n"),
        (b"abc", b""),
        (b"a\n\n", b"a\n\n"),
        (b"a\n{}\nx", b"a\n{}\n"),
    ],
)
def test_only_an_incomplete_last_line_is_removed(path, before, after):
    path.write_bytes(before)
    remove_torn_line(path)
    assert path.read_bytes() == after


def test_a_missing_file_has_no_lines(path):
    remove_torn_line(path)
    assert not path.exists() and read_metrics(path) == []


def test_of_several_lines_of_a_split_and_step_only_the_last_is_read(
    path,
):
    first, second = record(1, loss=3.0), record(2, loss=2.0)
    validation, again = record(1, "validation", loss=5.0), record(1, loss=1.0)
    write(path, first, second, validation, again)
    assert read_metrics(path) == [second, validation, again]


def test_a_line_names_its_parameters_if_they_are_given(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(3, "test", {"loss": 1.5}, parameters="average of steps 2, 3")
    writer.write(5, "test", {"loss": 1.0})
    writer.close()
    expected = [
        record(3, "test", parameters="average of steps 2, 3", loss=1.5),
        record(5, "test", loss=1.0),
    ]
    assert read_metrics(tmp_path / "metrics.jsonl") == expected


def test_an_incomplete_last_line_is_not_read(path):
    write(path, record(1, loss=3.0), tail=json.dumps(record(2, loss=2.0)).encode())
    assert read_metrics(path) == [record(1, loss=3.0)]


def test_scores_are_of_the_validation_split_by_step(path):
    write(
        path,
        record(5, loss=9.0),
        record(5, "validation", loss=3.0),
        record(7, "validation", loss=2.0),
    )
    assert metrics_log.validation_scores(path, lambda r: -r["loss"]) == {5: -3.0, 7: -2.0}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_log_file_gets_a_line_every_10_seconds_with_the_remaining_time(clock, capsys):
    progress = Progress(100, 500, seconds=10)
    clock[0] += 9
    progress.update(110, {"loss": 1.23456})
    assert capsys.readouterr().err == ""
    clock[0] += 11
    progress.update(120, {"loss": 1.23456, "tokens/s": 12345.6})
    # 20 steps in 20 seconds, 380 left
    assert capsys.readouterr().err == "step 120/500  loss 1.23  tokens/s 12,346  6:20 left\n"
    progress.update(121, {"loss": 1.0})
    progress.close()
    assert capsys.readouterr().err == ""


def test_the_remaining_time_may_have_hours(clock, capsys):
    progress = Progress(0, 1000, seconds=10)
    clock[0] += 10
    progress.update(1, {})
    assert capsys.readouterr().err.endswith("2:46:30 left\n")


def test_a_terminal_gets_a_bar_with_the_step_and_the_values(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    progress = Progress(3, 7)
    for step in (4, 5, 7):
        progress.update(step, {"loss": 0.125})
    progress.note("a note")
    progress.close()
    shown = terminal.getvalue()
    assert "3/7" in shown and "7/7" in shown and "100%" in shown
    assert "loss 0.125" in shown and "a note\n" in shown and "left\n" not in shown


def test_a_note_is_a_line_in_a_log_file(capsys):
    Progress(0, 7).note("hello")
    assert capsys.readouterr().err == "hello\n"


def test_disabled_progress_shows_nothing(monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    progress = Progress(0, 7, enabled=False)
    clock[0] += 100
    progress.update(3, {"loss": 1.0})
    progress.note("a note")
    progress.close()
    assert terminal.getvalue() == ""


def test_a_table_aligns_its_first_column_left_and_the_others_right():
    rows = [["kind", "right", "of"], ["date", "7", "11"], ["duration", "113", "1009"]]
    assert columns(rows) == "kind      right    of\ndate          7    11\nduration    113  1009"


def test_lines_of_a_table_have_no_trailing_spaces():
    assert columns([["a long name", ""], ["b", "5"]]) == "a long name\nb            5"


def test_a_log_that_a_disk_fails_to_read_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/proc/self/mem")  # reads of its start fail
    with pytest.raises(OSError, match="Input/output error") as failed:
        read_metrics(path)
    assert failed.value.filename == str(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]\n", r"line 1: expected a JSON object, got b'\[\]'; restore the file from a copy"),
        ("\x00\r\x01\n", r"line 1: expected a JSON object, got b'\\x00\\r\\x01'"),
        ("[" * 100_000 + "\n", r"line 1: expected a JSON object"),
        ('{"step": 1, "loss": 2.0}\n', r"line 1: split: expected a text, got None"),
        ('{"split": "train"}\n', r"line 1: step: expected a number, got None"),
        ('{"split": "train", "step": "1"}\n', r"line 1: step: expected a number, got '1'"),
        (
            '{"split": "train", "step": 1, "loss": []}\n',
            r"line 1: loss: expected a number, got \[\]",
        ),
    ],
)
def test_a_damaged_line_is_refused_by_its_number(path, content, message):
    path.write_text(content, newline="")
    with pytest.raises(InputError, match=rf"metrics\.jsonl, {message}"):
        read_metrics(path)


def test_a_log_that_is_a_folder_is_refused(path):
    path.mkdir()
    with pytest.raises(InputError, match=r"metrics\.jsonl: cannot be read: Is a directory\.$"):
        read_metrics(path)


def test_a_validation_line_without_the_metric_is_refused(path):
    write(path, record(1, "validation", loss=3.0))
    with pytest.raises(InputError, match=r"a validation line has no 'bleu'; restore the file"):
        metrics_log.validation_scores(path, lambda values: values["bleu"])
