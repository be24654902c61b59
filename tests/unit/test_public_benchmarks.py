"""The benchmarks of public tables: readers, held-out parts and figures, and a tiny run of each."""

import gzip
import hashlib
import json
import shutil

import pytest

from benchmarks import g2p, groups, multi30k, public_data, scan
from flaxformer_lite.system.errors import InputError

SCAN = "IN: jump OUT: I_JUMP\nIN: walk left OUT: I_TURN_LEFT I_WALK\nIN: jump OUT: I_JUMP\n"
PHONES = "адэ\taː d a\nакъ\tʔ aː q\nжь\tʒʲ\n"


def digest_of(text):
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "sub/folder/a.txt"])
def test_a_public_file_is_found_below_the_folder_plain_or_compressed(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(SCAN.encode()) if name.endswith(".gz") else SCAN.encode())
    digests = {"a.txt": digest_of(SCAN)}
    assert public_data.read(tmp_path, digests, source="here") == {"a.txt": SCAN}


def test_a_missing_or_a_changed_file_is_refused_with_its_source(tmp_path):
    digests = {"a.txt": digest_of(SCAN)}
    with pytest.raises(InputError) as caught:
        public_data.read(tmp_path, digests, source="the repository x/y")
    assert str(caught.value) == (
        f"a.txt: expected it, or a.txt.gz, below {tmp_path}; get it from the repository x/y, and "
        "name its folder with --data=FOLDER."
    )
    (tmp_path / "a.txt").write_text(SCAN + "\n")
    with pytest.raises(InputError, match=rf"expected the SHA-256 {digest_of(SCAN)}, got "):
        public_data.read(tmp_path, digests, source="the repository x/y")


@pytest.mark.parametrize("benchmark", [scan, g2p])
def test_a_benchmark_without_its_data_ends_with_2_and_names_the_repository(
    benchmark, tmp_path, capsys
):
    with pytest.raises(SystemExit) as ended:
        benchmark.main([f"--data={tmp_path}"])
    assert ended.value.code == 2
    assert "https://github.com/" in capsys.readouterr().err


def test_the_lines_of_each_task_are_pairs():
    jump = ("jump", "I_JUMP")
    assert scan.pairs_of(SCAN) == [jump, ("walk left", "I_TURN_LEFT I_WALK"), jump]
    assert g2p.pairs_of(PHONES) == [("адэ", "aː d a"), ("акъ", "ʔ aː q"), ("жь", "ʒʲ")]


def test_decomposed_words_have_letters_and_accents_of_their_own():
    assert g2p.pairs_of("가\tk a\n", form="NFD") == [("\u1100\u1161", "k a")]
    assert [len(g2p.pairs_of("é\te", form=form)[0][0]) for form in ("NFC", "NFD")] == [1, 2]


def test_each_language_has_a_tag_in_front_of_its_words():
    words = [g2p.tagged([("a", "b")], language)[0][0] for language in g2p.LANGUAGES]
    assert len({*words}) == len(g2p.LANGUAGES) == 15 and {word[1:] for word in words} == {"a"}


def test_the_files_of_a_direction_are_checked_and_named(tmp_path, monkeypatch):
    for name in ("train", "val", "test_2016_flickr"):
        for language in ("de", "en"):
            (tmp_path / f"{name}.{language}").write_text(f"{name} {language}\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"train.de: expected the SHA-256 [0-9a-f]{64}, got"):
        multi30k.flags_of(tmp_path, "de-en", "raw")
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()
    }
    monkeypatch.setattr(multi30k, "DIGESTS", digests)
    flags = multi30k.flags_of(tmp_path, "de-en", "raw")
    assert flags[0] == "--config.data.languages=de,en"
    assert flags[2] == f"--config.data.validation_files={tmp_path}/val.de,{tmp_path}/val.en"


def test_the_parts_are_files_of_own_text(tmp_path):
    flags = public_data.write_parts(tmp_path / "new", {"train": g2p.pairs_of(PHONES), "test": []})
    assert (tmp_path / "new" / "train.tsv").read_text(encoding="utf-8") == PHONES
    assert flags == [
        f"--config.data.{part}_files={tmp_path}/new/{part}.tsv" for part in ("train", "test")
    ]


def test_a_cutoff_moves_commands_with_few_actions_to_training(monkeypatch):
    monkeypatch.setattr(scan, "HELD_OUT", 1)
    lines = [f"IN: walk {n} OUT: {' '.join(['W'] * n)}\n" for n in (3, 5, 24, 26, 27, 48)]
    texts = {
        "tasks_train_length.txt": "".join(lines[:2]),
        "tasks_test_length.txt": "".join(lines[2:]),
    }
    parts = scan.parts_of(texts, "length_26")
    counts = {name: [len(actions.split()) for _, actions in parts[name]] for name in parts}
    assert counts["test"] == [27, 48]
    assert sorted(counts["train"] + counts["validation"]) == [3, 5, 24, 26]


def test_held_out_commands_are_in_neither_part_twice_and_primitives_stay():
    pairs = [("jump", "J")] * 7 + [(f"walk {n}", "W") for n in range(31)] + [("walk 3", "W")]
    train, held = scan.hold_out(pairs, 11)
    assert len(held) == len(set(held)) == 11 and ("jump", "J") not in held
    assert not {*train} & {*held} and {*train} | {*held} == {*pairs}
    assert train.count(("jump", "J")) == 7
    assert scan.hold_out(pairs, 11) == (train, held)
    # It is not the first or the last part.
    numbers = sorted(int(command.split()[1]) for command, _ in held)
    assert numbers[0] < 10 and numbers[-1] > 20


