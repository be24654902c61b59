"""The lines of the command `rescore`: columns, malformed and long lines, 2 files, sums, words."""

import json
import math

import pytest
from scored import (
    LONGEST,
    PAIRS,
    as_lines,
    lines_of,
    request_of,
    rescorer_of,
    run_of,
    with_data,
)

from flaxformer_lite import rescore
from flaxformer_lite.alignments import Aligner, Reading
from flaxformer_lite.cli import rescore_lines
from flaxformer_lite.cli.rescore_flags import parse_rescore
from flaxformer_lite.cli.rescore_lines import LineRescorer
from flaxformer_lite.decoding.cross_attention import Heads
from flaxformer_lite.lines import line_job
from flaxformer_lite.lines.line_job import LineJob
from flaxformer_lite.scores.word_links import line_of
from flaxformer_lite.system.errors import InputError

pytestmark = pytest.mark.usefixtures("quickly_compiled")


def test_columns_are_score_perplexity_and_tokens_then_pieces_and_their_scores():
    lines, _ = lines_of(rescorer_of(), as_lines(), "--tokens")
    objects, _ = lines_of(rescorer_of(), as_lines(), "--tokens", "--format=jsonl")
    for line, text, (_, target) in zip(lines, objects, PAIRS, strict=True):
        score, perplexity, count, pieces, log_probs = line.split("\t")
        found = json.loads(text)
        assert list(found) == ["score", "perplexity", "tokens", "pieces", "log_probs"]
        assert found["pieces"] == [*target, "</s>"] and found["tokens"] == int(count)
        assert pieces.replace("<0x20>", "_").split(" ") == [*target.replace(" ", "_"), "</s>"]
        assert len(pieces.split(" ")) == int(count) == len(log_probs.split(" "))
        assert sum(map(float, log_probs.split(" "))) == pytest.approx(float(score), abs=1e-5)
        assert math.fsum(found["log_probs"]) == pytest.approx(found["score"], abs=1e-12)
        assert float(perplexity) == pytest.approx(math.exp(-float(score) / int(count)), rel=1e-4)


@pytest.mark.parametrize(("line", "tabs"), [("abc", 0), ("a\tb\tc", 2)])
def test_a_malformed_line_is_refused_with_its_file_and_number(line, tabs):
    with pytest.raises(InputError, match=rf"^in\.tsv, line 2: expected .* got {tabs} tabs"):
        lines_of(rescorer_of(), ["a\tb", line])


@pytest.mark.parametrize("pair", [("a" * LONGEST, "b"), ("b", "a" * LONGEST)])
def test_a_long_line_is_refused_with_its_number_or_skipped_without_a_score(pair):
    lines = as_lines([PAIRS[0], pair, PAIRS[2]])
    with pytest.raises(InputError, match=r"in\.tsv, line 2: 16 tokens.*--long=skip"):
        lines_of(rescorer_of(), lines)
    answer = lines_of(rescorer_of(), lines, "--long=skip")
    whole = lines_of(rescorer_of(), as_lines())
    assert answer.split == 1
    assert answer.lines == [whole.lines[0], "nan\tnan\t0", whole.lines[2]]
    objects = lines_of(rescorer_of(), lines, "--long=skip", "--format=jsonl").lines
    assert json.loads(objects[1]) == {"score": None, "perplexity": None, "tokens": 0}
    words = lines_of(rescorer_of(), ["a b\tb a", "\t".join(pair)], "--surprisal", "--long=skip")
    assert words.lines[2].split("\t")[3] == "nan"


def test_two_files_are_read_together_and_resumed(tmp_path):
    source, target, output = (tmp_path / name for name in ("a.txt", "b.txt", "out.tsv"))
    source.write_bytes(b"\xef\xbb\xbfabc\r\nba\na b\nkl")
    target.write_bytes("".join(f"{text}\n" for _, text in PAIRS).encode())
    job = LineJob(source, output, window=3, target=target)
    request = request_of(f"--input={source}", f"--target={target}", f"--output={output}")
    answer, windows = LineRescorer(rescorer_of(), request), []

    def failing(window):
        windows.append(window.first)
        if len(windows) == 2:
            raise KeyboardInterrupt
        return answer(window)

    asked = dict(request.settings)
    with pytest.raises(KeyboardInterrupt):
        line_job.run(job, failing, asked=lambda: asked)
    line_job.run(job, failing, asked=lambda: asked)
    assert windows == [0, 3, 3]
    assert output.read_text().splitlines() == lines_of(rescorer_of(), as_lines()).lines


def test_bytes_that_are_no_text_are_refused_with_both_files_and_the_line(tmp_path):
    one, two = tmp_path / "1.txt", tmp_path / "2.txt"
    one.write_text("a\nb\n")
    for content, message in [
        (b"a\n\xff\n", r"1\.txt and .*2\.txt, line 2: expected UTF-8"),
        (b"a\nb\x1f\n", r"2\.txt, line 2: expected text, got the control character U\+001F"),
    ]:
        two.write_bytes(content)
        with pytest.raises(InputError, match=message):
            line_job.run(
                LineJob(one, tmp_path / "out", target=two),
                lambda window: pytest.fail("no window"),
                asked=dict,
            )


def test_files_with_different_numbers_of_lines_are_refused(tmp_path):
    one, two = tmp_path / "1.txt", tmp_path / "2.txt"
    one.write_text("a\nb\n")
    two.write_text("a\n")
    for job, flag in (
        (LineJob(one, target=two), "--target"),
        (LineJob(two, target=one), "--input"),
    ):
        with pytest.raises(InputError, match=f"^{flag}=.*2.txt: 1 lines, and"):
            line_job.run(job, lambda window: pytest.fail("no window"), asked=dict)


