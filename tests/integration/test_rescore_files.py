"""Scores of whole files and of trained runs: the figures of `evaluate`, of CTranslate2, and bits."""

import json
import math

import jax
import numpy as np
import pytest
import runs

from flaxformer_lite import rescore, trained
from flaxformer_lite.cli import commands
from flaxformer_lite.cli.rescore_flags import parse_rescore
from flaxformer_lite.cli.rescore_lines import LineRescorer
from flaxformer_lite.config import default_config, resolve, with_vocabulary
from flaxformer_lite.data import pipeline
from flaxformer_lite.data.sources import whole_texts
from flaxformer_lite.data.tokens import tokenizer as tokenizer_lib
from flaxformer_lite.evaluator import Evaluator
from flaxformer_lite.lines import whole_files
from flaxformer_lite.lines.score_lines import Total
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import meshes, parallel

LINE = "KING: What say you,  my lord?\n\n\tExit, gr\u00f6\u00dfer\r\nEnter 3 of them. \u2028Seven \u2581 men\n"
TEXT = "\n" + LINE * 97 + "no line end"
WINDOWS = 67


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "text.txt").write_bytes(TEXT.encode())
    lines = [f"the {n} men say {n * n}" for n in range(7, 71)]
    (folder / "lines.txt").write_text("".join(f"{line}\n" for line in lines))
    return folder


def of_files(folder, monkeypatch, **data):
    """A language model with random parameters of a file, the file's split, and its evaluation."""
    monkeypatch.setenv("HOME", str(folder))
    config = default_config()
    config.model.update(architecture="decoder_lm", d_model=14, num_heads=7, d_ff=11)
    config.model.update(num_decoder_layers=1, max_length=WINDOWS)
    config.data.update({"dataset": "plain_text", "tokens_per_batch": 670} | data)
    for role in ("validation", "test"):
        config.data[f"{role}_split"] = "train"
    config.data.update(vocab_size=311, vocab_limit="soft")
    config = resolve(config)
    dataset = pipeline.open_dataset(config)
    path = folder / f"{data['train_files'][0].rpartition('/')[2]}.model"
    tokens = pipeline.provide_tokenizer(config, dataset, path)
    config = with_vocabulary(config, tokens.vocab_size)
    model, params = runs.varied_model(config.model)
    mesh = meshes.make_mesh(1)
    params = jax.device_put(params)
    run = trained.Trained(config, tokens, model, params, mesh, None, folder=folder)
    split = pipeline.read_split(dataset, "train", tokens, config)
    evaluator = Evaluator(model, config, parallel.MeshMode(mesh), tokens)
    return run, evaluator.evaluate(params, params, split, decode=0).values


@pytest.mark.usefixtures("quickly_compiled")
def test_the_sums_over_a_whole_file_are_those_of_its_evaluation(folder, monkeypatch):
    path = str(folder / "text.txt")
    run, evaluated = of_files(
        folder, monkeypatch, train_files=(path,), whole_files=True, windows=WINDOWS
    )
    assert len(list(whole_texts.pieces(path))) > 1
    rescorer, total = rescore.Rescorer(run), Total()
    text, tokens, of_tokens = rescore.whole_file(rescorer, path)
    total.add(text, tokens.log_probs)
    values = total.values()
    assert text == TEXT and values["characters"] == len(TEXT)
    assert values["bytes"] == len(TEXT.encode()) and values["tokens"] == len(of_tokens)
    assert len(tokens.pieces) > 5 * WINDOWS and "</s>" not in tokens.pieces
    for name in ("perplexity", "bits_per_byte", "nats_per_character"):
        assert values[name] == pytest.approx(evaluated[name], rel=2e-5)
    nats = -math.fsum(tokens.log_probs)
    assert values["nats"] == nats and values["bits_per_byte"] == nats / math.log(2) / values["bytes"]
    # A line alone is a text without an end symbol; an overlap of windows gives more context.
    assert rescorer.tokens(["KING: "])[0].pieces[-1] != "</s>"
    assert rescore.Rescorer(run, stride=17).score(tokens) == rescorer.score(tokens)


@pytest.mark.usefixtures("quickly_compiled")
def test_the_sums_over_lines_are_those_of_the_evaluation_of_packed_lines(folder, monkeypatch):
    path = folder / "lines.txt"
    run, evaluated = of_files(
        folder, monkeypatch, train_files=(str(path),), packing=True, buckets=(WINDOWS,)
    )
    rescorer, total = rescore.Rescorer(run), Total()
    lines = whole_files.read_lines(path)
    for line, tokens in zip(lines, rescorer.tokens(lines), strict=True):
        total.add(line, tokens.log_probs)
    for name in ("perplexity", "bits_per_byte", "nats_per_character"):
        assert total.values()[name] == pytest.approx(evaluated[name], rel=2e-5)
    assert math.isnan(Total().values()["perplexity"])


@pytest.fixture(scope="module")
def trained_runs(tmp_path_factory):
    """Runs of both directions, which have learnt a little, and a language model of a whole file."""
    folder = tmp_path_factory.mktemp("trained")
    changes = {**runs.TINY, "data.train_split": "train[:900]", "optim.learning_rate": 1e-2,
               "train.checkpoint_every": 48, "data.num_buckets": None}  # fmt: skip
    for name, language in (("forward", "en"), ("backward", "de")):
        runs.fit(folder / name, {**changes, "data.source_language": language})
    runs.fit(folder / "other", {**changes, "data.source_language": "en", "train.seed": 7})
    (folder / "text.txt").write_bytes(TEXT.encode())
    lm = {
        **{name: value for name, value in changes.items() if name.startswith("model.")},
        "model.architecture": "decoder_lm",
        "data.dataset": "plain_text",
        "data.train_files": f"('{folder / 'text.txt'}',)",
        "data.whole_files": True,
        "data.windows": 32,
        "data.num_buckets": None,
        "data.train_split": "train[:90%]",
        "data.validation_split": "train[90%:]",
        "data.test_split": "train[90%:]",
        "data.vocab_limit": "soft",
        "train.num_steps": 8,
        "train.decode_examples": 0,
    }
    runs.fit(folder / "lm", lm)
    return folder


def output_of(capfd, *arguments):
    """What a command writes to standard output, run in this process."""
    with pytest.raises(SystemExit) as ended:
        commands.main([*map(str, arguments)])
    out, err = capfd.readouterr()
    assert ended.value.code == 0, err
    return out.splitlines()


@pytest.fixture
def no_exit(monkeypatch):
    """Ends a command as `sys.exit`, not at once."""

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(commands, "exit_now", leave)
