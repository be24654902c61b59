"""Whole runs that start from another run: resumes, devices, other architectures, exports."""

import json
import shutil
import signal

import numpy as np
import pytest
import runs
from test_init import STILL, arrays, make_run

from flaxformer_lite import train, trained
from flaxformer_lite.exchange import exports
from flaxformer_lite.runs.workdir import Workdir

pytestmark = pytest.mark.slow

# 20 steps, with dropout, a moving average and 2 evaluations
LONGER = {
    **runs.TINY,
    "train.num_steps": 20,
    "train.eval_every": 10,
    "train.checkpoint_every": 5,
    "train.log_every": 1,
    "train.ema_decay": 0.9,
    "data.train_split": "train[300:600]",
}


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """A translator with random parameters; tests must not change it."""
    return make_run(tmp_path_factory.mktemp("parent") / "first", {})


def flags_of(run, changes=None):
    """Returns the command line of a run of LONGER that starts from `run`."""
    return [*runs.flags({**LONGER, **(changes or {})}), f"--init={run}"]


@pytest.fixture(scope="module")
def whole(parent, tmp_path_factory):
    """A run from `parent` without a stop."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    process = runs.run("train", *flags_of(parent), f"--workdir={workdir}")
    assert process.returncode == 0, process.stderr
    head = f"the first parameters, from {parent}; all of them are in {workdir}/init.txt:"
    lines = process.stderr.splitlines()
    first = lines.index(head)
    assert lines[first + 1 : first + 4] == [
        "  loaded    decoder/layers_0 (26 arrays)",
        "  loaded    encoder/layers_0 (16 arrays)",
        "  loaded    target_embedding/embedding (1 arrays)",
    ]
    return workdir


def test_a_run_killed_before_and_after_its_first_checkpoint_resumes_bit_for_bit(
    parent, whole, tmp_path
):
    here, run = shutil.copytree(parent, tmp_path / "here"), tmp_path / "run"
    first = [*flags_of(here), f"--workdir={run}"]
    kill = signal.SIGKILL
    assert runs.stop_at(lambda: (run / "init.json").exists(), kill, "train", *first)[0] == -kill
    assert not (run / "checkpoints" / "5").exists()
    moved = here.rename(tmp_path / "there")
    second = [f"--init={moved}", f"--workdir={run}"]
    at_three = lambda: (run / "metrics.jsonl").exists() and runs.last_step(run) >= 3  # noqa: E731
    assert runs.stop_at(at_three, kill, "train", *second)[0] == -kill
    at_twelve = lambda: runs.last_step(run) >= 12  # noqa: E731
    assert runs.stop_at(at_twelve, kill, "train", *second)[0] == -kill
    shutil.rmtree(moved)  # it has a checkpoint now
    process = runs.run("train", f"--workdir={run}")
    assert process.returncode == 0, process.stderr
    assert runs.losses(run) == runs.losses(whole)
    runs.assert_same_arrays(runs.checkpoint_arrays(run, 20), runs.checkpoint_arrays(whole, 20))


@pytest.mark.parametrize(
    "parallel",
    [
        {"parallel.data": 2, "parallel.fsdp": 2, "parallel.tensor": 2},
        {"parallel.mode": "pmap", "parallel.data": 8},
    ],
)
def test_other_devices_start_from_the_same_parameters(parent, whole, tmp_path, parallel):
    config = runs.small_config(
        {**LONGER, **parallel, "init.run": str(parent), "train.num_steps": 5, "train.eval_every": 5}
    )
    assert train.fit(config, tmp_path / "run") == 0
    expected = runs.losses(whole)
    for step, loss in runs.losses(tmp_path / "run").items():
        assert loss == pytest.approx(expected[step], rel=1e-5)


def test_an_export_is_as_good_a_start_as_its_run(parent, whole, tmp_path):
    folder = tmp_path / "exported"
    options = {"kind": "safetensors", "quantization": "float32", "license": "mit"}
    exports.export(trained.load(parent), parent, folder, **options)
    process = runs.run("train", *flags_of(folder), f"--workdir={tmp_path / 'run'}")
    assert process.returncode == 0, process.stderr
    assert runs.losses(tmp_path / "run") == runs.losses(whole)
    record, other = (json.loads((w / "init.json").read_text()) for w in (tmp_path / "run", whole))
    assert record["format"] == "safetensors" and record["parameters"] == other["parameters"]
    refused = runs.run("train", *flags_of(folder), "--init_parameters=raw")
    assert refused.returncode == 2
    (line,) = runs.error_lines(refused.stderr)
    assert "config.init.parameters: " in line and "is an export" in line


def test_an_average_and_the_raw_parameters_may_be_the_start(whole, tmp_path):
    last = {step: arrays(whole, step) for step in (15, 20)}
    averages = {step: arrays(whole, step, "ema") for step in (15, 20)}
    for changes, expected in (
        ({"init.parameters": "raw", "init.average": "none"}, None),
        ({"init.parameters": "raw", "init.average": "last:2"}, last),
        ({"init.parameters": "ema", "init.average": "last:2"}, averages),
    ):
        workdir = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        config = runs.small_config({**STILL, "init.run": str(whole), **changes})
        assert train.fit(config, workdir) == 0
        best = json.loads((workdir / "init.json").read_text())["steps"]
        parts = list((expected or {0: arrays(whole, best[-1])}).values())
        for name, x in arrays(workdir, 1).items():
            values = [
                part[name if name in part else name.replace("params", "ema")] for part in parts
            ]
            np.testing.assert_array_equal(x, np.mean(values, axis=0, dtype=np.float64).astype("f4"))


# Other architectures.


def start_of(parent, workdir, changes):
    """Trains a step without effect from `parent`; returns its parameters and its table."""
    config = runs.small_config({**STILL, "init.run": str(parent), **changes})
    assert train.fit(config, workdir) == 0
    return arrays(workdir, 1), Workdir(workdir).init_table.read_text()


def test_a_decoder_of_a_language_model_becomes_that_of_a_translator(tmp_path):
    changes = {"model.architecture": "decoder_lm"}
    model = make_run(tmp_path / "lm", changes)
    params, table = start_of(model, tmp_path / "run", {"init.missing": "random"})
    old = arrays(model, 8)
    for name, x in params.items():
        if name in old:
            assert x.tobytes() == old[name].tobytes()
        else:
            assert "encoder" in name or "cross_attention" in name
    assert "new       decoder/layers_0/cross_attention/key/kernel" in table
    assert params["params['encoder']['layers_0']['feed_forward']['inner']['kernel']"].std() > 0.1


def test_the_encoder_of_a_translator_becomes_that_of_a_classifier(parent, tmp_path):
    changes = {
        "model.architecture": "encoder_classifier",
        "data.dataset": "cldr_language",
        "data.train_split": "train[:500]",
        "train.decode_examples": 200,
        "init.missing": "random",
        "init.map": "source_inputs/embedding=target_embedding",
    }
    params, table = start_of(parent, tmp_path / "run", changes)
    old = arrays(parent, 8)
    embedding = "params['target_embedding']['embedding']"
    new = "params['source_inputs']['embedding']['embedding']"
    assert params[new].tobytes() == old[embedding].tobytes()
    encoder = [name for name in params if "encoder" in name]
    assert encoder and all(params[name].tobytes() == old[name].tobytes() for name in encoder)
    assert "new       classes/kernel" in table and "left out  decoder/layers_0" in table


def test_a_deeper_stack_repeats_layers(parent, tmp_path):
    rules = ("encoder/layers_(1|2)=encoder/layers_0", "decoder/layers_1=decoder/layers_0")
    changes = {"model.num_encoder_layers": 3, "model.num_decoder_layers": 2, "init.map": str(rules)}
    params, table = start_of(parent, tmp_path / "run", changes)
    old = arrays(parent, 8)
    for name, x in params.items():
        source = name.replace("layers_1", "layers_0").replace("layers_2", "layers_0")
        assert x.tobytes() == old[source].tobytes()
    assert "note: in that run model.num_encoder_layers is 1, not 3" in table


def test_learned_positions_of_another_length_and_an_extended_vocabulary(tmp_path):
    untied = {
        "model.position": "learned",
        "model.tie_embeddings": False,
        "model.output_bias": True,
        "model.max_length": 97,
    }
    small = make_run(tmp_path / "small", untied)
    changes = {
        **untied,
        "model.max_length": 101,
        "init.missing": "random",
        "init.vocabulary": "extend",
        "init.new_bias": -9.0,
        "data.vocab_size": 640,
        "data.dataset": "cldr_translate/en-fr",
    }
    params, table = start_of(small, tmp_path / "run", changes)
    old = arrays(small, 8)
    resized = [line.split()[1] for line in table.splitlines() if line.startswith("resized")]
    assert len(resized) == 6
    for name, x in params.items():
        assert x[: len(old[name])].tobytes() == old[name].tobytes()
    bias = params["params['output']['bias']"]
    assert bias.shape == (640,) and bias[512:].mean() < -8
    again = runs.small_config({**STILL, "init.run": str(small), **changes})
    shutil.rmtree(tmp_path / "run" / "checkpoints")  # the tokenizer is made again, and compared
    assert train.fit(again, tmp_path / "run") == 0
    model = trained.load(tmp_path / "run")
    texts = ["le 3 juin 2024", "das ist ein kleiner Hund"]
    assert model.tokenizer.decode(model.tokenizer.encode(texts)) == texts
