"""Runs that guide a head of cross-attention to the alignments of their training files."""

import json
import signal
from pathlib import Path

import pytest
import runs
import tensorflow_datasets as tfds

from flaxformer_lite import alignments, trained
from flaxformer_lite.data import pipeline
from flaxformer_lite.data.cldr import phrase_alignments
from flaxformer_lite.data.tokens.token_links import FACTOR
from flaxformer_lite.decoding.cross_attention import Heads
from flaxformer_lite.runs import metrics_log
from flaxformer_lite.scores import word_links
from flaxformer_lite.system.errors import InputError

pytestmark = pytest.mark.slow

STEPS, STOP = 80, 13


@pytest.fixture(scope="module")
def phrases():
    found = phrase_alignments.aligned_phrases("en", "de", per_kind=120)
    return [phrase for phrase in found if phrase.kind in ("date", "measure")]


@pytest.fixture(scope="module")
def changes(phrases, tmp_path_factory) -> dict[str, object]:
    """Returns the changes of a run on files of phrases, some without links."""
    folder = tmp_path_factory.mktemp("files")
    rows = {"train": phrases[8:], "dev": phrases[:8]}
    for name, of_split in rows.items():
        columns = {
            "en": [phrase.source for phrase in of_split],
            "de": [phrase.target for phrase in of_split],
            "align": [
                word_links.line_of(phrase.reference.sure) if n % 5 else ""
                for n, phrase in enumerate(of_split)
            ],
        }
        for suffix, lines in columns.items():
            (folder / f"{name}.{suffix}").write_text("".join(f"{line}\n" for line in lines))
    pair = {name: f"('{folder}/{name}.en','{folder}/{name}.de')" for name in rows}
    return {
        **runs.TINY,
        "model.num_heads": 2,
        "data.dataset": "parallel_text",
        "data.train_files": pair["train"],
        "data.validation_files": pair["dev"],
        "data.test_files": pair["dev"],
        "data.train_alignments": f"('{folder}/train.align',)",
        "data.train_split": "train[:200]",
        "data.validation_split": "validation",
        "data.test_split": "test",
        "data.tokenizer": "char",
        "data.vocab_size": None,
        "optim.learning_rate": 1e-2,
        "train.guided_alignment": 1.0,
        "train.alignment_head": 1,
        "train.num_steps": STEPS,
        "train.eval_every": STEPS,
        "train.log_every": 1,
    }


@pytest.fixture(scope="module")
def whole_run(changes, tmp_path_factory) -> Path:
    workdir = tmp_path_factory.mktemp("guided") / "run"
    assert runs.fit(workdir, changes) == 0
    return workdir


def test_the_guided_head_learns_the_alignments(whole_run, phrases):
    lines = runs.lines_of(whole_run, "train")
    assert lines[-1]["alignment_loss"] < lines[0]["alignment_loss"] - 0.5
    assert all("alignment_loss" not in line for line in runs.lines_of(whole_run, "validation"))
    run = trained.load(whole_run)
    assert alignments.reading_of(run.config).heads == Heads(0, 1)
    pairs = [(phrase.source, phrase.target) for phrase in phrases[:40]]
    table = alignments.Aligner(run).choose(pairs, [phrase.reference for phrase in phrases[:40]])
    assert table[0][0].heads == Heads(0, 1)  # the guided one


def test_a_resumed_run_is_the_same_bit_for_bit(whole_run, changes, tmp_path, monkeypatch):
    write = metrics_log.MetricsWriter.write

    def write_and_signal(writer, step, *line, **words) -> None:
        write(writer, step, *line, **words)
        if step == STOP:
            signal.raise_signal(signal.SIGTERM)

    resumed = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(metrics_log.MetricsWriter, "write", write_and_signal)
        assert runs.fit(resumed, changes) == 143
    assert STOP <= runs.last_step(resumed) < STEPS
    assert runs.fit(resumed, changes) == 0
    assert (
        runs.lines_of(resumed, "train")[-1]["alignment_loss"]
        == (runs.lines_of(whole_run, "train")[-1]["alignment_loss"])
    )
    runs.assert_same_arrays(
        runs.checkpoint_arrays(resumed, STEPS), runs.checkpoint_arrays(whole_run, STEPS)
    )


def test_a_run_is_not_resumed_with_other_alignments(whole_run, changes, tmp_path):
    (file,) = json.loads((whole_run / "config.json").read_text())["data"]["train_alignments"]
    other = tmp_path / "other.align"
    other.write_text("".join("\n" for _ in Path(file).read_text().splitlines()))
    with pytest.raises(InputError, match=r"other\.align"):
        more = {"train.num_steps": STEPS + 1, "data.train_alignments": f"('{other}',)"}
        runs.fit(whole_run, {**changes, **more})


def test_a_dataset_without_alignments_is_refused(changes, tmp_path):
    with pytest.raises(InputError, match=r"^config\.train\.guided_alignment: needs alignments"):
        runs.fit(tmp_path / "run", {**changes, "data.train_alignments": ()})


def test_a_dataset_of_tfds_may_have_alignments(tmp_path):
    """A text feature of the name 'alignment'; an example may have no link."""
    text = tfds.features.Text()
    examples = [{"en": f"{n} b", "de": f"c {n} d", "alignment": "1-0 0-1"} for n in range(10, 40)]
    examples[3]["alignment"] = ""

    class AlignedPairs(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.FeaturesDict(dict.fromkeys(examples[0], text))
            return tfds.core.DatasetInfo(
                builder=self,
                features=features,
                supervised_keys=("en", "de"),
                disable_shuffling=True,
            )

        def _split_generators(self, manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            yield from enumerate(examples)

    root = Path(tfds.core.constants.DATA_DIR)
    AlignedPairs(file_format="array_record", data_dir=root).download_and_prepare()
    config = runs.small_config(
        {
            **runs.TINY,
            "data.dataset": "aligned_pairs",
            "data.tokenizer": "char",
            "data.vocab_size": None,
            **{f"data.{role}_split": "train" for role in ("train", "validation", "test")},
            "train.guided_alignment": 0.1,
        }
    )
    dataset = pipeline.open_dataset(config)
    data = pipeline.load(config, dataset, tmp_path / "tokenizer.model")
    links = [[divmod(int(each), FACTOR) for each in row] for row in data.train.tokens.alignment]
    assert dataset.reader("train", alignments=True)([3, 4]).alignment == ["", "1-0 0-1"]
    # '10 b' and 'c 10 d': a space belongs to the word after it
    assert links[0] == [(0, 2), (0, 3), *((t, s) for t in (1, 2, 3) for s in (0, 1))]
    assert links[3] == [] and len(links) == 30
    assert data.validation.tokens.alignment is None
