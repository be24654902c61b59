"""Bad input ends a command with one line on standard error, exit code 2, and no new file."""

import errno
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import runs

from flaxformer_lite.cli import commands, parser
from flaxformer_lite.runs import metrics_log
from flaxformer_lite.system import runtime, storage
from flaxformer_lite.system.errors import NotWritten
from flaxformer_lite.training.checkpoint import Checkpoints

NO_WORKDIR = "--workdir=never_made"


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):
    """Returns a function that runs a command in this process and returns its one error message."""
    monkeypatch.chdir(tmp_path)
    # Both are for a process of its own: the first configures it, the second ends it at once.
    monkeypatch.setattr(runtime, "start", lambda: None)
    monkeypatch.setattr(commands, "exit_now", sys.exit)

    def run(*arguments: str) -> str:
        before = runs.files_below(tmp_path)
        with pytest.raises(SystemExit) as ended:
            commands.main(list(arguments))
        out, err = capfd.readouterr()
        assert ended.value.code == 2
        assert out == ""
        assert len(runs.error_lines(err)) == 1, err
        assert runs.files_below(tmp_path) == before
        return runs.error_lines(err)[0]

    return run


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        (
            "--config.model.num_head=4",
            "config.model.num_head: there is no such field; did you mean 'num_heads'",
        ),
        (
            "--config.modle.num_heads=4",
            "config.modle: there is no such field; did you mean 'model'",
        ),
        ("--config.model.d_model=wide", "config.model.d_model: expected int, got 'wide'"),
        (
            "--config.train.label_smoothing=1.5",
            "config.train.label_smoothing: expected at least 0 and less than 1",
        ),
        (
            "--config.model.num_heads=7",
            "config.model.num_heads: 7 heads do not divide d_model = 64",
        ),
        (
            "--config.model.position=sinusodal",
            "config.model.position: 'sinusodal' is not a choice; did you mean",
        ),
        ("--config.parallel.data=9", "config.parallel.data: 9 devices asked for, there are 8"),
        (
            "--config.data.dataset=cldr_translate/en-xx",
            "config.data.dataset: cannot open 'cldr_translate/en-xx'",
        ),
        ("--config.parallel.fsdp=9", "config.parallel.fsdp: 1 data x 9 fsdp = 9 devices asked for"),
        ("--config.data.dataset=no_such_thing", "config.data.dataset: cannot open 'no_such_thing'"),
        (
            "--config.data.train_split=trian",
            "config.data: cldr_translate/en-de has no split 'trian'; it has train",
        ),
        ("--config.data.dataset=cldr_translate/en", "<source>-<target>"),
        (
            "--config.data.test_split=tset",
            "config.data: cldr_translate/en-de has no split 'tset'; it has train",
        ),
        (
            "--config.data.buckets=wide",
            "config.data.buckets: expected a tuple of int, got ('wide',)",
        ),
        ("--config.train.num_steps=0", "config.train.num_steps: expected 1 or more, got 0"),
        ("--num_processes=2", "go together: give all three"),
        (
            "--config.data.source_language=fr",
            "config.data.source_language: cldr_translate/en-de has en and de",
        ),
        (
            "--config.data.vocab_size=60000",
            "config.data.vocab_size: this text has at most 1,315 pieces, got 60,000; lower it,",
        ),
        ("--config.data.vocab_size=many", "config.data.vocab_size: expected int, got 'many'"),
        ("--no_such_flag=1", "no_such_flag"),
        ("--config=no_such_config", "--config=no_such_config: no such file and no shipped config"),
        ("surplus", "'surplus': expected only flags"),
        (
            "--config.data.subword_sampling=1.0",
            "config.data.subword_sampling: expected at least 0 and less than 1",
        ),
        (
            "--config.data.dataset=cldr_language",
            "config.data.dataset: expected a translation dataset, two texts an",
        ),
        (
            "--config.model.architecture=encoder_classifier",
            "needs a dataset with one ClassLabel, such as cldr_language",
        ),
        (
            "--config.model.architecture=encoder",
            "config.model.architecture: 'encoder' is not a choice; did you mean",
        ),
        (
            "--config.train.average=last:5",
            "config.train.average: 'last:5' needs 5 checkpoints, and train.keep_newest = 2",
        ),
        (
            "--config.train.best_metric=bleu_tokenized",
            "config.train.best_metric: 'bleu_tokenized' is not computed if",
        ),
        (
            "--config.model.num_kv_heads=3",
            "config.model.num_kv_heads: 3 does not divide num_heads = 8",
        ),
        (
            "--config.data.train_files=a.tsv",
            "config.data.train_files: cldr_translate/en-de reads no files; leave them out",
        ),
        (
            "--config.data.train_files=(7,)",
            "config.data.train_files: expected a tuple of str, got (7,)",
        ),
        (
            "--config.data.dataset=parallel_text",
            "config.data.train_files: required by parallel_text, for example ('a",
        ),
        ("--config.data.faults=ignore", "config.data.faults: 'ignore' is not a choice"),
        (
            "--config.data.test_dataset=wmt14_translate/de-en",
            "config.data.test_dataset: wmt14_translate/de-en is not prepared",
        ),
        (
            "--config.model.num_classes=7",
            "config.model.num_classes: expected None, the number of classes of the dataset, or",
        ),
    ],
)
def test_a_wrong_flag_of_train_is_refused_by_name(refused, flag, words):
    assert words in refused("train", *runs.flags(), NO_WORKDIR, flag)


