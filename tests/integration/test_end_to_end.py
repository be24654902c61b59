"""A small training of each architecture, and the commands on its workdir."""

import dataclasses
import functools
import io
import itertools
import json
import math
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import ctranslate2
import jax
import numpy as np
import optax
import pytest
import runs
import sentencepiece

from flaxformer_lite import classify, generate, trained, translate
from flaxformer_lite import evaluate as evaluate_module
from flaxformer_lite.cli import commands
from flaxformer_lite.cli.run_flags import PLOTS
from flaxformer_lite.config import CHOICES, ModelConfig
from flaxformer_lite.data import pipeline
from flaxformer_lite.data.sources.datasets import Dataset
from flaxformer_lite.evaluator import SAMPLES, Evaluator
from flaxformer_lite.model import parameters, transformer
from flaxformer_lite.system import runtime
from flaxformer_lite.training import metrics, parallel, run_report
from flaxformer_lite.training import state as state_lib
from flaxformer_lite.training import step as step_lib
from flaxformer_lite.training.saved_evaluation import Evaluation

STEPS = runs.SMALL["train.num_steps"]


@pytest.fixture(scope="module")
def records(finished_run: Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def half_finished_run(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run before its test line was written, with an incomplete last line."""
    workdir = tmp_path_factory.mktemp("half") / "run"
    shutil.copytree(finished_run, workdir)
    kept = [
        line
        for line in (workdir / "metrics.jsonl").read_text().splitlines()
        if '"test"' not in line
    ]
    (workdir / "metrics.jsonl").write_text("\n".join(kept) + '\n{"step": 48, "spl')
    return workdir


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> Callable[..., str]:
    """Runs a command in this process and returns its output."""
    monkeypatch.setattr(runtime, "start", lambda: None)  # it would change this process
    monkeypatch.setattr(commands, "exit_now", sys.exit)  # the real one ends the process

    def run(*arguments: str, input: bytes = b"") -> str:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(input)))
        with pytest.raises(SystemExit) as ended:
            commands.main(list(arguments))
        out, err = capfd.readouterr()
        assert ended.value.code == 0, err
        return out

    return run


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> list[Evaluation]:
    """The results of `evaluate_run`, from the commands of the test."""
    results, evaluate_run = [], evaluate_module.evaluate_run

    def recorded(*arguments, **options) -> Evaluation:
        results.append(evaluate_run(*arguments, **options))
        return results[-1]

    monkeypatch.setattr(evaluate_module, "evaluate_run", recorded)
    return results


def best_step(workdir: Path) -> int:
    """Returns the step of the test line."""
    (test,) = runs.lines_of(workdir, "test")
    return test["step"]


def lines_of(text: str) -> list[str]:
    """Returns the lines of a text, which end at line feeds only."""
    return text.removesuffix("\n").split("\n")


def test_every_step_has_a_train_line_with_the_documented_names(records):
    train = [record for record in records if record["split"] == "train"]
    assert [record["step"] for record in train] == list(range(1, STEPS + 1))
    for record in train:
        names = {"loss", "learning_rate", "grad_norm", "tokens_per_second", "accuracy"}
        assert names <= record.keys()
        assert record["loss"] > 0 and record["grad_norm"] > 0 and record["tokens_per_second"] > 0
        assert 0 <= record["data_wait"] < 1 and 0 < record["goodput"] < 1
        assert record["mfu"] is None  # the peak of a CPU is unknown


def test_the_log_has_the_learning_rate_of_the_schedule(records):
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
    validation = {
        record["step"]: record["loss"] for record in records if record["split"] == "validation"
    }
    assert [record["split"] for record in records].count("test") == 1
    assert records[-1]["split"] == "test"
    assert records[-1]["step"] == min(validation, key=validation.get)


def test_training_learns(records):
    """The loss starts near that of uniform predictions, and ends far below it."""
    train = [record["loss"] for record in records if record["split"] == "train"]
    uniform = math.log(runs.SMALL["data.vocab_size"])
    assert abs(train[0] - uniform) < 1.5
    assert sum(train[-3:]) / 3 < 0.7 * uniform
    assert records[-1]["loss"] < 0.7 * uniform


def test_the_workdir_has_only_the_documented_files(finished_run):
    names = {path.name for path in finished_run.iterdir()}
    events = {name for name in names if name.startswith("events.")}
    assert names - events == {
        "config.json",
        "metrics.jsonl",
        "tokenizer.model",
        "checkpoints",
        "samples",
    }
    assert len(events) == 1 and next(finished_run.glob("events.*")).stat().st_size > 1000
    # The newest 2, and the best when the last one was saved, which is evaluated after that.
    assert {path.name for path in (finished_run / "checkpoints").iterdir()} == {"24", "40", "48"}
    kept = {
        f"test.step{best_step(finished_run)}.greedy.{name}"
        for name in ("hypotheses.txt", "scores.json")
    }
    assert {path.name for path in (finished_run / "samples").iterdir()} == {
        "24.txt",
        "48.txt",
        "test.txt",
    } | kept


def test_samples_show_source_translation_and_reference(finished_run):
    text = (finished_run / "samples" / "48.txt").read_text(encoding="utf-8")
    source = Dataset("cldr_translate/en-de").read(runs.SMALL["data.validation_split"])
    assert (
        f"source       {source.source[0]}\n" in text
        and f"reference    {source.target[0]}\n" in text
    )
    assert text.count("translation  ") == runs.SMALL["train.decode_examples"]


def test_the_messages_of_a_run_have_its_sizes_and_its_files(finished_run):
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
    workdir = (finished_run.parent / "made").read_text()
    assert f"Written to {workdir}: " in text and "Traceback" not in text and "Warning" not in text


@pytest.mark.usefixtures("quickly_compiled")
def test_evaluate_prints_the_test_line_with_kinds_and_signatures(
    finished_run, records, command, evaluations, tmp_path
):
    words = [f"--workdir={finished_run}", "--split=test", f"--output={tmp_path}"]
    printed = command("evaluate", *words)
    for name in (
        "loss",
        "perplexity",
        "accuracy",
        "exact_match",
        "bleu",
        "chrf",
        "exact_match/money",
    ):
        assert any(line.split()[0] == name for line in printed.splitlines()), name
    assert "sacreBLEU signature nrefs:1|case:mixed" in printed
    values = evaluations[0].values
    assert values.keys() == records[-1].keys() - {"step", "seconds", "split"}
    for name, value in values.items():
        assert value == pytest.approx(records[-1][name], rel=1e-5), name
    assert run_report.table(values) in printed
    # It writes the files of the training again; the loss may differ by the number of devices.
    name = f"test.step{best_step(finished_run)}.greedy"
    paths = [tmp_path / f"{name}.hypotheses.txt", tmp_path / f"{name}.scores.json"]
    assert sorted(tmp_path.iterdir()) == paths
    assert printed.splitlines()[-2:] == list(map(str, paths))
    for path in paths:
        own = (finished_run / "samples" / path.name).read_text(encoding="utf-8")
        if path.suffix == ".txt":
            assert path.read_text(encoding="utf-8") == own
        else:
            facts, expected = json.loads(path.read_text(encoding="utf-8")), json.loads(own)
            # The run was copied.
            assert facts.pop("run") == str(finished_run) and expected.pop("run")
            assert facts.pop("scores") == pytest.approx(expected.pop("scores"), rel=1e-5)
            assert facts == expected


def test_score_prints_the_logged_scores_for_the_saved_translations(
    finished_run, records, command, tmp_path
):
    (kept,) = (finished_run / "samples").glob("*.hypotheses.txt")
    reference, other = tmp_path / "reference.txt", tmp_path / "other.txt"
    texts = Dataset("cldr_translate/en-de").read(runs.SMALL["data.test_split"]).target
    reference.write_bytes("".join(f"{text}\n" for text in texts).encode())
    other.write_bytes(kept.read_bytes())
    files = [f"--hypotheses={kept}", f"--references={reference}"]
    names = ("exact_match", "bleu", "chrf")
    printed = command("score", *files)
    assert run_report.table({name: records[-1][name] for name in names}) in printed
    assert (
        "bleu: sacreBLEU signature nrefs:1|" in printed
        and "chrf: sacreBLEU signature nrefs:1|" in printed
    )
    both = command("score", f"--hypotheses={kept}", f"--references={reference},{other}")
    assert both.splitlines()[1].split() == ["exact_match", "100.00", "%"] and "nrefs:2|" in both
    tokenized = command(
        "score",
        *files,
        "--tokenized",
        "--bootstrap=40",
        "--bootstrap_seed=7",
        f"--baseline={other}",
    )
    assert (
        "bleu_tokenized: sacreBLEU signature nrefs:1|bs:40|ar:40|seed:7|" in tokenized
        and "tok:none" in tokenized
    )
    rows = {line.split()[0]: line.split()[-1] for line in tokenized.splitlines()}
    assert (
        rows["exact_match"] == rows["bleu_tokenized"] == "1.0000"
        and not {"bleu", "chrf"} & rows.keys()
    )


@pytest.mark.usefixtures("quickly_compiled")
def test_evaluate_accepts_reference_files_and_prints_intervals(finished_run, command, tmp_path):
    (kept,) = (finished_run / "samples").glob("*.hypotheses.txt")
    words = [f"--references={kept}", "--bootstrap=40", f"--output={tmp_path}"]
    printed = command("evaluate", f"--workdir={finished_run}", *words)
    rows = {line.split()[0]: line for line in printed.splitlines()}
    assert rows["exact_match"].split() == "exact_match 100.00 % 100.00 % ± 0.00 %".split()
    assert "bs:40|seed:12345" in printed
    (scores,) = tmp_path.glob(f"*.greedy.{kept.name}.scores.json")
    assert json.loads(scores.read_text())["references"] == [str(kept)]


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
def test_an_ensemble_translates_and_is_evaluated_as_one_model(finished_run, command, tmp_path):
    other = shutil.copytree(finished_run, tmp_path / "other")
    for later in (40, 48):
        shutil.rmtree(other / "checkpoints" / str(later))  # so that its model is of step 24
    words = [f"--workdir={finished_run}", f"--ensemble={other}"]
    printed = command("evaluate", *words, f"--output={tmp_path / 'scores'}")
    step = best_step(finished_run)
    title = f"{finished_run}, test split, step {step}; together with {other}, step 24\n"
    values = evaluate_module.evaluate(finished_run, "test", ensemble=[other]).values
    assert printed.startswith(title + run_report.table(values))
    alone = [evaluate_module.evaluate(run, "test").values["loss"] for run in (finished_run, other)]
    assert values["loss"] < max(alone) and values["loss"] not in alone
    (scores,) = (tmp_path / "scores").glob(f"test.step{step}-ensemble2-*.greedy.scores.json")
    assert json.loads(scores.read_text())["ensemble"] == [f"{other}, step 24"]
    (tmp_path / "in.txt").write_text("Monday, 3 June 2024\n12 kilometers\n")
    command(
        "translate", *words, f"--input={tmp_path / 'in.txt'}", f"--output={tmp_path / 'out.txt'}"
    )
    translator = translate.load(finished_run, ensemble=[other])
    expected = translator(["Monday, 3 June 2024", "12 kilometers"])
    assert (tmp_path / "out.txt").read_text(encoding="utf-8").splitlines() == expected


SHARED = [
    ("finished_run", translate, {"method": "greedy"}),
    pytest.param(
        "finished_run", translate, {"method": "beam", "beam_size": 3}, marks=pytest.mark.slow
    ),
    pytest.param(
        "finished_run", translate, {"method": "sample", "top_p": 0.9}, marks=pytest.mark.slow
    ),
    pytest.param("finished_language_model", generate, {}, marks=pytest.mark.slow),
    pytest.param("finished_classifier", classify, {}, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("run", "module", "options"), SHARED)
def test_sharded_models_give_the_same_answers(run, module, options, request, quickly_compiled):
    workdir = request.getfixturevalue(run)
    texts = ["Monday, 3 June 2024", "12 kilometers", "", "3:07"]
    whole, shared = (module.load(workdir, tensor=devices, **options) for devices in (1, 2))
    parts = [x.addressable_shards[0].data.size for x in jax.tree.leaves(shared.run.params)]
    assert sum(parts) < 0.7 * sum(x.size for x in jax.tree.leaves(whole.run.params))
    assert shared(texts) == whole(texts)


@pytest.mark.slow
def test_evaluate_prints_the_same_with_a_sharded_model(finished_run, command):
    lines = [
        command("evaluate", f"--workdir={finished_run}", *flag).splitlines()
        for flag in ([], ["--tensor=2"])
    ]
    assert lines[0] == lines[1]


@pytest.mark.slow
def test_evaluate_uses_the_decoding_flags_and_names_them(
    finished_run, finished_classifier, command, tmp_path, capfd
):
    command(
        "evaluate",
        f"--workdir={finished_run}",
        "--method=beam",
        "--beam_size=2",
        f"--output={tmp_path}",
    )
    (scores,) = tmp_path.glob("*.beam-beam_size=2.scores.json")
    assert json.loads(scores.read_text())["sentences"] == 24
    with pytest.raises(SystemExit) as ended:
        commands.main(["evaluate", f"--workdir={finished_classifier}", "--method=beam"])
    assert (
        ended.value.code == 2 and "--method: applies only to translations" in capfd.readouterr().err
    )


def mean_of(arrays: list[dict[str, np.ndarray]], part: str) -> dict[str, np.ndarray]:
    """Returns the mean of the arrays of a part over checkpoints."""
    names = [name for name in arrays[0] if name.startswith(f"{part}[")]
    return {
        name.removeprefix(part): np.mean([each[name] for each in arrays], axis=0, dtype=np.float64)
        for name in names
    }


def assert_are(params: dict, expected: dict[str, np.ndarray]) -> None:
    actual = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(actual[name], array, rtol=1e-6, atol=1e-9, err_msg=name)


def test_translate_keeps_order_and_line_count_from_stdin_and_from_files(
    finished_run, command, tmp_path
):
    lines = ["Monday, 3 June 2024", "", "12 kilometers", "", "12 kilometers", "3 days"]
    process = runs.run(
        "translate", f"--workdir={finished_run}", input="".join(f"{x}\n" for x in lines).encode()
    )
    assert process.returncode == 0, process.stderr
    translated = lines_of(process.stdout)
    assert len(translated) == len(lines)
    assert [i for i, line in enumerate(translated) if not line] == [1, 3]
    assert translated[2] == translated[4] != translated[0]
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("\n".join(lines), encoding="utf-8")  # the last line without its end
    files = [f"--input={source}", f"--output={target}"]
    assert command("translate", f"--workdir={finished_run}", *files) == ""
    assert lines_of(target.read_text(encoding="utf-8")) == translated
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.txt"]
    assert translate.load(finished_run)(lines) == translated


@pytest.mark.slow
def test_a_killed_translate_resumes_and_splits_long_lines(finished_run, tmp_path):
    lines = [f"{number} days and {number * number} hours" for number in range(331)]
    lines[300] = " ".join(f"It takes {number} days." for number in range(60))
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("".join(f"{line}\n" for line in lines))
    record = tmp_path / "out.txt.partial.json"
    words = [
        "translate",
        f"--workdir={finished_run}",
        f"--input={source}",
        f"--output={target}",
        "--window=17",
    ]
    done = lambda: json.loads(record.read_text())["lines"] if record.exists() else 0  # noqa: E731
    runs.stop_at(lambda: done() > 0, signal.SIGKILL, *words)
    assert 0 < done() < 300 and done() % 17 == 0 and not target.exists()
    process = runs.run(*words, "--long=split")
    assert (process.returncode, process.stdout) == (0, ""), process.stderr
    assert (
        process.stderr
        == "note: lines that were too long for the model and translated in segments: 1\n"
    )
    expected = translate.load(finished_run).stream(lines, window=17, long="split")
    assert target.read_text(encoding="utf-8") == "".join(f"{line}\n" for line in expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.txt"]


@pytest.mark.slow
def test_translate_prints_the_n_best_translations_of_beam_search(finished_run, command, tmp_path):
    lines = ["Monday, 3 June 2024", "", "12 kilometers"]
    (tmp_path / "in.txt").write_text("\n".join(lines), encoding="utf-8")
    translator = translate.load(finished_run, method="beam", beam_size=5, alpha=1, min_length=3)
    own = translator(lines)
    prefix = next(digit for digit in "123" if not any(text.startswith(digit) for text in own))
    words = [
        "translate",
        f"--workdir={finished_run}",
        f"--input={tmp_path / 'in.txt'}",
        "--method=beam",
    ]
    words += ["--beam_size=5", "--alpha=1", "--min_length=3", f"--prefix={prefix}"]
    rows = [line.split("\t", 2) for line in lines_of(command(*words, "--n_best=3"))]
    assert [number for number, _, _ in rows] == ["1"] * 3 + ["2"] + ["3"] * 3
    assert rows[3] == ["2", "0.000000", ""]
    for first in (0, 4):
        scores = [float(score) for _, score, _ in rows[first : first + 3]]
        assert scores == sorted(scores, reverse=True) and scores[0] < 0
        assert all(text.startswith(prefix) for _, _, text in rows[first : first + 3])
    best = [rows[0][2], "", rows[4][2]]
    assert lines_of(command(*words)) == best
    assert [text.replace("\n", " ") for text in translator(lines, [prefix] * 3)] == best


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "run"),
    [
        (translate, "finished_run"),
        (classify, "finished_classifier"),
        (generate, "finished_language_model"),
    ],
)
def test_the_example_in_the_docstring_runs(module, run, request, capsys):
    code = module.__doc__.split("\n\n")[1].strip()
    assert len(code.splitlines()) == 3
    exec(code.replace("runs/mine", str(request.getfixturevalue(run))))
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
def test_an_unfinished_run_can_be_used(half_finished_run, finished_run):
    before = runs.files_below(half_finished_run)
    assert translate.load(half_finished_run)(["3 days"]) == translate.load(finished_run)(["3 days"])
    values = evaluate_module.evaluate(half_finished_run, "validation").values
    best = min(runs.lines_of(finished_run, "validation"), key=lambda record: record["loss"])
    assert values["loss"] == pytest.approx(best["loss"], rel=1e-5)
    assert runs.files_below(half_finished_run) == before


# A classifier.

PHRASES = [
    "3 Tage",
    "",
    "5 kilomètres",
    "2 hours and 3 minutes",
    "",
    "月曜日",
    "3 Tage",
    "воскресенье",
]


def test_a_classifier_learns_and_its_log_ends_with_a_test_line_at_the_best_step(
    finished_classifier,
):
    classes = len(Dataset("cldr_language", architecture="encoder_classifier").label_names)
    assert (
        json.loads((finished_classifier / "config.json").read_text())["model"]["num_classes"]
        == classes
    )
    validation = {
        record["step"]: record for record in runs.lines_of(finished_classifier, "validation")
    }
    assert list(validation) == [24, STEPS]
    assert abs(runs.losses(finished_classifier)[1] - math.log(classes)) < 1
    assert (
        validation[STEPS]["loss"] < 0.95 * math.log(classes)
        and validation[STEPS]["accuracy"] > 2 / classes
    )
    (test,) = runs.lines_of(finished_classifier, "test")
    assert test["step"] == max(validation, key=lambda step: validation[step]["accuracy"])
    assert test.keys() == {"step", "split", "loss", "accuracy"}
    assert {path.name for path in (finished_classifier / "samples").iterdir()} == {"test.txt"}


def test_evaluating_a_classifier_with_other_labels_is_an_error(finished_classifier):
    run = trained.load(finished_classifier)
    other = dataclasses.replace(run, label_names=run.label_names[::-1])
    with pytest.raises(
        ValueError, match=r"the labels of cldr_language are ar, .*, and this run learnt zh, "
    ):
        evaluate_module.evaluate_run(other, "test")


@pytest.mark.usefixtures("quickly_compiled")
def test_evaluating_a_classifier_prints_its_test_line_and_its_confusion_matrix(
    finished_classifier, command, evaluations
):
    printed = command("evaluate", f"--workdir={finished_classifier}")
    (result,) = evaluations
    title = f"{finished_classifier}, test split, step {best_step(finished_classifier)}"
    assert printed == f"{title}\n{run_report.table(result.values)}\n{result.note}\n"
    (logged,) = runs.lines_of(finished_classifier, "test")
    assert result.values == pytest.approx(
        {name: logged[name] for name in ("loss", "accuracy")}, rel=1e-5
    )
    assert (finished_classifier / "samples" / "test.txt").read_text(encoding="utf-8") == result.note
    names, *rows = [line.split() for line in result.note.splitlines()]
    names = names[-1 - len(rows) : -1]  # between the corner and the accuracies
    assert names == [row[0] for row in rows] == trained.load(finished_classifier).label_names
    counts = np.array(
        [[0 if cell == "." else int(cell) for cell in row[1 : 1 + len(rows)]] for row in rows]
    )
    label = (
        Dataset("cldr_language", architecture="encoder_classifier")
        .read(runs.CLASSIFIER["data.test_split"])
        .label
    )
    assert np.trace(counts) == round(result.values["accuracy"] * counts.sum())
    too_long = len(label) - counts.sum()
    assert (
        0 <= too_long < 3
        and np.abs(counts.sum(axis=1) - np.bincount(label, minlength=len(rows))).sum() == too_long
    )


@pytest.mark.usefixtures("quickly_compiled")
def test_classify_keeps_order_and_line_count_from_stdin_and_from_files(
    finished_classifier, command, tmp_path
):
    phrases = "".join(f"{x}\n" for x in PHRASES).encode()
    answers = lines_of(command("classify", f"--workdir={finished_classifier}", input=phrases))
    assert len(answers) == len(PHRASES)
    assert [i for i, answer in enumerate(answers) if not answer] == [1, 4]
    assert answers[0] == answers[6] and len(set(answers)) > 2
    assert set(answers) - {""} <= set(trained.load(finished_classifier).label_names)
    assert classify.load(finished_classifier)(PHRASES) == answers
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("\n".join(PHRASES), encoding="utf-8")
    assert (
        command(
            "classify",
            f"--workdir={finished_classifier}",
            f"--input={source}",
            f"--output={target}",
        )
        == ""
    )
    assert lines_of(target.read_text(encoding="utf-8")) == answers


@pytest.mark.slow
def test_the_process_of_classify_reads_stdin_and_answers_like_python(finished_classifier):
    phrases = "".join(f"{x}\n" for x in PHRASES).encode()
    process = runs.run("classify", f"--workdir={finished_classifier}", input=phrases)
    assert process.returncode == 0, process.stderr
    answers = lines_of(process.stdout)
    assert answers == classify.load(finished_classifier)(PHRASES)
    assert [i for i, answer in enumerate(answers) if not answer] == [1, 4]
    assert answers[0] == answers[6] and len(set(answers)) > 2


# A language model.


def test_a_language_model_learns_and_its_bits_per_byte_follow_from_its_loss(
    finished_language_model,
):
    train, (test,) = (
        runs.losses(finished_language_model),
        runs.lines_of(finished_language_model, "test"),
    )
    assert abs(train[1] - math.log(runs.SMALL["data.vocab_size"])) < 1.5
    assert test["loss"] < 0.8 * math.log(runs.SMALL["data.vocab_size"])
    assert test.keys() == {
        "step",
        "split",
        "parameters",
        "loss",
        "accuracy",
        "perplexity",
        "bits_per_byte",
        "bits_per_character",
        "nats_per_character",
    }
    run, dataset = (
        trained.load(finished_language_model),
        Dataset("cldr_translate/en-de", architecture="decoder_lm"),
    )
    texts = dataset.read(runs.TINY["data.test_split"]).target
    tokens = sum(len(ids) + 1 for ids in run.encode(texts))
    bits = test["loss"] * tokens / math.log(2)
    assert test["bits_per_byte"] == pytest.approx(
        bits / sum(len(text.encode()) for text in texts), rel=1e-4
    )


@pytest.mark.usefixtures("quickly_compiled")
def test_evaluating_a_language_model_prints_its_test_line(
    finished_language_model, command, evaluations
):
    printed = command("evaluate", f"--workdir={finished_language_model}")
    values = evaluations[0].values
    title = f"{finished_language_model}, test split, average of steps 24, 48, moving averages"
    assert printed == f"{title}\n{run_report.table(values)}\n"
    (logged,) = runs.lines_of(finished_language_model, "test")
    assert values == pytest.approx({name: logged[name] for name in values}, rel=1e-5)


def test_the_samples_of_a_language_model_are_saved(finished_language_model):
    samples = (finished_language_model / "samples" / "test.txt").read_bytes().decode()
    assert samples == "\n".join(generate.load(finished_language_model)([""] * SAMPLES))


@pytest.mark.slow
def test_generate_prints_the_same_texts_only_for_the_same_seed(
    finished_language_model, command, tmp_path
):
    words = [
        "generate",
        f"--workdir={finished_language_model}",
        "--prompt=3 days",
        "--count=5",
        "--top_k=31",
    ]
    process = runs.run(*words, "--seed=7")
    assert process.returncode == 0, process.stderr
    assert command(*words, "--seed=7") == process.stdout != command(*words, "--seed=8")
    texts = lines_of(process.stdout)
    assert (
        len(texts) == 5 and len(set(texts)) > 1 and all(text.startswith("3 days") for text in texts)
    )
    generator = generate.load(finished_language_model, seed=7, top_k=31)
    assert [text.replace("\n", " ") for text in generator(["3 days"] * 5)] == texts
    assert command(*words, "--seed=7", f"--output={tmp_path / 'out.txt'}") == ""
    assert (tmp_path / "out.txt").read_bytes().decode() == process.stdout


@pytest.mark.usefixtures("quickly_compiled")
def test_the_result_of_a_run_can_be_the_average_of_its_last_moving_averages(
    finished_language_model, command
):
    arrays = [runs.checkpoint_arrays(finished_language_model, step) for step in (24, STEPS)]
    own = trained.load(finished_language_model)
    assert_are(own.params, mean_of(arrays, "ema"))
    (test,), validation = (
        runs.lines_of(finished_language_model, split) for split in ("test", "validation")
    )
    assert (test["step"], test["parameters"]) == (STEPS, "average of steps 24, 48, moving averages")
    assert [line["parameters"] for line in validation] == [
        "step 24, moving average",
        "step 48, moving average",
    ]
    # Training has evaluated the moving average of the last step.
    last, raw, both = (
        generate.load(finished_language_model, average=average, parameters=parameters).run
        for average, parameters in (("last:1", "ema"), ("none", "raw"), (None, "raw"))
    )
    assert_are(last.params, mean_of(arrays[1:], "ema"))
    assert_are(both.params, mean_of(arrays, "params"))
    split = pipeline.read_split(
        pipeline.open_dataset(own.config), "validation[:8]", own.tokenizer, own.config
    )
    evaluator = Evaluator(own.model, own.config, parallel.MeshMode(own.mesh), own.tokenizer)
    losses = [
        evaluator.evaluate(run.params, run.params, split, decode=0).values["loss"]
        for run in (last, raw, own)
    ]
    assert (
        losses[0] == pytest.approx(validation[-1]["loss"], rel=1e-5)
        and len({round(x, 4) for x in losses}) == 3
    )
    words = ["generate", f"--workdir={finished_language_model}", "--prompt=3", "--count=5"]
    outputs = {
        command(*words, *flags)
        for flags in ([], ["--average=none"], ["--parameters=raw", "--average=last:1"])
    }
    assert len(outputs) == 3


@pytest.mark.usefixtures("quickly_compiled")
def test_flags_of_generate_override_the_settings_of_the_run(finished_language_model, command):
    words = ["generate", f"--workdir={finished_language_model}", "--count=3"]
    assert (
        json.loads((finished_language_model / "config.json").read_text())["decode"]["method"]
        == "sample"
    )
    assert len(set(lines_of(command(*words)))) == 3
    greedy = lines_of(command(*words, "--method=greedy"))
    assert len(greedy) == 3 and len(set(greedy)) == 1
    assert command(*words, "--prompt=3 days", "--max_extra_length=0") == "3 days\n" * 3


# A masked decoder.


@pytest.mark.slow
def test_a_masked_decoder_learns_resumes_and_translates(tmp_path):
    changes = {"model.decoder": "masked", "decode.method": "mask_predict", "decode.iterations": 4}
    assert runs.fit(tmp_path / "run", changes) == 0
    losses, (test,) = runs.losses(tmp_path / "run"), runs.lines_of(tmp_path / "run", "test")
    assert test["loss"] < 0.8 * losses[1] and test["length_loss"] < 0.8 * math.log(128)
    assert 0 < test["length_accuracy"] < 1 and test.keys() >= {"accuracy", "perplexity", "bleu"}
    assert runs.fit(tmp_path / "half", {**changes, "train.num_steps": 24}) == 0
    assert runs.fit(tmp_path / "half", changes) == 0
    assert runs.losses(tmp_path / "half") == losses
    translator = translate.load(tmp_path / "run", iterations=2)
    assert translator.run.config.decode.iterations == 2
    (written, empty) = translator(["3 days", ""])
    assert written and not empty
    with pytest.raises(
        ValueError, match=r"^config\.decode\.method: 'beam' generates token by token"
    ):
        translate.load(tmp_path / "run", method="beam")
    with pytest.raises(
        ValueError, match=r"^--prefix: decode\.method='mask_predict' predicts all tokens at once"
    ):
        translate.LineTranslator(translator, prefix="3")


# Figures.

MAPS = {
    "finished_run": ["encoder_self-attention", "decoder_self-attention", "cross-attention"],
    "finished_language_model": ["decoder_self-attention"],
}


def plot(command: Callable[..., str], output: Path, *arguments: str) -> dict[str, bytes]:
    """Runs `plot` and returns the files in `output`, all of which it prints."""
    printed = command("plot", *arguments, f"--output={output}")
    assert sorted(printed.splitlines()) == sorted(str(path) for path in output.iterdir())
    files = {path.name: path.read_bytes() for path in output.iterdir()}
    for name, data in files.items():
        assert data.startswith(
            {"png": b"\x89PNG", "svg": b"<?xml", "html": b"<!doctype html>"}[
                name.rpartition(".")[2]
            ]
        )
    return files


def both(*names: str) -> set[str]:
    return {f"{name}.{kind}" for name in names for kind in ("png", "svg")}


@pytest.mark.slow
@pytest.mark.parametrize("run", ["finished_run", "finished_language_model"])
def test_attention_is_plotted_as_figures_and_as_a_page(request, command, tmp_path, run):
    workdir = request.getfixturevalue(run)
    files = plot(command, tmp_path / "out", "attention", f"--workdir={workdir}", "--text=3 days")
    assert files.keys() == both(*MAPS[run]) | {"attention.html"}


@pytest.mark.slow
def test_another_process_plots_the_same_bytes_into_the_workdir(
    finished_classifier, command, tmp_path
):
    workdir = shutil.copytree(finished_classifier, tmp_path / "run")
    words = ["attention", f"--workdir={workdir}", "--text=3 Tage"]
    process = runs.run("plot", *words)
    assert process.returncode == 0, process.stderr
    files = plot(command, tmp_path / "out", *words)
    assert files.keys() == both("encoder_self-attention") | {"attention.html"}
    assert files == {path.name: path.read_bytes() for path in (workdir / "plots").iterdir()}
    assert process.stdout.splitlines() == [
        str(workdir / "plots" / name) for name in [*sorted(files)[1:], "attention.html"]
    ]


@pytest.mark.slow
def test_positions_the_schedule_and_metrics_are_plotted(
    finished_language_model, finished_classifier, command, tmp_path
):
    workdir = f"--workdir={finished_language_model}"
    figures = {
        ("positions", workdir): both("positions", "position_scores", "positions_that_fail"),
        ("schedule", workdir): both("schedule"),
        ("metrics", str(finished_language_model), str(finished_classifier)): both(
            "metrics", "metrics_over_time"
        ),
    }
    assert {words[0] for words in figures} | {"attention"} == set(PLOTS)
    for words, names in figures.items():
        assert plot(command, tmp_path / words[0], *words).keys() == names
    again = plot(command, tmp_path / "again", "schedule", workdir)
    assert again == {path.name: path.read_bytes() for path in (tmp_path / "schedule").iterdir()}


# Every position scheme in every architecture.

V, LENGTH, CLASSES = 19, 11, 3
TEXTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [5, 9], [14, 6], [7, 7, 7], [12], [15, 16, 5, 8]]


def batch_for(architecture: str) -> dict[str, np.ndarray]:
    row_B = np.arange(len(TEXTS), dtype=np.int32)
    ids_BL, _ = runs.filled([[text] for text in TEXTS], LENGTH)
    packed_BL, segment_BL = runs.filled([TEXTS[i::4] for i in range(4)], LENGTH)
    return {
        "encoder_decoder": {"source": ids_BL, "target": ids_BL[::-1], "row": row_B},
        "encoder_classifier": {"source": ids_BL, "label": row_B % CLASSES, "row": row_B},
        "decoder_lm": {"target": packed_BL, "target_segment": segment_BL, "row": row_B[:4]},
    }[architecture]


QUICK = [("encoder_decoder", "rotary")]  # in the plain suite


@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize(
    ("architecture", "position"),
    [
        pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])
        for case in itertools.product(CHOICES["model.architecture"], CHOICES["model.position"])
    ],
)
def test_every_position_scheme_learns_in_every_architecture(architecture, position):
    sizes = {"vocab_size": V, "num_classes": CLASSES, "max_length": LENGTH}
    widths = {"d_model": 14, "num_heads": 3, "d_head": 4, "d_ff": 13}
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    config = ModelConfig(architecture=architecture, position=position, **sizes, **widths, **layers)
    model, optimizer = transformer.build_model(config), optax.sgd(0.1)
    rng = np.random.default_rng(0)
    sample = lambda leaf: np.float32(0.3 * rng.normal(size=leaf.shape))  # noqa: E731
    params = jax.tree.map(sample, parameters.shapes(model))
    state = state_lib.TrainState(
        0, params, optimizer.init(params), jax.random.key_data(jax.random.key(0))
    )
    update = functools.partial(
        step_lib.train_step, model=model, optimizer=optimizer, label_smoothing=0.0
    )
    run_step, batch, losses = jax.jit(update), batch_for(architecture), []
    for _ in range(7):
        state, sums = run_step(state, batch)
        losses.append(metrics.divide(sums)["loss"])
    assert losses[-1] < losses[0]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


CHINESE = {
    **runs.TINY,
    "data.dataset": "cldr_translate/en-zh",
    "data.train_split": "train[:900]",
    "data.vocab_size": 8000,  # far more pieces than there are
    "data.vocab_limit": "soft",
    "model.max_length": 64,
    "decode.max_extra_length": 64,  # CTranslate2 has one limit for all texts
    "optim.learning_rate": 2e-2,
    "optim.warmup_steps": 10,
    "train.best_metric": "bleu",
    "train.decode_examples": 4,
    "parallel.data": 1,
}


@pytest.mark.slow
def test_chinese_from_a_soft_vocabulary_to_scores_plots_and_exports(tmp_path):
    workdir, folder = tmp_path / "run", tmp_path / "exported"
    assert runs.fit(workdir, {**CHINESE, "train.num_steps": 24}) == 0
    assert runs.fit(workdir, {**CHINESE, "train.num_steps": 48}) == 0
    run = trained.load(workdir)
    assert run.config.model.vocab_size == run.tokenizer.vocab_size < 8000
    for step in (24, 48):
        (scores,) = (workdir / "samples").glob(f"test.step{step}.*.scores.json")
        assert "|tok:zh|" in scores.read_text()
    words = ["plot", "attention", f"--workdir={workdir}", "--text=5 天前 2020年3月"]
    plotted = runs.run(*words, f"--output={tmp_path / 'plots'}")
    assert plotted.returncode == 0 and "Glyph" not in plotted.stderr
    assert plotted.stderr.count("no installed font has") <= 1  # 0 if a font has the characters

    exported = runs.run("export", "ctranslate2", f"--workdir={workdir}", f"--output={folder}")
    assert exported.returncode == 0, exported.stderr
    pieces = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    options = json.loads((folder / "decode.json").read_text())
    sources = pipeline.open_dataset(run.config).read("validation").source[:200]
    found = ctranslate2.Translator(str(folder)).translate_batch(
        [pieces.encode(text, out_type=str) for text in sources], **options
    )
    theirs = [pieces.decode(each.hypotheses[0]) for each in found]
    ours = translate.load(workdir)(sources)
    assert theirs == ours
    assert len(set(theirs)) > 1
