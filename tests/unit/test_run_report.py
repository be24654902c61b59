"""The messages and tables of a run contain the given numbers."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest

from flaxformer_lite.config import CHOICES, Config, DataConfig, ModelConfig
from flaxformer_lite.data import pipeline
from flaxformer_lite.data.batches.loader import Batches, Tokens
from flaxformer_lite.data.sources.examples import Examples
from flaxformer_lite.runs.workdir import Workdir
from flaxformer_lite.scoring import Scores
from flaxformer_lite.training import flops, meshes, run_report

V, LONGEST = 29, 13
NAMES = ["da", "nb", "zh"]


def columns(table):
    return [re.split(r"  +", line) for line in table.splitlines()]


def test_shares_are_shown_as_percentages_and_none_as_a_dash():
    values = {
        "loss": 1.23456,
        "accuracy": 0.98765,
        "exact_match/date": 0.5,
        "chrf": 12.0,
        "perplexity": None,
    }
    assert columns(run_report.table(values)) == [
        ["loss", "1.235"],
        ["accuracy", "98.77 %"],
        ["exact_match/date", "50.00 %"],
        ["chrf", "12"],
        ["perplexity", "-"],
    ]


def test_intervals_are_shown_beside_their_values_in_the_same_unit():
    table = run_report.table(
        {"loss": 1.23456, "exact_match": 0.5, "bleu": 31.25},
        {"exact_match": (0.51, 0.04), "bleu": (31.0, 1.5)},
    )
    assert columns(table)[1:] == [
        ["loss", "1.235"],
        ["exact_match", "50.00 %", "51.00 % ± 4.00 %"],
        ["bleu", "31.25", "31.00 ± 1.50"],
    ]
    assert run_report.RESAMPLED in table.splitlines()[0]


def test_systems_are_shown_below_each_other_with_p_values():
    systems = {
        "B": Scores({"bleu": 20.0}, {}, {"bleu": (20.5, 1.0)}),
        "H1": Scores({"bleu": 30.0}, {}, {"bleu": (29.5, 2.0)}, {"bleu": 0.00332}, {"bleu": 0.002}),
        "H2": Scores({"bleu": 20.0}, {}, {"bleu": (20.4, 1.0)}, {"bleu": 1.0}, {"bleu": 1.0}),
    }
    head, *rows = columns(run_report.comparison(systems))
    assert head[1:] == [run_report.RESAMPLED, "p, randomisation", "p, bootstrap"]
    assert rows == [
        ["bleu", "B", "20", "20.50 ± 1.00"],
        ["bleu", "H1", "30", "29.50 ± 2.00", "0.0033", "0.0020"],
        ["bleu", "H2", "20", "20.40 ± 1.00", "1.0000", "1.0000"],
    ]
    plain = {name: Scores(found.values, {}) for name, found in systems.items()}
    assert columns(run_report.comparison(plain)) == [row[:3] for row in rows]


def test_every_signature_is_shown_with_its_score():
    scores = Scores({"exact_match": 1.0, "bleu": 2.0, "chrf": 3.0}, {"bleu": "a|b", "chrf": "c"})
    assert (
        run_report.signatures(scores)
        == "bleu: sacreBLEU signature a|b\nchrf: sacreBLEU signature c"
    )


def test_the_closing_table_names_the_evaluated_parameters(tmp_path):
    for words, shown in (
        ({}, "best step 7"),
        ({"parameters": "average of steps 5, 7"}, "average of steps 5, 7"),
    ):
        line = json.dumps({"step": 7, "split": "test", **words, "loss": 0.5})
        (tmp_path / "metrics.jsonl").write_text(f"{line}\n")
        assert (
            run_report.closing_table(Workdir(tmp_path).metrics) == f"test split, {shown}\nloss  0.5"
        )


def test_a_confusion_matrix_has_a_row_for_each_class_with_its_accuracy():
    counts = np.array([[37, 3, 0], [1, 1009, 0], [0, 0, 0]], np.float32)
    assert columns(run_report.confusion(counts, NAMES)) == [
        ["is \\ predicted", "da", "nb", "zh", "right"],
        ["da", "37", "3", ".", "92.5 %"],
        ["nb", "1", "1009", ".", "99.9 %"],
        ["zh", ".", ".", ".", "-"],
    ]


def test_of_many_classes_the_ten_most_frequent_confusions_are_listed():
    names = [str(number) for number in range(97)]
    counts = np.diag(np.full(97, 1009))
    assert run_report.confusion(counts, names) == "no class is confused with another"
    for i in range(13):
        counts[2 * i, 31] = 20 - i
    lines = columns(run_report.confusion(counts, names))
    assert lines[:3] == [["is", "predicted", "texts"], ["0", "31", "20"], ["2", "31", "19"]]
    assert len(lines) == 11


def test_every_column_of_a_confusion_matrix_ends_below_its_name():
    lines = run_report.confusion(np.diag([7, 104_729, 1]), NAMES).splitlines()
    for column, name in enumerate([*NAMES, "right"], start=1):
        end = lines[0].index(name) + len(name)
        for line, row in zip(lines, columns("\n".join(lines)), strict=True):
            assert line[:end].endswith(row[column])


def test_translations_are_shown_between_their_source_and_reference():
    texts = Examples(source=["a", "b", "c"], target=["A", "B", "C"])
    assert run_report.translations(texts, ["x", ""]) == (
        "source       a\ntranslation  x\nreference    A\n\nsource       b\ntranslation  "
        "\nreference    B\n\n"
    )


class Letters:
    """A tokenizer that needs no training: id i is the i-th letter from 'A'."""

    @staticmethod
    def encode(texts, *, side="source"):
        return [np.array([ord(letter) - ord("A") for letter in text], np.int32) for text in texts]


def split_of(texts, config):
    return pipeline.make_split(Examples(target=texts), Letters, config)


CONFIG = Config(
    model=ModelConfig(
        architecture="decoder_lm", vocab_size=V, d_model=6, num_heads=3, d_ff=11, max_length=LONGEST
    ),
    data=DataConfig(dataset="my/texts", buckets=(LONGEST,), tokens_per_batch=LONGEST * 8),
)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["FG"], ""),
        (["FG", "", "F" * LONGEST, "G" * LONGEST], " (2 too long and 1 empty left out)"),
    ],
)
def test_left_out_examples_are_counted(texts, words):
    assert run_report.left_out(split_of(texts, CONFIG)) == words


def test_examples_that_lack_a_language_are_counted():
    split = split_of(["FG"], CONFIG)
    incomplete = dataclasses.replace(split, texts=dataclasses.replace(split.texts, incomplete=7))
    assert run_report.left_out(split) == ""
    assert (
        run_report.left_out(incomplete)
        == " (0 too long and 0 empty left out, 7 without one of the languages)"
    )


def test_the_summary_has_the_sizes_of_the_data_the_model_and_the_devices():
    train, validation = split_of(["FGH"] * 23, CONFIG), split_of(["FGH"] * 5 + [""], CONFIG)
    data = pipeline.Data(None, train, validation, None, "")
    params = {
        "a": jax.ShapeDtypeStruct((1009, 3), "float32"),
        "b": jax.ShapeDtypeStruct((7,), "float32"),
    }
    said = run_report.resolved(CONFIG, data, meshes.make_mesh(7), params)
    for part in (
        "my/texts: 23 examples to train on, 6 to validate (0 too long and 1 empty left out)",
        f"vocabulary {V}",
        f"{1009 * 3 + 7:,} parameters",
        "mesh over 7 x cpu",
        f"batches 8x{LONGEST}, padding {1 - 23 * 4 / (24 * LONGEST):.0%} of target; 31 target "
        "tokens a step; "
        "3 steps an epoch",
        f"{flops.train_step(CONFIG, 8, LONGEST) / 1e9:.3g} GFLOPs a step of 8x{LONGEST}",
    ):
        assert part in said, part


def test_subword_sampling_reports_how_many_sampled_texts_did_not_fit():
    batches = Batches(Tokens(target=[[5]]), None, num_steps=1)
    batches.sampled, batches.not_fitting = 2017, 53
    assert run_report.subword_sampling(batches).startswith(
        f"subword sampling: 2,017 texts sampled; {53 / 2017:.1%} of them kept their"
    )


@pytest.mark.parametrize("architecture", CHOICES["model.architecture"])
def test_the_last_message_names_an_existing_command_for_the_model(architecture, tmp_path):
    from flaxformer_lite.cli import commands

    config = dataclasses.replace(
        CONFIG, model=dataclasses.replace(CONFIG.model, architecture=architecture)
    )
    said = run_report.written(Workdir(tmp_path), config, seconds=90, goodput=0.75)
    assert said.startswith("1.5 minutes; 75% of the time of all starts went into training steps.\n")
    assert f"\nWritten to {tmp_path}: " in said
    (command,) = re.findall(rf"flaxformer-lite (\w+) --workdir={re.escape(str(tmp_path))}$", said)
    assert command in commands.COMMANDS


@pytest.mark.parametrize("architecture", CHOICES["model.architecture"])
def test_the_command_for_a_finished_run_is_one_of_a_shell(architecture):
    folder = Path("it's mine") / "a run"
    config = Config(model=ModelConfig(architecture=architecture))
    said = run_report.written(Workdir(folder), config, seconds=90, goodput=0.75)
    program, _, flag = shlex.split(said.splitlines()[-1].partition(" with: ")[2])
    assert (program, flag) == ("flaxformer-lite", f"--workdir={folder}")