def test_a_batch_that_the_devices_cannot_share_is_refused(refused):
    message = refused(
        "train", *runs.flags({"parallel.data": 8, "data.rows_multiple": 12}), NO_WORKDIR
    )
    assert "config.data.rows_multiple: 12 rows cannot be split evenly over 8 devices" in message


def test_an_odd_width_with_sinusoidal_positions_is_refused_with_advice(refused):
    message = refused(
        "train",
        *runs.flags(),
        NO_WORKDIR,
        "--config.model.d_model=63",
        "--config.model.num_heads=7",
    )
    assert "config.model.d_model: sinusoidal positions" in message
    assert "make it even, or use another model.position" in message


def test_a_config_file_that_fails_is_named_with_its_line(refused, tmp_path):
    (tmp_path / "mine.py").write_text("def get_config():\n    return 1 / 0\n")
    assert "mine.py:2: ZeroDivisionError" in refused("train", "--config=mine.py", NO_WORKDIR)


def test_a_workdir_that_is_a_file_is_refused(refused, tmp_path):
    (tmp_path / "taken").write_text("mine")
    assert "--workdir=taken: expected a folder, but it is a file" in refused(
        "train", *runs.flags(), "--workdir=taken"
    )


def test_a_folder_in_place_of_a_file_is_one_message_and_no_file_is_left(tmp_path, capsys):
    (tmp_path / "test.txt" / "kept").mkdir(parents=True)
    with pytest.raises(NotWritten) as failed:
        storage.write_whole(tmp_path / "test.txt", "a text")
    assert parser.complain_of(failed.value) == 1
    assert f"{tmp_path}/test.txt: cannot be written: a folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["test.txt"]


def test_a_workdir_below_a_file_is_refused(refused, tmp_path):
    (tmp_path / "taken").write_text("mine")
    assert "cannot be written to" in refused("train", *runs.flags(), "--workdir=taken/run")


@pytest.mark.skipif(
    sys.platform != "linux",
    reason="nobody can create a folder in /proc, which only Linux has",
)
@pytest.mark.parametrize("workdir", ["/proc/run", "/sys/new/run"])
def test_a_workdir_that_cannot_be_written_is_refused(refused, workdir):
    message = refused("train", *runs.flags(), f"--workdir={workdir}")
    assert f"--workdir={workdir}" in message and "cannot be written to" in message


def test_a_workdir_without_permission_is_refused(refused, monkeypatch, tmp_path):
    (tmp_path / "closed").mkdir()
    # root may write to any folder
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("closed"))
    assert "closed cannot be written to" in refused("train", *runs.flags(), "--workdir=closed/run")


@pytest.mark.slow
def test_a_workdir_on_a_read_only_file_system_is_refused(tmp_path):
    source, mounted = tmp_path / "source", tmp_path / "mounted"
    source.mkdir()
    mounted.mkdir()
    mount = f"mount --bind {source} {mounted} && mount -o remount,ro,bind {mounted}"
    inside = ["unshare", "--mount", "--map-root-user", "sh", "-ec"]
    if (
        not shutil.which("unshare")
        or subprocess.run([*inside, mount], capture_output=True).returncode
    ):
        pytest.skip("this system does not let users mount")
    command = runs.start_command("train", *runs.flags(), f"--workdir={mounted}/run")
    process = subprocess.run(
        [*inside, f"{mount}; exec {shlex.join(command)}"], capture_output=True, text=True
    )
    assert process.returncode == 2
    assert (
        process.stderr.startswith(f"error: --workdir={mounted}/run")
        and process.stderr.count("\n") == 1
    )
    assert "cannot be written to" in process.stderr


def test_the_workdir_of_another_config_is_refused_with_both_values(refused, finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "run")
    message = refused("train", *runs.flags(), "--workdir=run", "--config.model.dropout=0.25")
    assert "config.model.dropout: the run in run has 0.1, and this start asks for 0.25" in message