@pytest.mark.parametrize(("flags", "message"), [
    (["--total", "--tokens"], "--tokens: has no effect with --total"),
    (["--surprisal", "--format=jsonl"], "--format: has no effect with --surprisal"),
    (["--surprisal", "--alpha=1"], "--alpha: has no effect with --surprisal"),
    (["--target=x"], "--target: requires --input"),
    (["--restart"], "--restart: requires --output"),
])  # fmt: skip
def test_flags_without_an_effect_are_refused(flags, message):
    with pytest.raises(InputError, match=message):
        request_of(*flags)


def output_of(monkeypatch, capsys, rescorer, *flags):
    """The output of the command with a model that is loaded already."""
    monkeypatch.setattr(rescore, "load", lambda *_, **__: rescorer)
    rescore_lines.run(request_of(*flags))
    return capsys.readouterr()


def test_the_total_of_lines_is_the_sum_of_their_scores(monkeypatch, capsys, tmp_path):
    texts = ["abc", "", "k l", "a" * LONGEST]
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"{text}\n" for text in texts))
    rescorer = rescorer_of("decoder_lm")
    flags = [f"--input={path}", "--total", "--long=skip", "--window=2"]
    out, err = output_of(monkeypatch, capsys, rescorer, *flags)
    assert err == "note: lines without a score, too long for the model: 1\n"
    total, scores = json.loads(out), rescorer(texts[:3])
    assert total["nats"] == pytest.approx(-sum(scores))
    assert (total["tokens"], total["characters"], total["bytes"]) == (9, 6, 6)
    assert total["perplexity"] == pytest.approx(math.exp(-sum(scores) / 9))
    assert total["bits_per_byte"] == pytest.approx(-sum(scores) / 6 / math.log(2))
    assert total["nats_per_character"] == pytest.approx(-sum(scores) / 6)


@pytest.mark.parametrize(("architecture", "data", "flags", "message"), [
    ("encoder_decoder", {}, ["--total"], "--total: applies only to language models"),
    ("decoder_lm", {}, ["--input=a", "--target=b"], "--target: a language model has no source"),
    ("decoder_lm", {"windows": 7}, ["--long=skip"], "--long: has no effect on a run with data.win"),
    ("decoder_lm", {"windows": 7, "whole_files": True}, ["--total", "--window=3"],
     "--window: has no effect, as the model of this run reads the file as one text"),
])  # fmt: skip
def test_flags_that_do_not_fit_the_model_are_refused(
    architecture, data, flags, message, monkeypatch, capsys
):
    rescorer = rescore.Rescorer(run_of(architecture, data=with_data(**data)))
    with pytest.raises(InputError, match=message):
        output_of(monkeypatch, capsys, rescorer, *flags)


def test_words_of_a_whole_file_have_the_context_of_the_lines_before(monkeypatch, capsys, tmp_path):
    text = "ab cd\n\n  fg hij \nkl"
    path = tmp_path / "text.txt"
    path.write_text(text)
    rescorer = rescorer_of("decoder_lm", data=with_data(windows=7, whole_files=True))
    out, _ = output_of(monkeypatch, capsys, rescorer, f"--input={path}", "--surprisal")
    rows = [line.split("\t") for line in out.splitlines()]
    assert [row[:3] + row[5:] for row in rows] == [
        ["1", "1", "ab", "0", "2"],
        ["1", "2", "cd", "3", "5"],
        ["3", "1", "fg", "2", "4"],
        ["3", "2", "hij", "5", "8"],
        ["4", "1", "kl", "0", "2"],
    ]
    (tokens,) = rescorer.tokens([text])
    bits = -tokens.log_prob / math.log(2)
    assert sum(float(row[3]) for row in rows) == pytest.approx(bits, rel=1e-5)
    assert sum(int(row[4]) for row in rows) == len(tokens.pieces) == len(text)


def test_alignments_are_the_last_column_and_those_of_the_aligner():
    long = "a" * LONGEST + "\tb"
    flags = ["--alignments", "--alignment_layer=0", "--alignment_head=3", "--long=skip"]
    rows = [line.split("\t") for line in lines_of(rescorer_of(), [*as_lines(), long], *flags).lines]
    aligner = Aligner(run_of(), Reading(Heads(0, 3)))
    links = [line_of(each) for each in aligner(PAIRS)]
    assert [row[3] for row in rows] == [*links, ""] and any(links)
    assert links != [line_of(each) for each in Aligner(run_of(), Reading(Heads(0, 4)))(PAIRS)]
    plain = lines_of(rescorer_of(), [*as_lines(), long], "--long=skip").lines
    assert ["\t".join(row[:3]) for row in rows] == plain
    objects = lines_of(rescorer_of(), as_lines(), *flags, "--format=jsonl").lines
    assert [" ".join(json.loads(line)["alignment"]) for line in objects] == links


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--alignment_head=1"], "--alignment_head: requires --alignments"),
        (["--alignments", "--surprisal"], "--alignments: has no effect with --surprisal"),
    ],
)
def test_alignments_without_an_effect_are_refused(flags, message):
    with pytest.raises(InputError, match=f"^{message}"):
        parse_rescore(["--workdir=w", *flags])


def test_a_language_model_has_no_alignments():
    with pytest.raises(InputError, match="expected a model with cross-attention"):
        lines_of(rescorer_of("decoder_lm"), ["abc"], "--alignments")
