"""Forbidden words and phrases: their ids, the rule about the next token, and whole decodings."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite import trained, translate
from flaxformer_lite.cli import run_flags
from flaxformer_lite.config import resolve
from flaxformer_lite.data.tokens.forbidden import forbidden_ids
from flaxformer_lite.decoding.constraints import no_forbidden_sequence
from flaxformer_lite.fields import DecodeConfig
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import saved_evaluation
from flaxformer_lite.training.origin import Origin

V, T = 7, 5
SEQUENCES = [(3,), (4, 5), (5, 5), (4, 6, 3), (1, 2, 3, 4, 5, 6), (1,) * 9]


def allowed_by_definition(ids, length):
    """The tokens that complete no sequence at the end of the text."""
    text = list(ids[:length])
    return [
        not any(tuple([*text, token][-len(each) :]) == each for each in SEQUENCES)
        for token in range(V)
    ]


@pytest.mark.parametrize("length", range(T + 1))
def test_a_token_that_would_complete_a_sequence_is_forbidden(length):
    rng = np.random.default_rng(length)
    ids = rng.choice([4, 5, 6], size=(2, 11, T))
    logits = rng.normal(size=(2, 11, V)).astype(np.float32)
    found = jax.jit(lambda *arrays: no_forbidden_sequence(*arrays, SEQUENCES))(
        jnp.asarray(logits), jnp.asarray(ids), jnp.int32(length)
    )
    expected = np.array([[allowed_by_definition(row, length) for row in rows] for rows in ids])
    assert not expected[..., 3].any() and (expected.all(axis=(0, 1)).sum() < 6 or length == 0)
    np.testing.assert_array_equal(np.asarray(found), np.where(expected, logits, -np.inf))


class Words:
    """A tokenizer with an id for each word, another one after a space, and one for each letter."""

    def __init__(self, kind):
        self.kind = kind

    def encode(self, texts, side="source"):
        assert side == "target"
        if self.kind == "letters":
            return [np.array([ord(letter) for letter in text]) for text in texts]
        return [
            np.array([100 * (n > 0) + ord(word[0]) for n, word in enumerate(text.split(" "))])
            for text in texts
        ]


def test_the_ids_are_those_at_the_start_and_after_a_space():
    a, b = ord("a"), ord("b")
    assert forbidden_ids(Words("words"), ["a", "a b", "a"]) == (
        *((a,), (100 + a,)),
        *((a, 100 + b), (100 + a, 100 + b)),
    )
    assert forbidden_ids(Words("letters"), ["ab"]) == ((a, b), (ord(" "), a, b))
    assert forbidden_ids(Words("letters"), []) == ()


TEXTS = ["Monday, May 5, 2025", "Tuesday, June 3, 2025", "5 hours"]


@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize("method", ["greedy", pytest.param("beam", marks=pytest.mark.slow)])
def test_translations_do_not_contain_what_is_forbidden(finished_run, method):
    plain = translate.load(finished_run, method=method)
    rows = plain.run.tokenizer.encode(plain(TEXTS), side="target")
    pairs = [tuple(map(int, pair)) for row in rows for pair in itertools.pairwise(row)]
    phrase = plain.run.tokenizer.decode([np.array(pairs[0], np.int32)])[0].strip()
    banned = forbidden_ids(plain.run.tokenizer, [phrase])
    assert contains(rows, banned)
    without = translate.load(finished_run, method=method, forbidden=(phrase,))
    decoder = trained.make_decoder(
        without.run.model, without.run.config, without.run.mesh, without.run.tokenizer
    )
    found = decoder(without.run.params, without.run.encode(TEXTS))
    assert not contains(found, banned)
    assert without(TEXTS) == without.run.tokenizer.decode(found) != plain(TEXTS)


def contains(rows, sequences):
    """Whether a row has one of the sequences of ids."""
    return any(
        tuple(map(int, row[start : start + len(each)])) == each
        for row in rows
        for each in sequences
        for start in range(len(row))
    )


def test_the_flag_reads_texts_and_files(tmp_path):
    (tmp_path / "words").write_text("one two\n\n, \nthree\n")
    parse = lambda flag: run_flags.parse_translate(["--workdir=w", flag]).decode  # noqa: E731
    assert parse("--forbidden=a b,c") == {"forbidden": ("a b", "c")}
    assert parse(f"--forbidden=x,@{tmp_path}/words") == {
        "forbidden": ("x", "one two", ", ", "three")
    }
    assert parse("--forbidden=") == {"forbidden": ()}
    with pytest.raises(InputError, match=r"^--forbidden=.*none: cannot be read"):
        parse(f"--forbidden=@{tmp_path}/none")


def test_wrong_texts_and_mask_predict_are_refused():
    with pytest.raises(InputError, match=r"^config\.decode\.forbidden: expected words or phrases"):
        resolve({"decode": {"forbidden": ("a", " ")}})
    masked = {"model": {"decoder": "masked"}}
    with pytest.raises(InputError, match=r"^config\.decode\.forbidden: 'mask_predict' predicts"):
        resolve({**masked, "decode": {"method": "mask_predict", "forbidden": ("a",)}})


def test_a_job_of_an_earlier_version_has_the_same_settings(finished_run):
    run = trained.load(finished_run)
    names = {"--epsilon", "--forbidden"}
    assert not names & run.asked().keys() and "--alpha" in run.asked()
    changed = {"method": "sample", "epsilon": 0.1, "forbidden": ["a"]}
    asked = trained.with_decode(run, changed).asked()
    assert [asked[name] for name in sorted(names)] == [0.1, ("a",)]


def test_files_of_scores_are_named_without_the_texts(finished_run, tmp_path):
    run = trained.load(finished_run)
    names = set()
    for forbidden in ((), ("a/b",), ("a/c",)):
        config = trained.with_decode(run, {"forbidden": forbidden}).config
        folder = tmp_path / "out"
        saved_evaluation.check_unused(
            folder, run=finished_run, split="test", config=config, origin=Origin((3,))
        )
        evaluation = saved_evaluation.Evaluation({}, hypotheses=["x"], scores=_no_scores())
        paths = saved_evaluation.save(
            evaluation, folder, run=finished_run, split="test", config=config, origin=Origin((3,))
        )
        names |= {path.name for path in paths}
    assert len(names) == 6 and all("/" not in name for name in names)
    assert sum("forbidden=1-" in name for name in names) == 4


def _no_scores():
    from flaxformer_lite.scoring import Scores

    return Scores({}, {})


def test_the_default_forbids_nothing():
    assert DecodeConfig().forbidden == ()
