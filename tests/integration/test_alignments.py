"""Alignments of a trained run: in Python, by the commands, and against references."""

import dataclasses
import sys

import numpy as np
import pytest

from flaxformer_lite import alignments, trained, translate
from flaxformer_lite.cli import commands
from flaxformer_lite.data.tokens.spans import spans, word_of, words
from flaxformer_lite.decoding.cross_attention import Heads
from flaxformer_lite.model.ensemble import Ensemble
from flaxformer_lite.plotting import run_plots
from flaxformer_lite.scores import word_links
from flaxformer_lite.scores.alignment_error import alignment_scores
from flaxformer_lite.scores.word_links import Reference
from flaxformer_lite.system import runtime
from flaxformer_lite.system.errors import InputError

pytestmark = pytest.mark.usefixtures("quickly_compiled")

PAIRS = [
    ("Monday, May 5, 2025", "Montag, 5. Mai 2025"),
    ("", "leer"),
    ("7 kilometers", " "),
    ("3:05\u202fPM and more", "15:05"),
    ("Île-de-France ▁ 🇫🇷  x", "ein\tzwei drei"),
]
SOURCES = [source for source, _ in PAIRS]


@pytest.fixture(scope="module")
def run(finished_run):
    return translate.load(finished_run).run


@pytest.fixture(scope="module")
def aligner(run):
    return alignments.Aligner(run)


@pytest.fixture
def command(monkeypatch, capfd):
    """Returns a function that runs a command in this process: its exit code, output and errors."""
    monkeypatch.setattr(runtime, "start", lambda: None)  # it would change this process
    monkeypatch.setattr(commands, "exit_now", sys.exit)  # the real one ends the process

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            commands.main(list(arguments))
        return ended.value.code, *capfd.readouterr()

    return call


def test_links_are_of_words_of_the_raw_texts(run, aligner):
    found = aligner(PAIRS)
    assert found[1] == found[2] == [] and found[0] and found[4]
    for (source, target), links in zip(PAIRS, found, strict=True):
        assert links == sorted(set(links))
        assert all(i < len(source.split()) and j < len(target.split()) for i, j in links)
    source, target = PAIRS[0]  # the same, token by token
    ids = run.encode([source]), run.encode([target], side="target")
    (position_T,) = aligner.of_ids(*ids)
    assert len(position_T) == len(ids[1][0])
    of_source, of_target = (
        word_of(spans(run.tokenizer, text, side), words(text))
        for text, side in ((source, "source"), (target, "target"))
    )
    expected = {(of_source[s], of_target[t]) for t, s in enumerate(position_T) if s >= 0}
    assert set(found[0]) == expected
    pieces = run.tokenizer.pieces(ids[1][0], side="target")
    assert [s < 0 for s in position_T] == [not piece.strip() for piece in pieces]
    linked = run.tokenizer.pieces(ids[0][0][position_T[position_T >= 0]])
    assert all(piece.strip() for piece in linked)


def test_a_token_without_a_step_and_a_word_without_a_number_have_no_link():
    later = alignments.of_tokens(np.array([3, 1, 2]), 3, 1)
    assert later.tolist() == [1, 2, -1]
    words_of_source, words_of_target = np.array([0, -1, 1, 1]), np.array([0, 0, 1])
    assert alignments.word_links(later, words_of_source, words_of_target) == {(1, 0)}


def test_the_pairs_of_a_batch_do_not_change_each_other(aligner):
    assert [aligner([pair])[0] for pair in PAIRS[3:]] == aligner(PAIRS)[3:]


def test_the_input_step_is_one_later_than_the_output_step(run):
    heads = Heads(0, 1)
    of = {
        shift: alignments.Aligner(run, alignments.Reading(heads, shift))
        for shift in alignments.SHIFTS
    }
    ids = run.encode(SOURCES[:1]), run.encode(["5. Mai"], side="target")
    longer = run.encode(["5. Mai 2"], side="target")
    (later,) = of["input"].of_ids(*ids)
    (output,) = of["output"].of_ids(ids[0], longer)
    count = len(ids[1][0])
    assert longer[0][:count].tolist() == ids[1][0].tolist()
    is_word = [piece.strip() != "" for piece in run.tokenizer.pieces(ids[1][0], side="target")]
    shifted = output[1 : count + 1]
    both = [n for n in range(count) if later[n] >= 0 and shifted[n] >= 0]
    assert both and later[both].tolist() == shifted[both].tolist()
    assert (later >= 0).tolist() == is_word


def test_choose_has_the_scores_of_each_reading(run, aligner):
    references = [Reference(frozenset(links[::2]), frozenset(links)) for links in aligner(PAIRS)]
    table = aligner.choose(PAIRS, references)
    model = run.config.model
    counted = model.num_decoder_layers * (model.num_heads + 1) + 1
    assert len({reading for reading, _ in table}) == len(table) == 2 * counted
    assert [scores.aer for _, scores in table] == sorted(scores.aer for _, scores in table)
    assert table[0][1].aer < table[-1][1].aer
    for reading, scores in (table[0], table[-1]):
        links = map(frozenset, alignments.Aligner(run, reading)(PAIRS))
        assert scores == alignment_scores(list(links), references)
    own = dict(table)[aligner.reading]
    assert own.precision == 1  # the references are from this reading
    with pytest.raises(InputError, match=r"^references: expected links"):
        aligner.choose(PAIRS, [Reference(frozenset(), frozenset())] * len(PAIRS))


