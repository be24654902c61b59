"""Runs with tokenizers of characters, bytes and words: data, stops, devices, packing, starts."""

import json

import given_tokenizers
import numpy as np
import pytest
import runs
from runs import assert_same_arrays, checkpoint_arrays, fit, losses, small_config

from flaxformer_lite import generate, train, trained
from flaxformer_lite.data import pipeline
from flaxformer_lite.data.tokens import given_tokenizer, store
from flaxformer_lite.fields import BOS, UNK
from flaxformer_lite.sweep import check as sweep_check
from flaxformer_lite.sweep.space import Settings
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import run_report

SMALL = {
    **runs.TINY,
    "data.tokenizer": "char",
    "data.vocab_size": None,
    "data.tokens_per_batch": 1024,
}
PAIRS = [("der Hund  bellt", "the dog barks"), ("die Katze", "the cat"), ("ein Haus", "a house")]
CUSTOM = {
    "data.dataset": "parallel_text",
    "data.train_split": "train",
    "data.validation_split": "validation",
    "data.test_split": "test",
}


def written(folder, pairs=PAIRS, name="train"):
    """Writes pairs of texts; returns the value of the field for their files."""
    files = [folder / f"{name}.de", folder / f"{name}.en"]
    for file, texts in zip(files, zip(*pairs, strict=True), strict=True):
        file.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return ",".join(map(str, files))


def custom(folder, validation=PAIRS, **changes):
    """Returns the config of a run on PAIRS."""
    files = {
        "data.train_files": written(folder),
        "data.validation_files": written(folder, validation, "val"),
        "data.test_files": written(folder, PAIRS, "test"),
    }
    changes = {f"data.{name}": value for name, value in changes.items()}
    return small_config({**SMALL, **CUSTOM, **files, **changes})


def loaded(folder, config):
    folder.mkdir(exist_ok=True)
    return pipeline.load(config, pipeline.open_dataset(config), folder / "tokenizer.model")


@pytest.fixture
def own_datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))


def test_the_symbols_are_those_of_all_training_texts_as_they_are_read(tmp_path, own_datasets):
    data = loaded(tmp_path, custom(tmp_path))
    file = json.loads((tmp_path / "tokenizer.model").read_text())
    # Sources are normalised: 2 spaces become 1, which no target has.
    texts = [" ".join(source.split()) for source, _ in PAIRS] + [target for _, target in PAIRS]
    counts = {symbol: "".join(texts).count(symbol) for symbol in set("".join(texts))}
    assert file == {
        "kind": "char",
        "symbols": sorted(counts, key=lambda each: (-counts[each], each)),
    }
    assert data.tokenizer.vocab_size == 4 + len(counts)
    sources, targets = data.train.tokens.source, data.train.tokens.target
    assert data.tokenizer.decode(list(sources)) == texts[: len(PAIRS)]
    assert data.tokenizer.decode(list(targets)) == texts[len(PAIRS) :]


def test_unknown_words_are_reported_for_each_split(tmp_path, own_datasets, capsys):
    other = [("der Hund schläft", "the dog sleeps")]
    config = custom(tmp_path, other, tokenizer="word", vocab_size=9)
    data = loaded(tmp_path, config)
    assert data.tokenizer.vocab_size == 9
    run_report.say_unknown({"train": data.train, "validation": data.validation}, data.tokenizer)
    unknown = [
        sum(int((ids == UNK).sum()) for side in split.tokens.sides().values() for ids in side)
        for split in (data.train, data.validation)
    ]
    assert unknown[0] > 0 and unknown[1] > 1
    said = capsys.readouterr().err
    assert said == (
        f"unknown words: {unknown[0]} of 14 in train ({unknown[0] / 14:.2%}), "
        f"{unknown[1]} of 6 in validation ({unknown[1] / 6:.2%})\n"
    )
    complete = loaded(tmp_path / "all", custom(tmp_path, tokenizer="word"))
    run_report.say_unknown({"train": complete.train}, complete.tokenizer)
    assert capsys.readouterr().err == ""


def test_a_target_that_spaces_do_not_separate_is_refused(tmp_path, own_datasets):
    written(tmp_path)
    config = custom(tmp_path, tokenizer="spaces")
    assert loaded(tmp_path, config).tokenizer.kind == "spaces"
    (tmp_path / "train.en").write_text("the dog  barks\nthe cat\na house\n")
    with pytest.raises(InputError, match=r"2 spaces in a row: 'the dog  barks'"):
        loaded(tmp_path / "other", config)


def test_another_start_makes_the_same_tokenizer_or_refuses_the_changed_text(tmp_path, own_datasets):
    config = custom(tmp_path)
    path = tmp_path / "tokenizer.model"
    pipeline.provide_tokenizer(config, pipeline.open_dataset(config), path)
    again = pipeline.provide_tokenizer(config, pipeline.open_dataset(config), path, verify=True)
    assert again.kind == "char"
    path.write_bytes(path.read_bytes().replace(b'"t"', b'"\xc3\xbc"'))
    with pytest.raises(InputError, match="differs from the tokenizer that the text of 'train'"):
        pipeline.provide_tokenizer(config, pipeline.open_dataset(config), path, verify=True)