def test_a_workdir_that_is_not_utf_8_is_refused_before_a_checkpoint_would_fail(
    refused, finished_run
):
    """TensorStore, which reads and writes the checkpoints, takes no other path."""
    name = os.fsdecode(b"run\xff")
    shutil.copytree(finished_run, name)
    for command in ("translate", "evaluate", "train"):
        message = refused(command, f"--workdir={name}")
        assert message.startswith("error: --workdir=run")
        assert message.endswith(
            ": expected a path in UTF-8, as checkpoints need; rename the folder, or use another."
        )


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cuda", "gppu"])
@pytest.mark.skipif(runtime.has_other_accelerator(), reason="the platform may exist")
def test_a_platform_that_is_not_there_is_refused_by_its_variable(finished_run, platform):
    process = runs.run(
        "translate", f"--workdir={finished_run}", env={**os.environ, "JAX_PLATFORMS": platform}
    )
    assert process.returncode == 2
    (line,) = process.stderr.splitlines()
    assert line.startswith(f"error: JAX_PLATFORMS={platform}: JAX cannot start: ")
    assert line.endswith("set it to a platform of this machine, such as cpu, or unset it.")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_every_encoding_prints_every_text(monkeypatch, encoding):
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding=encoding))
    parser.escape_output()
    print(f"12 ± 3 € in {os.fsdecode(b'x')}", os.fsdecode(b"\xff.txt"), flush=True)
    expected = {
        "ascii": b"12 \\xb1 3 \\u20ac in x \\udcff.txt\n",
        "latin-1": b"12 \xb1 3 \\u20ac in x \\udcff.txt\n",
        "utf-8": "12 ± 3 € in x ".encode() + b"\xff.txt\n",
    }
    assert printed.getvalue() == expected[encoding]


def test_a_workdir_with_another_tokenizer_is_refused(refused, finished_run, tmp_path):
    from flaxformer_lite.data.cldr import phrase_families
    from flaxformer_lite.data.tokens import tokenizer

    shutil.copytree(finished_run, tmp_path / "run")
    path, config = tmp_path / "run" / "tokenizer.model", runs.small_config()
    phrases = phrase_families.phrases("fr", "it", per_kind=40)
    texts = [text for phrase in phrases for text in (phrase.source, phrase.target)]
    path.unlink()
    tokenizer.train(texts, path, vocab_size=config.data.vocab_size, kind=config.data.tokenizer)
    message = refused("train", *runs.flags({"train.num_steps": 60}), "--workdir=run")
    assert (
        "run/tokenizer.model: not what the run in " in message
        and "was trained with up to step 48; put the" in message
    )
    path.unlink()
    tokenizer.train(texts, path, vocab_size=400, kind=config.data.tokenizer)
    message = refused("train", *runs.flags({"train.num_steps": 60}), "--workdir=run")
    assert (
        "run/tokenizer.model: expected a tokenizer of 512 pieces (data.vocab_size), got 400; put "
        "the run's" in message
    )
    assert "run/tokenizer.model" in refused("translate", "--workdir=run")


def test_a_checkpoint_folder_with_garbage_in_it_is_refused_and_left_as_it_is(
    refused, finished_run, tmp_path
):
    shutil.copytree(finished_run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "checkpoints" / "24").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "24" / "notes.txt").write_text("garbage")
    message = refused("train", *runs.flags(), "--workdir=run")
    assert "checkpoints/24: damaged checkpoint" in message
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "24")
    (tmp_path / "run" / "checkpoints" / "notes.txt").write_text("garbage")
    assert "expected checkpoints, found only notes.txt" in refused(
        "train", *runs.flags(), "--workdir=run"
    )