@pytest.mark.slow
def test_translations_are_aligned_as_pairs_of_their_texts(run, finished_run):
    translator = translate.Translator(run)
    found = translator.aligned(SOURCES, layer=0, head=1)
    texts = [text for text, _ in found]
    assert texts == translator(SOURCES)
    chosen = alignments.load(finished_run, layer=0, head=1)
    assert [links for _, links in found] == chosen(list(zip(SOURCES, texts, strict=True)))


@pytest.mark.slow
def test_the_attention_page_has_the_same_links_of_tokens(run, aligner):
    (text,) = SOURCES[:1]
    (cross,) = (
        each for each in run_plots.attention_maps(run, text) if each.name == "cross-attention"
    )
    ids = run.encode([text])
    target = trained.make_decoder(run.model, run.config, run.mesh)(run.params, ids)
    for head in (1, None):
        reading = alignments.Reading(Heads(0, head))
        (position_T,) = alignments.Aligner(run, reading).of_ids(ids, target)
        linked = cross.links()[0][-1 if head is None else head][: len(target[0])]
        assert linked == position_T.tolist()
        assert -1 < max(linked) < len(ids[0])
    (other,) = (each for each in run_plots.attention_maps(run, text) if "encoder" in each.name)
    assert other.links() is None


def test_translate_adds_the_links_after_the_last_tab(command, run, finished_run, tmp_path):
    (tmp_path / "in").write_text("".join(f"{source}\n" for source in SOURCES))
    arguments = (f"--workdir={finished_run}", f"--input={tmp_path / 'in'}", "--alignment_layer=0")
    code, out, err = command("translate", *arguments, "--alignments")
    assert code == 0, err
    expected = translate.Translator(run).aligned(SOURCES, layer=0)
    assert out.splitlines() == [f"{text}\t{word_links.line_of(links)}" for text, links in expected]
    assert out.splitlines()[1] == "\t"
    code, plain, _ = command("translate", *arguments[:2])
    assert plain.splitlines() == [text for text, _ in expected]
    for more, name in (("--n_best=2", "--n_best"), ("--long=split", "--long=split")):
        beam = ("--method=beam",) if "best" in more else ()
        code, _, err = command("translate", *arguments, "--alignments", more, *beam)
        assert code == 2 and name in err and "--alignments" in err
    code, _, err = command("translate", *arguments)
    assert code == 2 and "--alignment_layer: requires --alignments" in err
    code, _, err = command("translate", *arguments[:2], "--alignments", "--alignment_head=1")
    assert code == 2 and "alignment_head: 1 is of no layer" in err


@pytest.mark.slow
def test_a_started_file_is_not_resumed_with_other_links(command, finished_run, tmp_path):
    (tmp_path / "in").write_bytes(b"1 km\n2 km\n\xff\n")
    arguments = (
        *("translate", f"--workdir={finished_run}", f"--input={tmp_path / 'in'}", "--window=1"),
        f"--output={tmp_path / 'out'}",
    )
    assert command(*arguments, "--alignments")[0] == 2
    assert (tmp_path / "out.partial").read_text().count("\t") == 2
    code, _, err = command(*arguments)
    assert code == 2 and "--alignments" in err and "--restart" in err
    (tmp_path / "in").write_bytes(b"1 km\n2 km\n3 km\n")
    code, _, err = command(*arguments, "--alignments")
    assert code == 0, err
    assert (tmp_path / "out").read_text().count("\t") == 3
    assert command(*arguments, "--restart")[0] == 0
    assert "\t" not in (tmp_path / "out").read_text()


def test_score_prints_the_alignment_error_rate(command, tmp_path):
    (tmp_path / "hyp").write_text("0-0 1-1 2-3\n0-1\n")
    (tmp_path / "ref").write_text("0-0 1-1 2p2 2p3\n1-0\n")
    files = (f"--alignments={tmp_path / 'hyp'}", f"--reference_alignments={tmp_path / 'ref'}")
    code, out, err = command("score", *files)
    assert code == 0, err
    assert [line.split() for line in out.splitlines()[1:]] == [
        ["aer", "28.57", "%"],
        ["precision", "75.00", "%"],
        ["recall", "66.67", "%"],
    ]
    assert "4 links" in out and "3 sure links and 5 possible ones" in out
    for wrong, message in (
        ([*files, "--lowercase"], "--lowercase: applies to translations"),
        (files[:1], "--reference_alignments: expected a file"),
        ([files[1], f"--alignments={tmp_path / 'ref'}"], "ref, line 1: expected links"),
    ):
        code, _, err = command("score", *wrong)
        assert code == 2 and message in err
    (tmp_path / "hyp").write_text("0-0\n")
    code, _, err = command("score", *files)
    assert code == 2 and "lines" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(layer=9), "alignment_layer: expected 0 to 0, as there are 1 layers, got 9"),
        (dict(layer=0, head=-1), "alignment_head: expected 0 to"),
        (dict(head=0), "alignment_head: 0 is of no layer"),
        (dict(shift="both"), "alignment_shift: expected output or input, got 'both'"),
    ],
)
def test_a_reading_that_the_model_lacks_is_refused(run, options, message):
    with pytest.raises(InputError) as error:
        alignments.reading_of(run.config, **options)
    assert str(error.value).startswith(message)


def test_pairs_of_another_form_are_refused(aligner):
    with pytest.raises(InputError, match=r"^pair 2: expected \(source, target\), got"):
        aligner([("a", "b"), "ab"])
    with pytest.raises(InputError, match=r"^target 1: .* tokens, and the model takes"):
        aligner([("a", "b " * 500)])


def test_an_ensemble_has_no_attention_of_its_own(run):
    both = dataclasses.replace(run, model=Ensemble((run.config.model,) * 2))
    with pytest.raises(InputError, match=r"^alignments: expected the attention of one model"):
        alignments.Aligner(both)