def test_a_sweep_checks_points_whose_vocabulary_only_the_texts_have():
    config = small_config(SMALL)
    assert sweep_check.config_error(config, Settings(objective="loss")) is None
    assert sweep_check.parameter_count(config) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["word", "huggingface"])
def test_child_processes_store_the_ids_of_any_kind(kind, tmp_path, own_datasets, caplog):
    changes = {"tokenizer": kind}
    if kind == "huggingface":
        (tmp_path / "tokenizer.json").write_bytes(given_tokenizers.tokenizer_json("bpe"))
        changes["tokenizer_file"] = str(tmp_path / "tokenizer.json")
    config = custom(tmp_path, **changes)
    dataset = pipeline.open_dataset(config)
    given = given_tokenizer.of_files(config)
    ours = pipeline.provide_tokenizer(config, dataset, tmp_path / "model", given=given)
    reader = dataset.reader("train")
    columns = store.tokenised(reader, ours, start=(BOS,), processes=2, show=False)
    assert "failed" not in caplog.text  # a child that fails is only warned of
    for side, texts in (("source", [a for a, _ in PAIRS]), ("target", [b for _, b in PAIRS])):
        expected = [[BOS, *row] for row in ours.encode(texts, side=side)]
        assert [row.tolist() for row in columns[side]] == expected


# Trainings.

STOPPED = {  # language models compile in half the time of translators
    **SMALL,
    "model.architecture": "decoder_lm",
    "train.num_steps": 12,
    "train.eval_every": 6,
    "train.checkpoint_every": 6,
}
WORDS = {
    **STOPPED,
    "data.tokenizer": "word",
    "data.vocab_size": 211,
    "data.packing": True,
}


def assert_repeats(folder, changes):
    """Asserts that a run with a stop is equal to one without, and one on 8 devices but rounding."""
    assert fit(folder / "whole", changes) == 0
    assert fit(folder / "parts", {**changes, "train.num_steps": 6}) == 0
    assert fit(folder / "parts", changes) == 0
    whole, parts = (checkpoint_arrays(folder / name, 12) for name in ("whole", "parts"))
    assert_same_arrays(whole, parts)
    assert losses(folder / "whole") == losses(folder / "parts")
    assert fit(folder / "eight", {**changes, "parallel.data": 8}) == 0
    one, eight = losses(folder / "whole"), losses(folder / "eight")
    assert one.keys() == eight.keys() and len(one) > 1
    np.testing.assert_allclose(list(one.values()), list(eight.values()), rtol=1e-5)


@pytest.mark.slow
def test_a_run_on_characters_resumes_exactly_and_has_the_same_losses_on_8_devices(
    tmp_path, quickly_compiled
):
    assert_repeats(tmp_path, STOPPED)
    run = trained.load(tmp_path / "whole")
    assert run.config.model.vocab_size == run.tokenizer.vocab_size < 200
    (text,) = generate.Generator(run)(["Monday"])
    assert text.startswith("Monday") and "<unk>" not in text
    child = {**STOPPED, "init.run": str(tmp_path / "whole")}
    *_, inherited = train.check(small_config(child), tmp_path / "child")
    assert inherited.tokenizer.source.content == run.tokenizer.content
    with pytest.raises(InputError, match=r"^config\.data\.tokenizer: .* is 'char', got 'word'"):
        train.check(small_config({**child, "data.tokenizer": "word"}), tmp_path / "other")


@pytest.mark.slow
def test_packed_words_resume_exactly_on_1_and_8_devices_and_known_words_are_generated(
    tmp_path, quickly_compiled
):
    assert_repeats(tmp_path, WORDS)
    run = trained.load(tmp_path / "whole")
    assert run.config.model.vocab_size == run.tokenizer.vocab_size == 211
    (text,) = generate.Generator(run)(["Monday"])
    (row,) = run.tokenizer.encode([text])
    assert run.tokenizer.decode([row]) == [text] and len(row) > 1
    assert not (row[1:] == UNK).any() and (run.tokenizer.encode(["xyz"])[0] == UNK).all()


@pytest.mark.slow
def test_packed_bytes_resume_exactly_on_1_and_8_devices(tmp_path, quickly_compiled):
    assert_repeats(tmp_path, {**STOPPED, "data.tokenizer": "byte", "data.packing": True})
    run = trained.load(tmp_path / "whole")
    assert run.config.model.vocab_size == run.tokenizer.vocab_size == 260
    (row,) = run.tokenizer.encode(["Größe"])
    assert len(row) == len("Größe".encode()) and run.tokenizer.decode([row]) == ["Größe"]