def test_a_new_workdir_with_garbage_for_checkpoints_is_refused_and_left_as_it_is(refused, tmp_path):
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    (tmp_path / "new" / "checkpoints" / "notes.txt").write_text("garbage")
    assert "found only notes.txt" in refused("train", *runs.flags(runs.TINY), "--workdir=new")


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {"d_modl": 3}}', '{"model": 3}'])
def test_an_invalid_saved_config_is_refused_with_its_path(refused, tmp_path, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(text)
    for command in ("train", "evaluate"):
        assert "run/config.json: cannot be read as a config" in refused(command, "--workdir=run")


def test_an_invalid_tokenizer_is_refused_with_its_path(refused, finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "run")
    (tmp_path / "run" / "tokenizer.model").write_text("not a tokenizer")
    for arguments in (["train", "--config.train.num_steps=60"], ["evaluate"]):
        assert "run/tokenizer.model: expected a SentencePiece model" in refused(
            *arguments, "--workdir=run"
        )


# Commands that read lines, a suitable run, and the longest text that it accepts, in tokens.
READING = [("translate", "finished_run", 127)]
READING += [pytest.param("classify", "finished_classifier", 126, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("command", "run", "longest"), READING)
def test_input_that_is_not_utf8_is_named_by_file_and_line(
    refused, request, tmp_path, command, run, longest
):
    workdir = request.getfixturevalue(run)
    (tmp_path / "latin1.txt").write_bytes("one\nzwei\nk\xe4se\n".encode("latin-1"))
    message = refused(command, f"--workdir={workdir}", "--input=latin1.txt", "--output=out.txt")
    assert "latin1.txt, line 3: expected UTF-8, got byte 0xe4 at column 2" in message


@pytest.mark.parametrize(("command", "run", "longest"), READING)
def test_a_sentence_that_is_too_long_is_refused_with_its_line_number(
    refused, request, tmp_path, command, run, longest
):
    workdir = request.getfixturevalue(run)
    (tmp_path / "in.txt").write_text("one\n" + "1 " * 200 + "\n")
    message = refused(command, f"--workdir={workdir}", "--input=in.txt", "--output=out.txt")
    assert "in.txt, line 2: " in message
    assert f"the model takes at most {longest}" in message
    assert ("or have that done by --long=split. It starts: '1 1 " in message) == (
        command == "translate"
    )


def test_generate_checks_the_output_file_before_the_run(refused, tmp_path):
    assert "--output=no/out.txt: cannot be written: No such file" in refused(
        "generate", "--workdir=missing", "--output=no/out.txt"
    )


@pytest.mark.slow
def test_a_prompt_that_is_too_long_is_refused(refused, finished_language_model):
    message = refused(
        "generate",
        f"--workdir={finished_language_model}",
        f"--prompt={'1 ' * 200}",
        "--output=out.txt",
    )
    assert "the model takes at most 127; split it" in message


@pytest.mark.parametrize(("command", "run", "longest"), READING)
def test_an_input_or_output_that_cannot_be_opened_is_named(
    refused, request, tmp_path, command, run, longest
):
    workdir = request.getfixturevalue(run)
    (tmp_path / "in.txt").write_text("one\n")
    assert "--input=none.txt" in refused(command, f"--workdir={workdir}", "--input=none.txt")
    message = refused(
        command, f"--workdir={workdir}", "--input=in.txt", "--output=no/such/folder/out.txt"
    )
    assert "--output=no/such/folder/out.txt" in message


SUITABLE = {
    "translate": ("finished_run", "encoder_decoder"),
    "classify": ("finished_classifier", "encoder_classifier"),
    "generate": ("finished_language_model", "decoder_lm"),
}


@pytest.mark.parametrize(
    ("command", "run"),
    [
        pytest.param(command, run, marks=[] if run == "finished_run" else [pytest.mark.slow])
        for command in SUITABLE
        for run, _ in SUITABLE.values()
        if run != SUITABLE[command][0]
    ],
)
def test_a_command_on_a_run_of_another_shape_is_refused_with_both_shapes(
    refused, request, command, run
):
    workdir = request.getfixturevalue(run)
    (shape,) = [shape for other, shape in SUITABLE.values() if other == run]
    message = refused(command, f"--workdir={workdir}", "--output=out.txt")
    assert (
        f"{command} needs a run with model.architecture={SUITABLE[command][1]!r}, this one is "
        f"{shape!r}" in message
    )


@pytest.mark.slow
def test_the_workdir_of_another_shape_is_refused_with_both_shapes(
    refused, finished_language_model, tmp_path
):
    shutil.copytree(finished_language_model, tmp_path / "run")
    message = refused("train", *runs.flags(), "--workdir=run")
    assert (
        "config.model.architecture: the run in run has 'decoder_lm', and this start asks for "
        "'encoder_de" in message
    )


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        (
            "--method=sampel",
            "config.decode.method: 'sampel' is not a choice; did you mean 'sample'",
        ),
        (
            "--temperature=0",
            "config.decode.temperature: expected a positive finite number, got 0.0",
        ),
        (
            "--temperature=inf",
            "config.decode.temperature: expected a positive finite number, got inf",
        ),
        ("--top_k=0", "config.decode.top_k: expected 1 or more, got 0"),
        ("--top_p=1.5", "config.decode.top_p: expected a share of at most 1, got 1.5"),
        ("--seed=-1", "config.decode.seed: expected 0 or more, got -1"),
        ("--max_extra_length=-1", "config.decode.max_extra_length: expected 0 or more, got -1"),
        ("--count=0", "count"),
        ("--method=greedy --top_k=3", "config.decode.top_k: requires decode.method='sample'"),
        ("--prompt=k\udce4se", "--prompt: expected UTF-8, got 'k\\udce4se'"),
        ("--config.decode.seed=1", "config.decode.seed"),
        ("--output=no/such/folder/out.txt", "--output=no/such/folder/out.txt: cannot be written"),
    ],
)
def test_a_wrong_flag_of_generate_is_refused_by_name(refused, finished_language_model, flag, words):
    assert words in refused("generate", f"--workdir={finished_language_model}", *flag.split())


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--beam_size=8", "config.decode.beam_size: requires decode.method='beam'"),
        ("--method=beam --alpha=nan", "config.decode.alpha: expected 0.0 or more, got nan"),
        ("--n_best=0", "n_best"),
        ("--n_best=2", "decode.method='stochastic_beam', and it is 'greedy'; set one of them"),
        ("--method=diverse_beam --beam_groups=3", "config.decode.beam_groups: 3 groups do not"),
        (
            "--method=stochastic_beam --alpha=1",
            "config.decode.alpha: requires decode.method='beam'",
        ),
        ("--method=beam --n_best=5", "n_best: expected 1 to 4 (decode.beam_size), got 5"),
        ("--prefix=k\udce4se", "--prefix: expected UTF-8, got 'k\\udce4se'"),
        (
            "--method=beam --n_best=2 --long=split",
            "--long=split: applies only to plain translations",
        ),
        ("--tokens_per_batch=0", "config.decode.tokens_per_batch: expected 1 or more, got 0"),
        ("--restart", "--restart: requires --output=FILE"),
        (
            "--input=in.txt --output=no/out.txt",
            "--output=no/out.txt: cannot be written: No such file or directory",
        ),
        (
            "--input=none.txt --output=out.txt",
            "--input=none.txt: cannot be read: No such file or directory",
        ),
        (f"--input=in.txt --prefix={'1' * 200}", "error: prefix 1: 2"),
    ],
)
def test_a_wrong_flag_of_translate_is_refused_by_name(refused, finished_run, tmp_path, flag, words):
    (tmp_path / "in.txt").write_text("3 days\n")
    assert words in refused("translate", f"--workdir={finished_run}", *flag.split())


