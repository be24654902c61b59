"""The n best texts of a translator by diverse and stochastic beams, and as lines of a file."""

import pytest
from scored import translator_of

from flaxformer_lite.cli import translate_lines
from flaxformer_lite.decoding.beam import length_penalty
from flaxformer_lite.exchange.folder import check_exported
from flaxformer_lite.fields import DecodeConfig
from flaxformer_lite.lines.line_windows import Window
from flaxformer_lite.system.errors import InputError

pytestmark = pytest.mark.usefixtures("quickly_compiled")

TEXTS = ["abc", "ba kl", "", "a", "abc", "abc"]


@pytest.mark.slow
def test_diverse_n_best_lists_have_the_scores_of_rescoring():
    translator = translator_of(method="diverse_beam", beam_size=4, beam_groups=2, alpha=0.7)
    found = translator.n_best(TEXTS, 4)
    assert max(map(len, found)) > 2 and found[2] == [("", 0.0)] and found[4] == found[0]
    scored = translator.scored(TEXTS)
    assert [row[0][0] for row in found] == [each.text for each in scored]
    for row, (_, tokens) in zip(found, scored, strict=True):
        penalty = length_penalty(float(len(tokens.pieces)), alpha=0.7, kind="wu")
        assert row[0][1] == pytest.approx(tokens.log_prob / penalty, abs=1e-4)
    assert {"--beam_groups", "--diversity"} <= translator.run.asked().keys()


@pytest.mark.slow
def test_stochastic_n_best_lists_are_samples_by_the_numbers_of_lines():
    translator = translator_of(method="stochastic_beam", beam_size=4, seed=5)
    found = translator.n_best(TEXTS, 2)
    assert found[4] != found[0] != found[5]  # the same text with another number
    lines = translate_lines.lines_of(translator, n_best=2)
    rest = lines(Window(TEXTS[4:], first=4)).lines
    assert rest == [f"{n}\t{score:.6f}\t{text}" for n in (5, 6) for text, score in found[n - 1]]
    assert lines(Window(TEXTS, first=0)).lines[-4:] == rest
    assert translator.run.asked().keys().isdisjoint({"--beam_groups", "--diversity"})


@pytest.mark.parametrize("method", ["diverse_beam", "stochastic_beam"])
def test_a_search_that_no_engine_has_is_not_exported(method):
    check_exported(DecodeConfig(method="beam"))
    with pytest.raises(InputError, match=rf"^config\.decode\.method: '{method}' is not exported"):
        check_exported(DecodeConfig(method=method))
