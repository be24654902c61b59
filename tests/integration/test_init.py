"""Runs that start from another run: errors before anything is written, configs, and the start."""

import dataclasses
import json
import re
import shutil

import jax
import numpy as np
import pytest
import runs

from flaxformer_lite import config as config_lib
from flaxformer_lite import train, trained
from flaxformer_lite.cli import train_flags
from flaxformer_lite.config import with_classes, with_vocabulary
from flaxformer_lite.data import pipeline
from flaxformer_lite.exchange import exports
from flaxformer_lite.model import parameters, transformer
from flaxformer_lite.runs import workdir as workdir_lib
from flaxformer_lite.runs.workdir import Workdir
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training.checkpoint import Checkpoints

pytestmark = pytest.mark.usefixtures("quickly_compiled")

SHORT = {
    **runs.TINY,
    "train.num_steps": 6,
    "train.eval_every": 6,
    "train.checkpoint_every": 4,
    "train.log_every": 1,
}
STILL = {**SHORT, "train.num_steps": 1, "train.eval_every": 1, "optim.learning_rate": 1e-30}


def make_run(folder, changes, *, step=8, names=None):
    """Makes a run with random parameters at `step`, without training."""
    config = runs.small_config({**runs.TINY, **changes})
    dataset = pipeline.open_dataset(config)
    config = with_classes(config, dataset.label_names)
    paths = workdir_lib.create(folder, config)
    tokenizer = pipeline.provide_tokenizer(config, dataset, paths.tokenizer)
    model = transformer.build_model(with_vocabulary(config, tokenizer.vocab_size).model)
    rng = np.random.default_rng(3)
    sample = lambda x: rng.normal(size=x.shape).astype(np.float32)  # noqa: E731
    params = jax.tree.map(sample, parameters.shapes(model))
    record = {"step": step, "tokenizer": tokenizer.fingerprint, "scores": {}, "data": "a digest"}
    checkpoints = Checkpoints(paths.checkpoints)
    checkpoints.save(step, {"params": params}, {**record, "label_names": dataset.label_names})
    checkpoints.close()
    return folder


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """A translator with random parameters; tests must not change it."""
    return make_run(tmp_path_factory.mktemp("parent") / "first", {})


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A classifier with random parameters; tests must not change it."""
    changes = {"model.architecture": "encoder_classifier", "data.dataset": "cldr_language"}
    changes |= {"train.decode_examples": 200, "data.vocab_size": 1200}
    changes |= {"data.train_split": "train[:2000]", "data.validation_split": "validation[:100]"}
    return make_run(tmp_path_factory.mktemp("parent") / "classifier", changes)


def child(run, **changes):
    """Returns the config of a short run from `run`; 'init__map' is the field init.map."""
    fields = {name.replace("__", "."): value for name, value in changes.items()}
    return runs.small_config({**SHORT, "init.run": str(run), **fields})


def arrays(workdir, step, part="params"):
    """Returns the arrays of one part of a checkpoint, by name."""
    found = runs.checkpoint_arrays(workdir, step)
    return {name: x for name, x in found.items() if name.startswith(part)}


# Refused before anything is written.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__d_model": 24}, "config.model.d_model: decoder/layers_0/"),
        ({"model__num_encoder_layers": 2}, "config.init.missing: {run} lacks encoder/layers_1/"),
        ({"data__vocab_size": 600}, "config.data.vocab_size: the tokenizer of {run} has 512"),
        ({"data__tokenizer": "bpe"}, "config.data.tokenizer: the tokenizer of {run} is 'unigram'"),
        (
            {"init__vocabulary": "extend"},
            "config.data.vocab_size: the tokenizer of {run} has 512 pieces already, got 512",
        ),
        ({"init__map": "('coder=decoder',)"}, "config.init.map: 'coder=decoder' matches no"),
        ({"init__parameters": "ema"}, "config.init.run: {run}: parameters: this run keeps no"),
        ({"init__average": "last:3"}, "last:3 needs 3 checkpoints, and 1 are kept"),
        (
            {"model__architecture": "decoder_lm", "model__position": "learned"},
            "config.init.missing: {run} lacks target_inputs/position_vectors/learned/embedding; in",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(parent, tmp_path, changes, words):
    with pytest.raises(InputError) as caught:
        train.check(child(parent, **changes), tmp_path / "run")
    assert words.format(run=parent) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_parent_that_is_none_is_refused_by_its_field(parent, tmp_path):
    for name, words in (
        ("nowhere", "expected the workdir of a run, or a folder of `export safetensors`"),
        ("untrained", "there is no checkpoint yet; train that run first."),
    ):
        if name == "untrained":
            shutil.copytree(parent, tmp_path / name, ignore=lambda *_: ["checkpoints"])
        with pytest.raises(InputError) as caught:
            train.check(child(tmp_path / name), tmp_path / "run")
        start = f"config.init.run: {tmp_path / name}: "
        assert str(caught.value).startswith(start) and words in str(caught.value)
        assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_classifier_with_other_classes_is_refused_unless_its_last_layer_is_new(
    classifier, tmp_path, monkeypatch
):
    config = config_lib.to_dict(workdir_lib.read_config(classifier))
    assert config["model"]["num_classes"] == 25
    config["init"]["run"] = str(classifier)
    train.check(config_lib.resolve(config), tmp_path / "run")
    opened = pipeline.open_dataset
    config["model"]["num_classes"] = None

    def with_labels(count):
        def open_dataset(*arguments, **options):
            dataset = opened(*arguments, **options)
            dataset.label_names = [f"x{number}" for number in range(count)]
            return dataset

        return open_dataset

    for count, words in (
        (25, "config.init.run: the classes of "),
        (23, "config.model.num_classes: classes/bias has shape (23,) here, and classes/bias in "),
    ):
        monkeypatch.setattr(pipeline, "open_dataset", with_labels(count))
        config["init"]["map"] = ()
        with pytest.raises(InputError) as caught:
            train.check(config_lib.resolve(config), tmp_path / "run")
        assert str(caught.value).startswith(words) and "init.map='classes='" in str(caught.value)
        config["init"]["map"] = ("classes=",)
        train.check(config_lib.resolve(config), tmp_path / "run")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"init.missing": "random"}, "config.init.missing: requires init.run"),
        ({"init.map": "a=b"}, "config.init.map: requires init.run"),
        ({"init.run": ""}, "config.init.run: expected a path, got ''"),
        ({"init.run": "A", "init.average": "first:3"}, "config.init.average: expected last:N"),
        ({"init.run": "A", "init.new_embeddings": "random"}, "config.init.new_embeddings: requir"),
        (
            {"init.run": "A", "init.vocabulary": "extend", "init.new_bias": -5.0},
            "config.init.new_bias: requires model.output_bias=True",
        ),
        (
            {"init.run": "A", "data.tokenizer_file": "B"},
            "config.data.tokenizer_file: the tokenizer is that of init.run",
        ),
        (
            {"init.run": "A", "data.vocabulary_sample": 70},
            "config.data.vocabulary_sample: is for training a tokenizer, and that of init.run is",
        ),
        (
            {"data.tokenizer_file": "B", "data.character_coverage": 0.99},
            "config.data.character_coverage: is for training a tokenizer, and that of data.token",
        ),
        (
            {"init.run": "A", "init.vocabulary": "extend", "data.tokenizer": "marian"},
            "config.init.vocabulary: an imported tokenizer has two models",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused_by_name(fields, words):
    with pytest.raises(InputError) as caught:
        runs.small_config(fields)
    assert str(caught.value).startswith(words)


# The config of a start.


def test_without_a_config_that_of_the_run_is_inherited(parent):
    rules = r"encoder/layers_(1|2)=encoder/layers_0"
    request = train_flags.parse_train(
        [f"--init={parent}", f"--init_map={rules},decoder=decoder", "--init_missing=random",
         "--init_average=none", "--config.model.num_encoder_layers=3"]
    )  # fmt: skip
    config, old = request.config, workdir_lib.read_config(parent)
    assert config.init == config_lib.InitConfig(
        run=str(parent), map=(rules, "decoder=decoder"), missing="random", average="none"
    )
    assert config.model.num_encoder_layers == 3
    for section in ("data", "optim", "train", "decode", "parallel"):
        assert getattr(config, section) == getattr(old, section)
    assert request.new_workdir.name.startswith("first-")


def test_a_parent_of_a_parent_and_the_number_of_classes_are_not_inherited(tmp_path):
    init = {"init.run": "elsewhere", "init.missing": "random"}
    config = runs.small_config({**runs.CLASSIFIER, "model.num_classes": 5, **init})
    workdir_lib.create(tmp_path, config)
    inherited = train_flags.parse_train([f"--init={tmp_path}"]).config
    assert inherited.init == config_lib.InitConfig(run=str(tmp_path))
    model = dataclasses.replace(config.model, num_classes=None)
    assert inherited == dataclasses.replace(config, init=inherited.init, model=model)


def test_with_a_config_only_the_parameters_and_the_tokenizer_come_from_the_run(parent):
    config = train_flags.parse_train(["--config=default", f"--init={parent}"]).config
    other = train_flags.parse_train(["--config=default"]).config
    assert config == dataclasses.replace(other, init=config.init)


def test_a_run_that_is_none_is_refused_while_flags_are_parsed(tmp_path):
    with pytest.raises(InputError, match=r"^config\.init\.run: .*: expected the workdir of a run"):
        train_flags.parse_train([f"--init={tmp_path}"])


# The start.


def test_a_run_starts_from_the_parameters_and_the_tokenizer_of_another(parent, tmp_path):
    config = runs.small_config(
        {**STILL, "init.run": str(parent), "model.dropout": 0.3, "train.ema_decay": 0.9}
    )
    assert train.fit(config, tmp_path / "run") == 0
    run, old = Workdir(tmp_path / "run"), Workdir(parent)
    runs.assert_same_arrays(arrays(run.path, 1), arrays(parent, 8))
    for name, x in arrays(run.path, 1, "ema").items():
        np.testing.assert_allclose(x, arrays(parent, 8)[name.replace("ema", "params")], rtol=1e-6)
    assert run.tokenizer.read_bytes() == old.tokenizer.read_bytes()
    record = json.loads(run.init.read_text())
    assert (record["run"], record["steps"], record["kind"]) == ("first", [8], "raw")
    assert record["tokenizer"] == trained.load(parent).tokenizer.fingerprint
    lines = run.init_table.read_text().splitlines()
    assert len(lines) == len(arrays(parent, 8)) and all(line.startswith("loaded") for line in lines)
    exports.export(
        trained.load(run.path), run.path, tmp_path / "exported", kind="safetensors",
        quantization="float32", license=None,
    )  # fmt: skip
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "The first parameters are those of step 8 of the run first. SHA-256 of" in card
    assert f"- its parameters: `{record['parameters']}`" in card


@pytest.mark.slow
def test_the_parent_may_not_change_before_the_first_checkpoint_but_its_path_may(parent, tmp_path):
    here, there = shutil.copytree(parent, tmp_path / "here"), tmp_path / "there"
    config = child(here)
    assert train.fit(config, tmp_path / "run") == 0
    run = Workdir(tmp_path / "run")
    before = arrays(run.path, 6)
    shutil.rmtree(here)
    train.check(config, run.path)  # after the first checkpoint it is not needed
    shutil.rmtree(run.checkpoints)
    with pytest.raises(InputError, match=r"^config\.init\.run: .*here: expected the workdir of a"):
        train.check(config, run.path)
    shutil.copytree(parent, there)
    moved = child(there)
    assert train.fit(moved, run.path) == 0
    runs.assert_same_arrays(arrays(run.path, 6), before)
    shutil.rmtree(run.checkpoints)
    make_run(tmp_path / "other", {}, step=7)
    record = json.loads((tmp_path / "run" / "init.json").read_text())
    run.init.write_text(json.dumps({**record, "parameters": "0"}))
    with pytest.raises(InputError) as caught:
        train.check(moved, run.path)
    assert "the parameters of" in str(caught.value) and "(first" not in str(caught.value)
    assert "it has no checkpoint yet; put the old run back" in str(caught.value)


def test_whether_a_run_has_a_parent_may_not_change(parent, tmp_path):
    plain, started = (
        train.check(config, tmp_path / "new")[0]
        for config in (runs.small_config(SHORT), child(parent))
    )
    workdir_lib.create(tmp_path / "plain", plain)
    workdir_lib.create(tmp_path / "started", started)
    with pytest.raises(InputError, match=r"^config\.init\.run: the run in .*started without"):
        train.check(started, tmp_path / "plain")
    with pytest.raises(InputError, match=r"^config\.init\.run: the run in .*started from '.*first"):
        train.check(plain, tmp_path / "started")
    with pytest.raises(InputError, match=r"^config\.init\.missing: the run in .* has 'refuse'"):
        train.check(child(parent, init__missing="random"), tmp_path / "started")


# A tokenizer of another run.


def test_a_tokenizer_is_copied_from_a_file_or_a_workdir_and_known_by_its_content(parent, tmp_path):
    file = tmp_path / "any.model"
    shutil.copy(parent / "tokenizer.model", file)
    fields = {**SHORT, "data.train_split": "train[300:600]"}
    for source in (parent, file):
        config = runs.small_config({**fields, "data.tokenizer_file": str(source)})
        _, _, dataset, inherited = train.check(config, tmp_path / "run")
        path = tmp_path / f"{source.name}.model"
        pipeline.provide_tokenizer(config, dataset, path, given=inherited.tokenizer)
        assert path.read_bytes() == file.read_bytes()
        pipeline.provide_tokenizer(config, dataset, path, given=inherited.tokenizer, verify=True)
        path.write_bytes(b"another")
        words = rf"differs from the tokenizer of '{re.escape(str(source))}', and no checkpoint"
        with pytest.raises(InputError, match=words):
            pipeline.provide_tokenizer(
                config, dataset, path, given=inherited.tokenizer, verify=True
            )
    path.unlink()
    with pytest.raises(InputError, match="the tokenizer of this run is gone; put the file back"):
        pipeline.provide_tokenizer(config, dataset, path)
    for changes, words in (
        ({"data.vocab_size": 600}, "config.data.vocab_size: the tokenizer of .* has 512 pieces"),
        ({"data.tokenizer": "bpe"}, "config.data.tokenizer: the tokenizer of .* is 'unigram'"),
        ({"data.tokenizer_file": "nowhere"}, "config.data.tokenizer_file: expected a tokenizer"),
    ):
        wrong = {**fields, "data.tokenizer_file": str(parent), **changes}
        with pytest.raises(InputError, match=rf"^{words}"):
            train.check(runs.small_config(wrong), tmp_path / "run")