def test_the_partial_output_of_another_job_is_refused_and_not_changed(
    refused, finished_run, tmp_path
):
    (tmp_path / "in.txt").write_text("3 days\n")
    (tmp_path / "out.txt.partial").write_text("mine")
    message = refused(
        "translate", f"--workdir={finished_run}", "--input=in.txt", "--output=out.txt"
    )
    assert (
        "--output=out.txt: out.txt.partial is there, and out.txt.partial.json, which records "
        "its source" in message
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "plot: expected one of attention, positions, schedule, metrics"),
        (
            "atention --workdir={run}",
            "plot: expected one of attention, positions, schedule, metrics, got 'atention'",
        ),
        ("attention --workdir={run}", "--text: expected the text to read"),
        ("schedule --workdir={run} --text=3", "--text: applies only to plot attention"),
        ("attention --workdir={run} --text=k\udce4se", "--text: expected UTF-8, got 'k\\udce4se'"),
        (
            "attention --workdir=none --text=3",
            "none: expected the workdir of a run, but it has no config.json",
        ),
        (
            "positions --workdir=none",
            "none: expected the workdir of a run, but it has no config.json",
        ),
        (
            "schedule --workdir=none",
            "none: expected the workdir of a run, but it has no config.json",
        ),
        ("metrics {run} none", "none: expected the workdir of a run, but it has no config.json"),
        (
            "metrics {run} --workdir={run}",
            "plot metrics: name the folders one after another, or one by --workdir",
        ),
        ("schedule {run}", "expected only flags"),
        ("schedule --workdir={run} --output=taken", "--output=taken: cannot be written to: "),
        ("metrics {run} --output=taken/below", "--output=taken/below: cannot be written to: "),
    ],
)
def test_a_wrong_plot_command_is_refused_and_writes_nothing(
    refused, finished_classifier, tmp_path, arguments, words
):
    (tmp_path / "taken").write_text("mine")
    before = runs.files_below(finished_classifier)
    assert words in refused("plot", *arguments.format(run=finished_classifier).split())
    assert runs.files_below(finished_classifier) == before


@pytest.mark.parametrize("text", ["", "1 " * 200])
def test_the_attention_of_a_text_without_tokens_or_with_too_many_is_not_plotted(
    refused, finished_classifier, text
):
    arguments = [f"--workdir={finished_classifier}", f"--text={text}", "--output=out"]
    assert ("text 1: " if text else "--text: ") in refused("plot", "attention", *arguments)