def test_the_figures_of_scan_separate_the_end_from_the_actions():
    references = ["a b c d", "a b c", "a b", "a"]
    outputs = ["a b", "a b c", "b a c", ""]  # too short, right, wrong, too short
    unended = ["a b c d x y", "a b c c c c", "a c c c c c", "b b b b b b"]
    assert scan.figures_of(outputs, unended, references) == {
        "exact match": 25.0,
        "too short": 50.0,
        "with oracle length": 50.0,
        "actions": 100 * (4 + 3 + 1 + 0) / 10,
    }


RATES = {
    "ady": {0: {"WER": 20.0, "PER": 5.0}, 1: {"WER": 30.0, "PER": 6.0}},
    "vie": {0: {"WER": 2.0, "PER": 1.0}, 1: {"WER": 4.0, "PER": 2.0}},
}


def test_the_mean_of_g2p_weighs_languages_alike_in_each_seed():
    rates = g2p.with_mean(RATES)
    assert rates["mean"] == {0: {"WER": 11.0, "PER": 3.0}, 1: {"WER": 17.0, "PER": 4.0}}
    found = groups.figures_of(rates)
    assert found["mean, WER"] == {"value": 14.0, "low": 11.0, "high": 17.0, "n": 2}
    assert found["ady, PER, seed 1"] == 6.0
    assert groups.table(rates, digits=2).splitlines()[-1].split() == [
        *("mean", "14.00", "(11.00-17.00)", "3.50", "(3.00-4.00)")
    ]


def test_g2p_has_15_languages_with_3_files_each():
    assert len(g2p.LANGUAGES) == 15 and len(g2p.DIGESTS) == 45
    assert {name.split("_")[1] for name in g2p.DIGESTS} == {"train.tsv", "dev.tsv", "test.tsv"}


SMALL = [
    f"--config.{setting}"
    for setting in """
        model.d_model=8 model.num_heads=2 model.d_ff=8 model.num_encoder_layers=1
        model.num_decoder_layers=1 data.tokens_per_batch=512 data.num_buckets=None
        train.log_every=2 train.eval_every=2 optim.warmup_steps=1 train.decode_examples=3
    """.split()
]


@pytest.mark.slow
def test_a_tiny_run_of_scan_has_every_figure_and_is_not_trained_again(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    words = ["walk", "jump", "look"]
    pairs = [(f"{a} and {b}", f"I_{a} I_{b}") for a in words for b in words]
    text = "".join(f"IN: {command} OUT: {actions}\n" for command, actions in pairs)
    names = [f"tasks_{part}_simple.txt" for part in ("train", "test")]
    for name in names:
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(scan, "DIGESTS", dict.fromkeys(names, digest_of(text)))
    monkeypatch.setattr(scan, "HELD_OUT", 2)
    flags = [f"--data={tmp_path}", f"--output={tmp_path / 'runs'}", "--splits", "simple"]
    flags += ["--seeds", "3", "--steps=4", f"--json={tmp_path / 'figures.json'}"]
    scan.main([*flags, *SMALL])
    found = json.loads((tmp_path / "figures.json").read_text())
    names = "exact match", "too short", "with oracle length", "actions", "held out", "minutes"
    assert found.keys() == {f"simple sinusoidal, {n}{s}" for n in names for s in ("", ", seed 3")}
    assert all(0 <= figure["value"] <= 100 for figure in found.values())
    # Stored figures are not measured again.
    workdir = tmp_path / "runs" / "simple-sinusoidal-4" / "seed3"
    shutil.rmtree(workdir / "checkpoints")
    figures = scan.scores_of(workdir, [])
    kept = {f"simple sinusoidal, {name}": figure for name, figure in figures.items()}
    printed = {name: figure["value"] for name, figure in found.items() if "seed" not in name}
    assert kept == pytest.approx(printed, rel=1e-9)  # 10 digits are printed


@pytest.mark.slow
def test_a_tiny_run_of_g2p_has_the_rates_of_the_best_step(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    texts = {"ady_train.tsv": PHONES * 5, "ady_dev.tsv": PHONES, "ady_test.tsv": PHONES}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    digests = {name: digest_of(text) for name, text in texts.items()}
    monkeypatch.setattr(g2p, "DIGESTS", digests)
    flags = [f"--data={tmp_path}", f"--output={tmp_path / 'runs'}", "--languages", "ady"]
    # So fast that the rates of the steps differ.
    fast = ["--config.optim.optimizer=adam", "--config.optim.learning_rate=0.3"]
    fast += ["--config.model.d_model=32"]
    g2p.main([*flags, "--seeds", "3", "--steps=8", *SMALL, *fast])
    log = tmp_path / "runs" / "ady-NFD-8" / "seed3" / "metrics.jsonl"
    *lines, test = [json.loads(line) for line in log.read_text().splitlines()]
    rates = {x["step"]: x["sequence_error_rate"] for x in lines if x["split"] == "validation"}
    assert len(rates) == 4 and len(set(rates.values())) > 1
    assert rates[test["step"]] == min(rates.values())
    # The parts have the same words.
    assert test["sequence_error_rate"] == rates[test["step"]]
    expected = f"{test['sequence_error_rate']:.2f}"
    assert capsys.readouterr().out.splitlines()[-1].split()[:2] == ["mean", expected]
