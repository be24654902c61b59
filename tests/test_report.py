"""What a run says, read back: the numbers of the tables are those put in."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from flaxformer_lite.config import CHOICES, Config, DataConfig, ModelConfig
from flaxformer_lite.data import pipeline
from flaxformer_lite.data.examples import Examples
from flaxformer_lite.data.loader import Batches, Tokens
from flaxformer_lite.training import flops, parallel, report
from flaxformer_lite.workdir import Workdir

V, LONGEST = 29, 13
NAMES = ["da", "nb", "zh"]


def columns(table):
    return [re.split(r"  +", line) for line in table.splitlines()]


def test_shares_are_shown_in_percent_and_what_is_not_finite_as_a_dash():
    values = {"loss": 1.23456, "accuracy": 0.98765, "exact_match/date": 0.5, "chrf": 12.0, "perplexity": None}
    assert columns(report.table(values)) == [
        ["loss", "1.235"],
        ["accuracy", "98.77 %"],
        ["exact_match/date", "50.00 %"],
        ["chrf", "12"],
        ["perplexity", "-"],
    ]


def test_a_table_of_mistakes_has_a_row_for_each_class_and_the_share_that_was_right():
    counts = np.array([[37, 3, 0], [1, 1009, 0], [0, 0, 0]], np.float32)
    assert columns(report.confusion(counts, NAMES)) == [
        ["is \\ taken for", "da", "nb", "zh", "right"],
        ["da", "37", "3", ".", "92.5 %"],
        ["nb", "1", "1009", ".", "99.9 %"],
        ["zh", ".", ".", ".", "-"],
    ]


def test_every_column_of_a_table_of_mistakes_ends_below_its_name():
    lines = report.confusion(np.diag([7, 104_729, 1]), NAMES).splitlines()
    for column, name in enumerate([*NAMES, "right"], start=1):
        end = lines[0].index(name) + len(name)
        for line, row in zip(lines, columns("\n".join(lines)), strict=True):
            assert line[:end].endswith(row[column])


def test_translations_stand_between_their_source_and_reference_as_far_as_there_are_any():
    texts = Examples(source=["a", "b", "c"], target=["A", "B", "C"])
    assert report.translations(texts, ["x", ""]) == (
        "source       a\ntranslation  x\nreference    A\n\nsource       b\ntranslation  \nreference    B\n\n"
    )


class Letters:
    """A tokenizer that needs no training: id i is the i-th letter from 'A'."""

    @staticmethod
    def encode(texts):
        return [np.array([ord(letter) - ord("A") for letter in text], np.int32) for text in texts]


def split_of(texts, config):
    return pipeline.make_split(Examples(target=texts), Letters, config)


CONFIG = Config(
    model=ModelConfig(architecture="decoder_lm", vocab_size=V, d_model=6, num_heads=3, d_ff=11, max_length=LONGEST),
    data=DataConfig(dataset="my/texts", buckets=(LONGEST,), tokens_per_batch=LONGEST * 8),
)


@pytest.mark.parametrize(
    ("texts", "words"),
    [(["FG"], ""), (["FG", "", "F" * LONGEST, "G" * LONGEST], " (2 too long and 1 empty left out)")],
)
def test_what_is_left_out_is_counted(texts, words):
    assert report.left_out(split_of(texts, CONFIG)) == words


def test_what_was_resolved_is_told_in_the_numbers_of_the_data_the_model_and_the_devices():
    train, validation = split_of(["FGH"] * 23, CONFIG), split_of(["FGH"] * 5 + [""], CONFIG)
    data = pipeline.Data(None, train, validation, None, "")
    params = {"a": jax.ShapeDtypeStruct((1009, 3), "float32"), "b": jax.ShapeDtypeStruct((7,), "float32")}
    said = report.resolved(CONFIG, data, parallel.make_mesh(7), params)
    for part in (
        "my/texts: 23 examples to train on, 6 to validate (0 too long and 1 empty left out)",
        f"vocabulary {V}",
        f"{1009 * 3 + 7:,} parameters",
        "mesh over 7 x cpu",
        f"batches 8x{LONGEST}, padding {1 - 23 * 4 / (24 * LONGEST):.0%} of target; 31 target tokens a step; "
        "3 steps an epoch",
        f"{flops.train_step(CONFIG.model, 8, LONGEST) / 1e9:.3g} GFLOPs a step of 8x{LONGEST}",
    ):
        assert part in said, part


def test_of_subwords_it_is_told_how_many_texts_did_not_fit_as_they_were_drawn():
    batches = Batches(Tokens(target=[[5]]), None, num_steps=1)
    batches.drawn, batches.not_fitting = 2017, 53
    assert report.drawn(batches).startswith(f"subword sampling: 2,017 texts cut anew; {53 / 2017:.1%} of them stood as")


@pytest.mark.parametrize("architecture", CHOICES["model.architecture"])
def test_a_user_is_told_a_command_that_there_is_and_that_suits_the_model(architecture, tmp_path):
    from flaxformer_lite import __main__

    config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, architecture=architecture))
    said = report.written(Workdir(tmp_path), config, seconds=90)
    assert said.startswith(f"1.5 minutes. Written to {tmp_path}: ")
    (command,) = re.findall(rf"flaxformer-lite (\w+) --workdir={re.escape(str(tmp_path))}$", said)
    assert command in __main__.COMMANDS