def test_a_name_that_is_too_long_for_the_system_is_refused_in_one_line(refused):
    message = refused("translate", f"--workdir={'x' * 300}")
    assert "x" * 300 in message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--workdir=typo", "--workdir=typo: expected the workdir of a run"),
        (
            "--config=smoke --workdir={run}",
            "--workdir={run}: expected this or --config, got both",
        ),
    ],
)
def test_plan_refuses_a_missing_run_and_a_run_with_a_config(refused, finished_run, flags, words):
    assert words.format(run=finished_run) in refused(
        "plan", *flags.format(run=finished_run).split()
    )


@pytest.mark.parametrize("command", ["translate", "evaluate", "classify", "generate"])
def test_a_workdir_without_a_run_is_refused(refused, command, tmp_path):
    assert "--workdir: expected the folder of a run" in refused(command)
    (tmp_path / "empty").mkdir()
    assert "empty: expected the workdir of a run, but it has no config.json" in refused(
        command, "--workdir=empty"
    )


def test_a_run_without_a_checkpoint_yet_is_refused(refused, finished_run, tmp_path):
    (tmp_path / "run").mkdir()
    for name in ("config.json", "tokenizer.model"):
        shutil.copy(finished_run / name, tmp_path / "run" / name)
    for arguments in (
        ["translate"],
        ["evaluate"],
        ["plot", "attention", "--text=3"],
        ["plot", "positions"],
    ):
        assert "there is no checkpoint yet" in refused(*arguments, "--workdir=run")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--ensemble=none", "none: expected the workdir of a run, but it has no config.json"),
        (
            "--ensemble={run}",
            "ensemble: {run} is named 2 times, and would count 2 times; leave it out",
        ),
        (
            "--ensemble={run}/.",
            "ensemble: {run}/. is the same model as {run}, which would count 2 times; leave it out",
        ),
        ("--ensemble={run}/../run --parameters=ema", "this run keeps no moving average"),
        (
            "--ensemble={classifier}",
            "{classifier}: translate needs a run with model.architecture='encoder_decoder'",
        ),
        ("--ensemble={classifier} --average=last:2", "translate needs a run"),
        ("--ensemble=", "--ensemble: expected folders of runs"),
    ],
)
def test_runs_that_cannot_form_an_ensemble_are_refused_by_name(
    refused, finished_run, finished_classifier, flags, words
):
    names = {"run": finished_run, "classifier": finished_classifier}
    message = refused("translate", f"--workdir={finished_run}", *flags.format(**names).split())
    assert words.format(**names) in message


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        (
            "--tensor=9",
            "tensor: expected 1 to 8, the available devices, got 9; "
            "JAX_NUM_CPU_DEVICES=2 makes two",
        ),
        ("--tensor=5", "error: tensor: 5 devices cannot share the parameter "),
    ],
)
def test_devices_that_cannot_share_a_model_are_refused(refused, finished_run, flag, words):
    assert words in refused("translate", f"--workdir={finished_run}", flag)


@pytest.mark.slow
def test_a_path_that_is_not_utf_8_is_printed_as_it_is(tmp_path):
    hypotheses = tmp_path / os.fsdecode(b"x\xff.txt")
    hypotheses.write_text("a b c d\n")
    files = f"--hypotheses={hypotheses}", f"--references={hypotheses}"
    command = runs.start_command("score", *files)
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=100)
    assert done.returncode == 0 and done.stderr == b""
    assert os.fsencode(hypotheses) in done.stdout.splitlines()[0]


def test_scores_of_another_run_are_not_overwritten(refused, finished_run, tmp_path):
    (own,) = (finished_run / "samples").glob("*.scores.json")
    facts = json.loads(own.read_text(encoding="utf-8")) | {"run": "/of/others"}
    (tmp_path / own.name).write_text(json.dumps(facts))
    flags = [f"--workdir={finished_run}", "--split=test", f"--output={tmp_path}"]
    assert (
        f"--output={tmp_path}: {own.name} there is of the run /of/others; name another folder."
        in refused("evaluate", *flags)
    )
    assert [path.name for path in tmp_path.iterdir()] == [own.name]


def test_an_unknown_split_of_evaluate_is_refused(refused, finished_run):
    assert "no split 'dev'" in refused("evaluate", f"--workdir={finished_run}", "--split=dev")


