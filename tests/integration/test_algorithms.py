"""The dataset of copy, reverse, sort and addition: its pairs, splits and names, and both models."""

import json
from collections import Counter

import pytest

from benchmarks import algorithms as benchmark
from flaxformer_lite import config_files
from flaxformer_lite.config import resolve
from flaxformer_lite.data import pipeline
from flaxformer_lite.data.sources import algorithms, generated, preparation
from flaxformer_lite.data.sources.datasets import Dataset
from flaxformer_lite.system.errors import InputError

SMALL = {"train": 37, "validation": 3, "test": 5}  # of a length
TASKS = ("copy", "reverse", "sort", "addition")


@pytest.fixture
def few(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "data_root", lambda: tmp_path)
    monkeypatch.setattr(algorithms, "data_root", lambda: tmp_path)
    monkeypatch.setattr(algorithms, "OF_A_LENGTH", SMALL)


def target_of(task, source):
    digits = source.split(" ")
    if task == "addition":
        one, other = (int(number.replace(" ", "")) for number in source.split("+"))
        return " ".join(str(one + other))
    return " ".join({"copy": digits, "reverse": digits[::-1], "sort": sorted(digits)}[task])


@pytest.mark.parametrize("task", TASKS)
def test_each_target_is_the_task_done_on_the_digits_of_its_source(task, few):
    dataset = Dataset(f"algorithms/{task}")
    dataset.prepare()
    for split in ("train", "validation", "test_10", "test_40"):
        examples = dataset.read(split)
        assert len(examples) > 0
        assert examples.target == [target_of(task, source) for source in examples.source]
        assert {len(symbol) for text in examples.source for symbol in text.split(" ")} == {1}
    # The tasks differ.
    others = [target_of(other, "3 1 2 + 4 0 5" if other == "addition" else "3 1 2")
              for other in TASKS]  # fmt: skip
    assert others == ["3 1 2", "2 1 3", "1 2 3", "7 1 7"]


@pytest.mark.parametrize("task", TASKS)
def test_splits_have_their_lengths_and_share_no_source(task, few):
    found = algorithms.splits(task)
    assert [*found] == ["train", "validation", *(f"test_{n}" for n in (10, 20, 25, 30, 40))]
    sources = [source for pairs in found.values() for source, _ in pairs]
    assert len(set(sources)) == len(sources)

    def lengths(split):
        return Counter(len(source.split("+")[0]) for source, _ in found[split])

    # One digit has 10 texts, and 100 pairs of numbers.
    one = 37 if task == "addition" else 10
    assert lengths("train") == {1: one, **dict.fromkeys(range(2, 21), 37)}
    first = 1 if task == "addition" else 2
    assert lengths("validation") == dict.fromkeys(range(first, 21), 3)
    for length in (10, 20, 25, 30, 40):
        assert lengths(f"test_{length}") == {length: 5}


def test_the_numbers_of_a_sum_have_equal_lengths_and_no_leading_zero(few):
    for pairs in algorithms.splits("addition").values():
        for source, _ in pairs:
            one, other = source.split("+")
            assert len(one) == len(other)
            assert [str(int(one)), str(int(other))] == [one, other]


