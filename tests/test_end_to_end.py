"""One small training by the real command, and all that a user does with its folder afterwards."""

import json
import math
import shutil
from pathlib import Path

import pytest
import runs

from flaxformer_lite import evaluate as evaluate_module
from flaxformer_lite import translate
from flaxformer_lite.data.datasets import Dataset
from flaxformer_lite.training import report

STEPS = runs.SMALL["train.num_steps"]


@pytest.fixture(scope="module")
def records(finished_run: Path) -> list[dict]:
    """Every line of metrics.jsonl."""
    return [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def half_finished_run(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run as it stood when its test line was about to be written, the last line torn."""
    workdir = tmp_path_factory.mktemp("half") / "run"
    shutil.copytree(finished_run, workdir)
    kept = [line for line in (workdir / "metrics.jsonl").read_text().splitlines() if '"test"' not in line]
    (workdir / "metrics.jsonl").write_text("\n".join(kept) + '\n{"step": 48, "spl')
    return workdir


def test_every_logged_step_has_one_train_line_with_the_names_that_stay(records):
    train = [record for record in records if record["split"] == "train"]
    assert [record["step"] for record in train] == list(range(1, STEPS + 1))
    for record in train:
        assert {"loss", "learning_rate", "grad_norm", "tokens_per_second", "accuracy"} <= record.keys()
        assert record["loss"] > 0 and record["grad_norm"] > 0 and record["tokens_per_second"] > 0


def test_the_learning_rate_in_the_log_is_the_schedules(records):
    warmup, peak = runs.SMALL["optim.warmup_steps"], runs.SMALL["optim.learning_rate"]
    for record in records:
        if record["split"] == "train":
            step = record["step"]
            expected = peak * min(step / warmup, (warmup / step) ** 0.5)
            assert record["learning_rate"] == pytest.approx(expected, rel=1e-5)


def test_each_evaluation_has_a_validation_line(records):
    validation = [record for record in records if record["split"] == "validation"]
    assert [record["step"] for record in validation] == [24, 48]
    for record in validation:
        assert {"loss", "perplexity", "accuracy", "exact_match", "bleu", "chrf"} <= record.keys()
        assert record["perplexity"] == pytest.approx(math.exp(record["loss"]))


def test_the_log_ends_with_one_test_line_at_the_best_step(records):
    validation = {record["step"]: record["loss"] for record in records if record["split"] == "validation"}
    assert [record["split"] for record in records].count("test") == 1
    assert records[-1]["split"] == "test"
    assert records[-1]["step"] == min(validation, key=validation.get)


def test_training_learns(records):
    """At first every piece is as likely as any other; soon the loss is far below that."""
    train = [record["loss"] for record in records if record["split"] == "train"]
    uniform = math.log(runs.SMALL["data.vocab_size"])
    assert abs(train[0] - uniform) < 1.5
    assert sum(train[-3:]) / 3 < 0.7 * uniform
    assert records[-1]["loss"] < 0.7 * uniform


def test_the_workdir_holds_what_the_design_says_and_nothing_else(finished_run):
    names = {path.name for path in finished_run.iterdir()}
    events = {name for name in names if name.startswith("events.")}
    assert names - events == {"config.json", "metrics.jsonl", "tokenizer.model", "checkpoints", "samples"}
    assert len(events) == 1 and next(finished_run.glob("events.*")).stat().st_size > 1000
    # The newest two, and what was the best when the last one was saved, which is scored after that.
    assert {path.name for path in (finished_run / "checkpoints").iterdir()} == {"24", "40", "48"}
    assert {path.name for path in (finished_run / "samples").iterdir()} == {"24.txt", "48.txt", "test.txt"}


def test_samples_show_source_translation_and_reference(finished_run):
    text = (finished_run / "samples" / "48.txt").read_text(encoding="utf-8")
    source = Dataset("cldr_translate/en-de").read(runs.SMALL["data.validation_split"])
    assert f"source       {source.source[0]}\n" in text and f"reference    {source.target[0]}\n" in text
    assert text.count("translation  ") == runs.SMALL["train.decode_examples"]


def test_the_user_sees_what_was_resolved_and_where_everything_lies(finished_run):
    text = (finished_run.parent / "stderr.txt").read_text(encoding="utf-8")
    for part in (
        "1,000 examples",
        "vocabulary 512",
        "parameters",
        "mesh over 1 x cpu",
        "GFLOPs a step",
        "BLEU signature",
    ):
        assert part in text
    assert str(finished_run) in text and "Traceback" not in text and "Warning" not in text


def test_evaluate_prints_the_runs_own_test_line_by_kind_and_with_the_signature(finished_run, records):
    process = runs.run("evaluate", f"--workdir={finished_run}", "--split=test")
    assert process.returncode == 0, process.stderr
    for name in ("loss", "perplexity", "accuracy", "exact_match", "bleu", "chrf", "exact_match/money"):
        assert any(line.split()[0] == name for line in process.stdout.splitlines()), name
    assert "sacreBLEU signature nrefs:1|case:mixed" in process.stdout
    values, _ = evaluate_module.evaluate(finished_run, "test")
    assert values.keys() == records[-1].keys() - {"step", "split"}
    for name, value in values.items():
        assert value == pytest.approx(records[-1][name], rel=1e-5), name
    assert report.table(values) in process.stdout


def test_translate_keeps_order_and_line_count_from_stdin_and_from_files(finished_run, tmp_path):
    lines = ["Monday, 3 June 2024", "", "12 kilometers", "", "12 kilometers", "3 days"]
    process = runs.run("translate", f"--workdir={finished_run}", input="".join(f"{x}\n" for x in lines).encode())
    assert process.returncode == 0, process.stderr
    translated = process.stdout.removesuffix("\n").split("\n")
    assert len(translated) == len(lines)
    assert [i for i, line in enumerate(translated) if not line] == [1, 3]
    assert translated[2] == translated[4] != translated[0]
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("\n".join(lines), encoding="utf-8")  # the last line without its end
    process = runs.run("translate", f"--workdir={finished_run}", f"--input={source}", f"--output={target}")
    assert (process.returncode, process.stdout) == (0, "")
    assert target.read_text(encoding="utf-8").removesuffix("\n").split("\n") == translated
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.txt"]
    assert translate.load(finished_run)(lines) == translated


def test_the_three_lines_of_python_run_as_they_stand(finished_run, capsys):
    code = translate.__doc__.split("\n\n")[1].strip()
    assert len(code.splitlines()) == 3
    exec(code.replace("runs/mine", str(finished_run)))
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_both_commands_work_on_a_half_finished_workdir(half_finished_run, finished_run):
    before = runs.files_below(half_finished_run)
    assert translate.load(half_finished_run)(["3 days"]) == translate.load(finished_run)(["3 days"])
    values, _ = evaluate_module.evaluate(half_finished_run, "validation")
    best = min(runs.lines_of(finished_run, "validation"), key=lambda record: record["loss"])
    assert values["loss"] == pytest.approx(best["loss"], rel=1e-5)
    assert runs.files_below(half_finished_run) == before