@pytest.mark.parametrize(
    ("run", "flag", "words"),
    [
        (
            "finished_run",
            "--average=last:7",
            "last:7 needs 7 checkpoints, and 3 are kept; ask for fewer, or train with",
        ),
        (
            "finished_run",
            "--average=best:7",
            "needs 7 checkpoints with a score, and 2 are kept; ask for fewer",
        ),
        (
            "finished_run",
            "--average=newest",
            "--average: expected last:N or best:N, such as last:5, got 'newest'",
        ),
        (
            "finished_run",
            "--parameters=ema",
            "this run keeps no moving average, its train.ema_decay is not set",
        ),
        ("finished_run", "--parameters=best", "parameters"),
        ("finished_run", "--references=none.txt", "--references=none.txt: cannot be read"),
        (
            "finished_run",
            "--references=two.txt",
            "two.txt: expected 24 lines, as many as the test split has, got 2",
        ),
        (
            "finished_run",
            "--output=two.txt",
            "--output=two.txt: cannot be written to: Not a directory; name another",
        ),
        (
            "finished_classifier",
            "--output=new",
            "--output: applies only to translations, and the model of this run makes none",
        ),
        (
            "finished_run",
            "--references=two.txt,",
            "--references: expected files, R1,R2 and so on, got 'two.txt,'",
        ),
        ("finished_run", "--bootstrap=7", "bootstrap"),
        ("finished_run", "--bootstrap_seed=7", "--bootstrap_seed: requires --bootstrap"),
        (
            "finished_classifier",
            "--bootstrap=1000",
            "--bootstrap: applies only to translations, and a 'encoder_classifier'",
        ),
        (
            "finished_language_model",
            "--references=two.txt",
            "--references: applies only to translations, and a 'decoder_lm'",
        ),
    ],
)
def test_a_wrong_flag_of_evaluate_is_refused_by_name(refused, request, tmp_path, run, flag, words):
    (tmp_path / "two.txt").write_text("one\ntwo\n")
    assert words in refused("evaluate", f"--workdir={request.getfixturevalue(run)}", flag)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "--hypotheses: expected the file of translations, got nothing"),
        ("--hypotheses=two.txt", "--references: expected the files to compare with, got nothing"),
        ("--hypotheses=none.txt --references=two.txt", "--hypotheses=none.txt: cannot be read"),
        (
            "--hypotheses=two.txt --references=two.txt,one.txt",
            "one.txt: expected 2 lines, as many as --hypotheses=two.txt",
        ),
        (
            "--hypotheses=empty.txt --references=two.txt",
            "--hypotheses=empty.txt: expected a line for each sentence",
        ),
        (
            "--hypotheses=two.txt --references=two.txt --baseline=two.txt",
            "--baseline: requires --bootstrap",
        ),
        (
            "--hypotheses=two.txt --references=two.txt --groups=one.txt",
            "--groups=one.txt: expected 2 lines, as many as --hypotheses=two.txt",
        ),
        ("--hypotheses=two.txt --references=two.txt --groups=no", "--groups=no: cannot be read"),
        ("--hypotheses=two.txt --references=two.txt --groups=", "--groups: expected a file"),
        ("--hypotheses=two.txt --references=two.txt --workdir=run", "workdir"),
    ],
)
def test_a_wrong_flag_of_score_is_refused_with_its_file(refused, tmp_path, arguments, words):
    for name, text in (("two", "a\nb\n"), ("one", "a\n"), ("empty", "")):
        (tmp_path / f"{name}.txt").write_text(text)
    assert words in refused("score", *arguments.split())


def test_an_unknown_command_is_refused_with_the_nearest(refused):
    assert "'trian': no such command; did you mean 'train'" in refused("trian")


def test_a_process_prints_one_line_and_exits_with_2(tmp_path):
    process = runs.run(
        *runs.flags(), "--config.model.num_heads=7", f"--workdir={tmp_path / 'run'}", module=None
    )
    assert process.returncode == 2
    assert process.stderr.startswith(
        "error: config.model.num_heads: 7 heads do not divide d_model = 64"
    )
    assert process.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_process_that_fails_after_jax_has_started_prints_one_line(tmp_path):
    process = runs.run(
        "train", *runs.flags({"data.test_split": "tset"}), f"--workdir={tmp_path / 'new' / 'run'}"
    )
    assert process.returncode == 2 and process.stdout == ""
    assert process.stderr.startswith("error: config.data: ") and process.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == []


@pytest.fixture
def train_on_malformed_lines(tmp_path):
    """Returns the arguments of a training on two files of text with malformed lines."""
    (tmp_path / "a.en").write_bytes(b"one\ntwo\x00\nthree\n\xff\n")
    (tmp_path / "a.de").write_bytes(b"eins\nzwei\n\nvier\n")
    splits = {"data.validation_split": "train[:1]", "data.test_split": "train[:1]"}
    files = {"data.dataset": "parallel_text", "data.train_files": "a.en,a.de"}
    return ["train", *runs.flags({**files, **splits}), "--workdir=run"]


def assert_names_malformed_lines(message):
    """`message` names the malformed lines of `train_on_malformed_lines`."""
    assert message.startswith(
        "error: train: 3 of 4 examples are malformed: 1 not UTF-8, 1 no text, 1 control character. "
        "They are: "
    )
    for line in (
        "a.en:4 (byte 0xff at byte 1)",
        "a.de:3 (empty)",
        "a.en:2 (U+0000 at character 4)",
    ):
        assert line in message


