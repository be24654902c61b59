"""Whole runs on windows: resumed, on 1 device and on 8, in 2 processes; and texts of them."""

import dataclasses
import subprocess

import jax
import numpy as np
import pytest
import runs

from flaxformer_lite import evaluate, generate, train, trained
from flaxformer_lite.cli import train_flags
from flaxformer_lite.data import pipeline
from flaxformer_lite.decoding.decoder import Decoder
from flaxformer_lite.fields import BOS, EOS
from flaxformer_lite.training import step

pytestmark = pytest.mark.slow

WINDOW, STEPS, HALF = 19, 20, 10
TEXT = "".join(
    f"SPEAKER {number % 7}:\nWhat {word} is this,\n  {word}?\n\n"
    for number in range(23)
    for word in ("light", "sound", "größer", "counsel")
)
CONFIG = f"""
from flaxformer_lite.config import default_config

def get_config():
    config = default_config()
    config.model.update(architecture="decoder_lm", num_decoder_layers=1, d_model=16, num_heads=2)
    config.model.update(d_ff=24, max_length={WINDOW}, norm_placement="pre", activation="gelu")
    config.data.update(dataset="plain_text", train_files=("text.txt",), whole_files=True)
    config.data.update(train_split="train[:80%]", windows={WINDOW}, tokens_per_batch={WINDOW * 16})
    config.data.update(validation_split="train[80%:]", test_split="train[80%:]", rows_multiple=16)
    config.data.update(tokenizer="bpe", vocab_size=320, vocab_limit="soft")
    config.optim.update(schedule="constant", learning_rate=3e-3, warmup_steps=3)
    config.train.update(num_steps={STEPS}, log_every=1, eval_every={HALF}, checkpoint_every={HALF})
    config.decode.update(max_extra_length={WINDOW})
    config.parallel.data = 1
    return config
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("windows")
    (folder / "text.txt").write_text(TEXT)
    (folder / "config.py").write_text(CONFIG)
    return folder


def config_of(folder, **changes):
    """Returns the config in `folder`; `changes`: section__field=value."""
    flags = [f"--config.{name.replace('__', '.')}={value}" for name, value in changes.items()]
    return train_flags.parse_train([f"--config={folder}/config.py", *flags]).config


@pytest.fixture(scope="module")
def finished(folder):
    """A run on 1 device without a stop."""
    assert train.fit(config_of(folder), folder / "whole") == 0
    return folder / "whole"


def test_a_resumed_run_has_the_bits_of_one_without_a_stop(folder, finished):
    """The stop is within an epoch, and the offset of the next one must be the same."""
    run = trained.load(finished)
    dataset = pipeline.open_dataset(run.config)
    plan = pipeline.stored_split(dataset, "train[:80%]", run.tokenizer, run.config).plan
    assert 1 < plan.steps_per_epoch < HALF and HALF % plan.steps_per_epoch
    workdir = folder / "resumed"
    assert train.fit(config_of(folder, train__num_steps=HALF), workdir) == 0
    assert train.fit(config_of(folder), workdir) == 0
    assert runs.losses(workdir) == runs.losses(finished)
    runs.assert_same_arrays(
        runs.checkpoint_arrays(workdir, STEPS), runs.checkpoint_arrays(finished, STEPS)
    )


@pytest.mark.parametrize("mode", ["mesh", "pmap"])
def test_runs_on_8_devices_have_the_losses_of_1(folder, finished, mode):
    workdir = folder / mode
    changed = config_of(folder, parallel__data=8, parallel__mode=mode)
    assert train.fit(changed, workdir) == 0
    assert list(runs.losses(workdir).values()) == pytest.approx(
        list(runs.losses(finished).values()), rel=1e-5
    )
    (mine,), (first,) = (runs.lines_of(path, "test") for path in (workdir, finished))
    assert mine["loss"] == pytest.approx(first["loss"], rel=1e-5)


def test_2_processes_have_the_losses_of_1(folder, finished):
    workdir = folder / "processes"
    flags = [f"--config={folder}/config.py", "--config.parallel.data=8", f"--workdir={workdir}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    started = runs.processes(2, *flags, script=[str(runs.ROOT / "train.py")], **pipes)
    try:
        ends = [process.communicate(timeout=180)[0].decode()[-2000:] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(ends)
    assert list(runs.losses(workdir).values()) == pytest.approx(
        list(runs.losses(finished).values()), rel=1e-5
    )


def test_evaluating_a_run_counts_each_token_and_character_of_its_split_once(finished):
    """The loss of the log, of the command, and of shorter windows of the same text."""
    run = trained.load(finished)
    (logged,) = runs.lines_of(finished, "test")
    values = evaluate.evaluate_run(run, "test").values
    assert values == pytest.approx({name: logged[name] for name in values}, rel=1e-5)
    text = TEXT[len(TEXT) * 4 // 5 :]
    whole, line_end = run.tokenizer.encode(["\n" + text, "\n"])
    tokens = len(whole) - len(line_end)
    assert values["nats_per_character"] == pytest.approx(values["loss"] * tokens / len(text))
    size = len(text.encode())
    assert values["bits_per_byte"] * size == pytest.approx(values["bits_per_character"] * len(text))
    assert size > len(text)
    short = dataclasses.replace(run.config.data, windows=3)
    other = dataclasses.replace(run, config=dataclasses.replace(run.config, data=short))
    assert evaluate.evaluate_run(other, "test").values["loss"] > values["loss"]


def log_prob(run, before, ids):
    """Returns the log-probability of ids after the token `before`, by the loss of training."""
    batch = {
        "target": np.asarray(ids, np.int32)[None],
        "before": np.array([before], np.int32),
        "row": np.zeros(1, np.int32),
    }
    loss = jax.jit(lambda params: step.loss_sums(params, batch, model=run.model)[1]["loss"])
    return -float(loss(run.params)[0])


@pytest.mark.parametrize(
    ("within_texts", "prompt"), [(False, "SPEAKER"), (True, "SPEAKER"), (True, "")]
)
def test_a_generated_text_has_the_log_probability_that_training_gives_it(
    finished, prompt, within_texts
):
    """A prompt is read after the start symbol, or as the first tokens of a window."""
    run = trained.load(finished)
    texts = dataclasses.replace(run.config.decode, method="beam", beam_size=3, alpha=0.0)
    decoder = Decoder(run.model, texts, within_texts=within_texts)
    ids = run.encode([prompt])[0]
    hypotheses = decoder.n_best(run.params, [ids], 3)[0]
    assert len(hypotheses) == 3 and all(len(best) > len(ids) for best, _ in hypotheses)
    scores = [score for _, score in hypotheses]
    found = []
    for best, _ in hypotheses:
        assert best[: len(ids)].tolist() == ids.tolist()
        labels = best if len(best) == WINDOW else np.append(best, EOS)
        if within_texts and len(ids):
            found.append(log_prob(run, labels[0], labels[1:]))
        else:
            found.append(log_prob(run, BOS, labels))
    # In a window the first token of a prompt has no probability; all hypotheses have that token.
    assert np.subtract(scores, scores[0]) == pytest.approx(np.subtract(found, found[0]), abs=1e-4)
    if not (within_texts and prompt):
        assert scores == pytest.approx(found, rel=1e-4)


def test_generate_reads_a_prompt_of_a_file_as_a_window_and_an_empty_one_as_a_start(finished):
    run = trained.load(finished)
    prompts = ["", "SPEAKER", "What", ""]
    rows = [run.encode([prompt])[0] for prompt in prompts]
    generated = generate.load(finished)(prompts)
    logits_of = jax.jit(lambda params, row: run.model.apply({"params": params}, row))
    decoded = []
    for ids in rows:
        text = list(ids)
        while len(text) < WINDOW and EOS not in text:
            read = text if len(ids) else [BOS, *text]
            row = np.pad(np.array(read), (0, WINDOW - len(read)))[None]
            text.append(int(logits_of(run.params, row)[0, len(read) - 1].argmax()))
        decoded.append(np.array(text))
    assert generated == run.tokenizer.decode(decoded)
    others = Decoder(run.model, run.config.decode)(run.params, rows)
    assert run.tokenizer.decode(others) != generated
    sampled = generate.load(finished, method="sample", seed=3)(["SPEAKER"] * 3)
    assert all(text.startswith("SPEAKER") for text in sampled) and len({*sampled}) == 3
