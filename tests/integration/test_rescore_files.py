"""Scores of whole files and of trained runs: those of `evaluate` and of CTranslate2."""

import gzip
import json
import math

import ctranslate2
import jax
import numpy as np
import pytest
import runs

from flaxformer_lite import rescore, trained
from flaxformer_lite.config import default_config, resolve, with_vocabulary
from flaxformer_lite.data import pipeline
from flaxformer_lite.data.sources import whole_texts
from flaxformer_lite.evaluator import Evaluator
from flaxformer_lite.exchange.exports import export
from flaxformer_lite.lines import whole_files
from flaxformer_lite.lines.score_lines import Total
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import meshes, parallel

LINE = "KING: What say you,  my lord?\n\n\tExit, gr\u00f6\u00dfer\r\n3 men. \u2028Seven \u2581\n"
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


@pytest.mark.slow
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
    assert (
        values["nats"] == nats and values["bits_per_byte"] == nats / math.log(2) / values["bytes"]
    )
    # A line alone is a text without an end symbol; an overlap of windows gives more context.
    assert rescorer.tokens(["KING: "])[0].pieces[-1] != "</s>"
    assert rescore.Rescorer(run, stride=17).score(tokens) == rescorer.score(tokens)


@pytest.mark.slow
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
    steps = {"train.num_steps": 16, "train.eval_every": 16, "train.checkpoint_every": 16}
    changes = {**runs.TINY, **steps, "optim.learning_rate": 1e-2, "data.num_buckets": None}
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
        "data.buckets": "()",
        "data.train_split": "train[:90%]",
        "data.validation_split": "train[90%:]",
        "data.test_split": "train[90%:]",
        "data.vocab_limit": "soft",
        **steps,
        "train.decode_examples": 0,
    }
    runs.fit(folder / "lm", lm)
    return folder


def pairs_of(folder, number=41):
    """Pairs of the test split: English and German."""
    run = trained.load(folder / "forward")
    dataset = pipeline.open_dataset(run.config)
    texts = dataset.part("test").read(f"test[:{number}]")
    return list(zip(texts.source, texts.target, strict=True))


def output_of(*arguments):
    """The lines that a command writes to standard output."""
    done = runs.run(*map(str, arguments))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_command_writes_the_sums_of_both_directions_in_order(trained_runs, tmp_path):
    pairs, (forward, backward) = pairs_of(trained_runs), ("forward", "backward")
    with gzip.open(tmp_path / "pairs.tsv.gz", "wt", encoding="utf-8") as file:
        file.writelines(f"{source}\t{target}\n" for source, target in pairs)
    output_of(
        "rescore", f"--workdir={trained_runs / forward}", f"--reverse={trained_runs / backward}",
        f"--input={tmp_path / 'pairs.tsv.gz'}", f"--output={tmp_path / 'out.tsv'}", "--window=7",
    )  # fmt: skip
    rows = [line.split("\t") for line in (tmp_path / "out.tsv").read_text().splitlines()]
    both = rescore.load(trained_runs / forward, reverse=trained_runs / backward)
    assert [float(row[0]) for row in rows] == pytest.approx(both(pairs), abs=2e-5)
    one = rescore.load(trained_runs / forward)
    assert [float(row[1]) for row in rows] == pytest.approx(one(pairs), abs=2e-5)
    with pytest.raises(InputError, match="has the source language 'en', expected 'de'"):
        rescore.load(trained_runs / forward, reverse=trained_runs / "other")


@pytest.mark.slow
def test_the_sums_and_the_words_of_a_file_agree(trained_runs):
    lm, path = trained_runs / "lm", trained_runs / "text.txt"
    (line,) = output_of("rescore", f"--workdir={lm}", f"--input={path}", "--total")
    total = json.loads(line)
    assert list(total) == ["nats", "tokens", "characters", "bytes", "perplexity", "bits_per_byte",
                           "nats_per_character"]  # fmt: skip
    rows = [
        line.split("\t")
        for line in output_of("rescore", f"--workdir={lm}", f"--input={path}", "--surprisal")
    ]
    bits = math.fsum(float(row[3]) for row in rows)
    assert bits == pytest.approx(total["nats"] / math.log(2), rel=1e-6)
    assert sum(int(row[4]) for row in rows) == total["tokens"]
    lines = TEXT.split("\n")
    assert [row[2] for row in rows] == TEXT.split()
    for number, _, word, *_, start, end in rows:
        assert lines[int(number) - 1][int(start) : int(end)] == word


@pytest.mark.slow
def test_an_ensemble_averages_the_probabilities_of_each_token(trained_runs):
    pairs = pairs_of(trained_runs, 7)
    folders = [trained_runs / name for name in ("forward", "other")]
    members = [rescore.load(folder).tokens(pairs) for folder in folders]
    together = rescore.load(folders[0], ensemble=folders[1]).tokens(pairs)
    for both, *each in zip(together, *members, strict=True):
        mean = np.mean([np.exp(tokens.log_probs) for tokens in each], axis=0)
        np.testing.assert_allclose(np.exp(both.log_probs), mean, rtol=1e-4)
    assert members[0] != members[1]


@pytest.mark.slow
def test_scores_are_those_of_ctranslate2(trained_runs, tmp_path):
    pairs = pairs_of(trained_runs)
    rescorer = rescore.load(trained_runs / "forward")
    run, sources = rescorer.run, [source for source, _ in pairs]
    folder = tmp_path / "exported"
    export(run, trained_runs, folder, kind="ctranslate2", quantization="float32", license=None)
    engine = ctranslate2.Translator(str(folder), device="cpu", compute_type="float32")
    words = [
        [[run.tokenizer.vocabulary_of(side)[i] for i in ids]
         for ids in run.tokenizer.encode(texts, side=side)]
        for side, texts in (("source", sources), ("target", [target for _, target in pairs]))
    ]  # fmt: skip
    theirs = [math.fsum(result.log_probs) for result in engine.score_batch(*words)]
    assert rescorer(pairs) == pytest.approx(theirs, abs=1e-4)
