"""Whole runs with two vocabularies, characters to phones: stops, commands, starts, exports."""

import json
import re

import ctranslate2
import jax
import numpy as np
import phones
import pytest
import runs

from flaxformer_lite import evaluate, trained, translate
from flaxformer_lite.data.tokens import tokenizer
from flaxformer_lite.data.tokens.two_vocabularies import sizes
from flaxformer_lite.exchange.exports import export
from flaxformer_lite.plotting.run_plots import attention_maps
from flaxformer_lite.system.errors import InputError

pytestmark = pytest.mark.slow

STEPS, HALF = 150, 75
LETTERS, SYMBOLS = 23, 13
SETTINGS = {
    **runs.TINY,
    "model.d_model": 32,
    "data.tokens_per_batch": 1024,
    "optim.learning_rate": 1e-2,
    "optim.warmup_steps": 40,
    "train.eval_every": HALF,
    "train.checkpoint_every": HALF,
    "train.log_every": 25,
    "decode.method": "beam",
}


@pytest.fixture(scope="module")
def changes(tmp_path_factory):
    """The settings of the run, with its files."""
    return {**SETTINGS, **phones.write(tmp_path_factory.mktemp("texts"))}


@pytest.fixture(scope="module")
def workdir(changes, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run"
    assert runs.fit(path, {**changes, "train.num_steps": STEPS}) == 0
    return path


@pytest.fixture(scope="module")
def translator(workdir):
    return translate.load(workdir)


def test_the_model_has_the_sizes_of_both_tokenizers_and_learns_the_phones(workdir, translator):
    model = translator.run.config.model
    assert (model.vocab_size, model.target_vocab_size) == (LETTERS, SYMBOLS)
    assert sizes(translator.run.tokenizer) == (LETTERS, SYMBOLS)
    (test,) = runs.lines_of(workdir, "test")
    assert test["accuracy"] > 0.5
    texts = phones.words(31, seed=7)
    found = translator(texts)
    assert len(set(found)) > 10
    assert {symbol for text in found for symbol in text.split()} <= {*phones.PHONES.values()}
    assert translator.n_best(texts[:1], 2)[0][0][0] == found[0]


def test_a_prefix_is_of_the_target(translator):
    texts = phones.words(7, seed=7)
    found = translator(texts, ["P3 SH"] * 7)
    assert all(text.startswith("P3 SH") for text in found) and found != translator(texts)


def test_a_run_that_stops_and_resumes_is_the_same_bit_for_bit(changes, workdir, tmp_path):
    assert runs.fit(tmp_path / "run", {**changes, "train.num_steps": HALF}) == 0
    kept = (tmp_path / "run" / "tokenizer.model").read_bytes()
    assert kept == (workdir / "tokenizer.model").read_bytes()
    assert runs.fit(tmp_path / "run", {**changes, "train.num_steps": STEPS}) == 0
    assert runs.losses(tmp_path / "run") == runs.losses(workdir)
    runs.assert_same_arrays(
        runs.checkpoint_arrays(tmp_path / "run", STEPS), runs.checkpoint_arrays(workdir, STEPS)
    )


def test_2_processes_have_the_losses_of_1(changes, workdir, tmp_path):
    own = {"train.num_steps": 50, "parallel.data": 8}
    runs.fit_in_processes(2, [(tmp_path / "run", {**changes, **own})])
    first = [loss for step, loss in runs.losses(workdir).items() if step <= 50]
    assert list(runs.losses(tmp_path / "run").values()) == pytest.approx(first, rel=1e-5)
    assert tokenizer.load(tmp_path / "run" / "tokenizer.model").fingerprint == (
        tokenizer.load(workdir / "tokenizer.model").fingerprint
    )


def test_a_sweep_trains_a_vocabulary_of_the_targets_for_each_of_its_points(changes, tmp_path):
    """The phones as symbols, and as the letters of their names."""
    own = {**changes, "train.num_steps": 5}
    flags = [f"--config.{name}={value}" for name, value in own.items()]
    sweep, folder = tmp_path / "targets.py", tmp_path / "sweep"
    sweep.write_text(
        "from flaxformer_lite.config_files import find_config, load_config, override\n"
        "SWEEP = {'objective': 'accuracy'}\n"
        "def get_config():\n"
        f"    return override(load_config(find_config('smoke')), {flags!r})\n"
        "def points(config):\n"
        "    return [{'data.target_tokenizer': kind} for kind in ('spaces', 'char')]\n"
    )
    one_device = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    done = runs.run("sweep", f"--sweep={sweep}", f"--workdir={folder}", env=one_device)
    assert done.returncode == 0, done.stderr[-2000:]
    symbols, letters = (trained.load(folder / f"points/{each}/seed0") for each in ("0000", "0001"))
    assert (symbols.config.data.target_tokenizer, sizes(symbols.tokenizer)) == (
        "spaces",
        (LETTERS, SYMBOLS),
    )
    alphabet = {*" ".join(phones.PHONES.values())}
    assert (letters.config.data.target_tokenizer, sizes(letters.tokenizer)) == (
        "char",
        (LETTERS, len(alphabet) + 4),
    )
    assert letters.config.model.target_vocab_size == len(alphabet) + 4


def test_an_evaluation_of_the_test_split_gives_the_scores_of_the_run(workdir):
    (logged,) = runs.lines_of(workdir, "test")
    scores = evaluate.evaluate(workdir, split="test").values
    assert {name: scores[name] for name in ("loss", "accuracy")} == pytest.approx(
        {name: logged[name] for name in ("loss", "accuracy")}, rel=1e-6
    )


def test_attention_maps_have_letters_as_keys_and_phones_as_queries(translator):
    maps = {each.name: each for each in attention_maps(translator.run, "mash")}
    cross = maps["cross-attention"]
    assert cross.key_tokens == ["m", "a", "s", "h", "</s>"]
    assert set(cross.query_tokens) <= {*phones.PHONES.values(), "</s>"}


def test_ctranslate2_writes_the_same_phones_by_the_code_of_the_card(translator, tmp_path):
    run = trained.with_decode(translator.run, {"method": "greedy"})
    folder = tmp_path / "exported"
    export(run, run.folder, folder, kind="ctranslate2", quantization="float32", license=None)
    for side, size in (("source", LETTERS), ("target", SYMBOLS)):
        assert len(json.loads((folder / f"{side}_vocabulary.json").read_text())) == size
    texts = phones.words(31, seed=7)
    engine = ctranslate2.Translator(str(folder), device="cpu", inter_threads=1, intra_threads=1)
    options = json.loads((folder / "decode.json").read_text())
    found = engine.translate_batch([list(text) for text in texts], **options)
    expected = translate.Translator(run)(texts)
    assert [" ".join(each.hypotheses[0]) for each in found] == expected
    assert len(set(expected)) > 10
    card = (folder / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert "sentencepiece" not in code and '" ".join(found[0].hypotheses[0])' in code


def test_the_code_of_a_safetensors_card_builds_the_model(translator, tmp_path, monkeypatch):
    run, folder = translator.run, tmp_path / "exported"
    export(run, run.folder, folder, kind="safetensors", quantization="float32", license=None)
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(folder)
    names: dict[str, object] = {}
    exec(code.replace("A text.", "mash"), names)
    assert names["logits"].shape == (1, 1, SYMBOLS)
    source = np.array([[*run.tokenizer.encode(["mash"])[0], 2]])
    expected = jax.jit(run.model.apply)({"params": run.params}, source, np.array([[1]]))
    np.testing.assert_allclose(names["logits"], expected, atol=1e-5)


def test_marian_refuses_tokenizers_that_are_no_sentencepiece_models(translator, tmp_path):
    run = translator.run
    with pytest.raises(InputError, match=r"^config\.data\.tokenizer: .* this run has 'char'"):
        export(run, run.folder, tmp_path / "out", kind="huggingface", quantization="", license=None)


@pytest.fixture(scope="module")
def child(changes, workdir, tmp_path_factory):
    """A packed run of 3 steps from the run."""
    path = tmp_path_factory.mktemp("child") / "run"
    own = {"init.run": str(workdir), "data.packing": True, "train.num_steps": 3}
    assert runs.fit(path, {**changes, **own}) == 0
    return path


def test_a_run_starts_from_another_one_with_both_vocabularies(child, workdir):
    table = (child / "init.txt").read_text()
    assert f"loaded    source_embedding/embedding ({LETTERS}, 32)" in table
    assert f"loaded    target_embedding/embedding ({SYMBOLS}, 32)" in table
    files = [(each / "tokenizer.model").read_bytes() for each in (child, workdir)]
    assert files[0] == files[1]
    assert runs.lines_of(child, "validation")[0]["accuracy"] > 0.5


def test_runs_with_both_vocabularies_in_common_form_an_ensemble(child, workdir, translator):
    both = translate.load(workdir, ensemble=child)
    texts = phones.words(7, seed=7)
    assert both.n_best(texts[:1], 1)[0][0][1] != translator.n_best(texts[:1], 1)[0][0][1]


def test_another_vocabulary_of_the_targets_is_refused(changes, workdir, tmp_path):
    own = {"init.run": str(workdir), "train.num_steps": 3, "data.target_tokenizer": "word"}
    with pytest.raises(InputError, match=r"^config\.data\.target_tokenizer: .* is 'spaces', got"):
        runs.fit(tmp_path / "run", {**changes, **own})
    with pytest.raises(InputError, match=r"^config\.data\.target_tokenizer: .* got None"):
        runs.fit(tmp_path / "run", {**changes, **own, "data.target_tokenizer": None})


@pytest.mark.usefixtures("quickly_compiled")
def test_a_run_takes_the_targets_of_another_run_and_trains_its_own_source(
    changes, workdir, tmp_path
):
    own = {"data.target_tokenizer_file": str(workdir), "data.tokenizer": "byte"}
    assert runs.fit(tmp_path / "run", {**changes, **own, "train.num_steps": 2}) == 0
    made, theirs = (
        tokenizer.load(path / "tokenizer.model") for path in (tmp_path / "run", workdir)
    )
    assert made.target.fingerprint == theirs.target.fingerprint
    assert sizes(made) == (260, SYMBOLS)