def test_training_examples_are_in_random_order_and_always_the_same(few):
    train = algorithms.splits("copy")["train"]
    lengths = [len(source) for source, _ in train]
    assert lengths != sorted(lengths)
    assert {*lengths[: len(lengths) // 2]} >= {2, 20}
    assert algorithms.splits("copy")["train"] == train
    assert algorithms.splits("reverse")["train"] != train


def test_the_bytes_of_the_dataset_do_not_vary(tmp_path, few):
    contents = []
    for folder in ("first", "second"):
        builder = algorithms.builder("sort", tmp_path / folder)
        preparation.prepare(builder)
        assert builder.info.full_name == "algorithms/sort/1.0.0"
        contents.append([path.read_bytes() for path in sorted(builder.data_path.glob("*array*"))])
    assert contents[0] == contents[1] and len(contents[0]) == 7


def test_a_language_model_reads_source_and_target_as_one_text_of_single_symbols(few, tmp_path):
    dataset = Dataset("algorithms/addition", architecture="decoder_lm")
    dataset.prepare()
    texts = dataset.read("test_10").target
    pairs = [text.split(" = ") for text in texts]
    assert all(target_of("addition", source) == target for source, target in pairs)


@pytest.mark.parametrize("architecture", ["encoder_decoder", "decoder_lm"])
@pytest.mark.parametrize("task", ["copy", "addition"])
def test_the_config_reads_every_training_text_of_either_architecture(
    task, architecture, few, tmp_path
):
    loaded = config_files.load_config(config_files.find_config("benchmarks/algorithms"))
    loaded.data.dataset = f"algorithms/{task}"
    if architecture == "decoder_lm":
        with loaded.unlocked():
            loaded.model.architecture = architecture
    config = resolve(loaded)
    dataset = pipeline.open_dataset(config)
    data = pipeline.load(config, dataset, tmp_path / "tokenizer.model")
    assert data.train.plan.too_long + data.train.plan.empty == 0
    symbols = {*"0123456789", *("+" if task == "addition" else "")}
    symbols |= {"="} if architecture == "decoder_lm" else set()
    assert set(data.tokenizer.vocabulary_of("target")[4:]) == symbols
    # The longest test texts fit into the model.
    longest = dataset.read("test_40")
    lengths = [len(text.split(" ")) for text in longest.texts()]
    assert max(lengths) + 1 <= config.model.max_length


@pytest.mark.parametrize("name", ["listops/256", "algorithms/copy", "modular_addition/97"])
def test_a_generated_dataset_without_a_config_is_its_first_one(name):
    dataset, config = name.split("/")
    for given in ("", config):
        assert generated.builder(dataset, given).info.full_name == f"{name}/1.0.0"


def test_a_task_that_does_not_exist_is_refused_with_a_near_one():
    with pytest.raises(InputError, match=r"got 'sorted'; did you mean 'sort'\?"):
        Dataset("algorithms/sorted")


TINY = [
    f"--config.{setting}"
    for setting in """
        model.d_model=8 model.num_heads=2 model.d_ff=8 model.num_encoder_layers=1
        model.num_decoder_layers=1 data.tokens_per_batch=512 data.num_buckets=None
        train.log_every=4 train.eval_every=4 train.decode_examples=0 optim.warmup_steps=1
    """.split()
]


@pytest.mark.parametrize("architecture", ["encoder_decoder", "decoder_lm"])
def test_the_benchmark_scores_whole_targets_of_each_length(architecture, few):
    dataset = Dataset("algorithms/reverse", architecture=architecture)
    dataset.prepare()

    def output(source):
        right = target_of("reverse", source)
        return right if source.count(" ") < 25 else right + " 1"

    def continued(prompt):
        assert prompt.endswith(" =")
        return f"{prompt} {output(prompt.removesuffix(' ='))}"

    is_lm = architecture == "decoder_lm"
    one, separator = (continued, " = ") if is_lm else (output, None)
    found = benchmark.by_length(dataset, lambda texts: [one(text) for text in texts], separator)
    expected = {10: 100, 20: 100, 25: 100, 30: 0, 40: 0}
    assert found == {f"{length} digits": float(value) for length, value in expected.items()}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["encoder_decoder", "decoder_lm"])
def test_a_tiny_run_of_the_benchmark_has_every_figure_and_is_not_trained_again(
    architecture, few, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(benchmark, "TEST_LENGTHS", (10, 40))  # each length is a compilation
    preparation.prepare(algorithms.builder("sort"))
    flags = [f"--output={tmp_path / 'runs'}", f"--json={tmp_path / 'figures.json'}"]
    flags += ["--tasks", "sort", "--positions", "rotary", "--seeds", "3", "--steps=4"]
    flags += [*TINY, f"--config.model.architecture={architecture}"]
    benchmark.main(flags)
    found = json.loads((tmp_path / "figures.json").read_text())
    names = ["10 digits", "40 digits", "minutes"]
    assert found.keys() == {f"sort rotary, {n}{seed}" for n in names for seed in ("", ", seed 3")}
    assert capfd.readouterr().out.splitlines()[-1].startswith("sort rotary")
    # Stored figures are not measured again.
    workdir = tmp_path / "runs" / "sort-rotary-4" / "seed3"
    stored = json.loads((workdir / benchmark.KEPT).read_text())
    (workdir / benchmark.KEPT).write_text(json.dumps({**stored, "10 digits": 47.0}))
    assert benchmark.scores_of(workdir)["10 digits"] == 47.0