def test_malformed_lines_of_custom_text_are_refused_by_file_and_line(
    refused, train_on_malformed_lines, tmp_path
):
    assert_names_malformed_lines(refused(*train_on_malformed_lines))
    assert sorted(os.listdir(tmp_path)) == ["a.de", "a.en"]


@pytest.mark.slow
def test_a_process_refuses_malformed_lines_in_one_line_and_leaves_no_file(
    train_on_malformed_lines, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    process = runs.run(*train_on_malformed_lines)
    assert process.returncode == 2 and process.stdout == "" and process.stderr.count("\n") == 1
    assert_names_malformed_lines(process.stderr)
    assert sorted(os.listdir(tmp_path)) == ["a.de", "a.en"]


@pytest.mark.slow
def test_a_process_names_the_line_of_standard_input(finished_run):
    process = runs.run("translate", f"--workdir={finished_run}", input=b"3 days\n\xff\n")
    assert process.returncode == 2 and process.stdout == ""
    assert process.stderr.startswith("error: standard input, line 2: expected UTF-8")
    assert process.stderr.count("\n") == 1


def test_without_a_command_the_usage_is_printed_and_the_exit_code_is_2(capsys):
    for arguments, code in (([], 2), (["--help"], 0), (["train", "--help"], 0)):
        with pytest.raises(SystemExit) as ended:
            commands.main(arguments)
        assert (ended.value.code or 0) == code
        assert "usage: " in capsys.readouterr().out


def test_an_error_of_a_library_keeps_its_traceback_and_the_exit_code_is_1(monkeypatch, capsys):
    monkeypatch.setattr(commands, "exit_now", sys.exit)
    monkeypatch.setitem(commands.COMMANDS, "train", lambda arguments: np.zeros(3) + np.zeros(5))
    with pytest.raises(SystemExit) as ended:
        commands.main(["train"])
    assert ended.value.code == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_from_the_keyboard_ends_a_command_with_130_and_no_traceback(
    monkeypatch, capsys
):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "exit_now", sys.exit)
    monkeypatch.setitem(commands.COMMANDS, "translate", interrupted)
    with pytest.raises(SystemExit) as ended:
        commands.main(["translate"])
    assert ended.value.code == 130 and capsys.readouterr() == ("", "")


def test_several_processes_without_a_workdir_are_refused(refused, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert "--workdir: several processes need one folder" in refused("train", *runs.flags())


@pytest.mark.slow
def test_a_log_that_cannot_be_flushed_does_not_cost_the_last_checkpoint(tmp_path, monkeypatch):
    calls, wait = [], Checkpoints.wait

    def flush(writer):
        calls.append("flush")
        if calls.count("flush") > 1:  # the first one is before the checkpoint
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def recorded(checkpoints):
        calls.append("wait")
        wait(checkpoints)

    monkeypatch.setattr(metrics_log.MetricsWriter, "flush", flush)
    monkeypatch.setattr(Checkpoints, "wait", recorded)
    changes = {**runs.TINY, "train.num_steps": 4, "train.checkpoint_every": 2}
    with pytest.raises(OSError, match="No space left"):
        runs.fit(tmp_path / "run", changes)
    assert calls == ["flush", "flush", "flush", "wait"]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["2"]


@pytest.mark.slow
def test_a_full_disk_is_one_message_and_the_run_resumes_once_there_is_room(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=2m tmpfs {disk}"
    inside = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*inside, mount]).returncode:
        pytest.skip("this system does not let users mount")
    flags = runs.flags({"train.num_steps": 12, "train.checkpoint_every": 2, "train.keep_newest": 9})
    command = shlex.join(runs.start_command("train", *flags, f"--workdir={disk}/run"))
    script = (
        f"{mount}; {command} 2> {tmp_path}/full; echo $?; ls {disk}/run/checkpoints; echo ended; "
        f"mount -o remount,size=99m {disk}; {command} 2> {tmp_path}/resumed; echo $?"
    )
    process = subprocess.run([*inside, script], capture_output=True, text=True)
    full, resumed = process.stdout.split("ended\n")
    code, *checkpoints = full.split()
    assert code == "1" and checkpoints == [str(int(name)) for name in checkpoints] != []
    errors = (tmp_path / "full").read_text()
    assert "Traceback" not in errors
    *_, error = errors.splitlines()
    free = (
        r"[\d,]+ bytes are free there(, [\d,]+ are needed)?; free some space, and start the same "
    )
    assert re.match(
        rf"error: {disk}/run/.*cannot be written: No space left on device; {free}", error
    )
    assert resumed.splitlines()[-1] == "0", (tmp_path / "resumed").read_text()
