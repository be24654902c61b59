"""Links of words as text, and the alignment error rate against hand-made references."""

import itertools

import numpy as np
import pytest

from flaxformer_lite.scores import word_links
from flaxformer_lite.scores.alignment_error import alignment_scores
from flaxformer_lite.scores.word_links import Reference
from flaxformer_lite.system.errors import InputError


def test_the_rates_are_those_of_a_hand_made_example():
    # A: 4 links; S: 3, and A has 2 of them; P: 5, and A has 3 of them.
    hypotheses = word_links.all_links(["0-0 1-1 2-3", "0-1"], name="hyp")
    references = word_links.references(["0-0 1-1 2p2 2p3", "1-0"], name="ref")
    found = alignment_scores(hypotheses, references)
    assert (found.links, found.sure, found.possible) == (4, 3, 5)
    assert found.precision == 3 / 4 and found.recall == 2 / 3
    assert found.aer == pytest.approx(1 - (2 + 3) / (4 + 3))


def test_sizes_are_summed_over_the_pairs_and_not_averaged():
    rng = np.random.default_rng(2)
    cells = [frozenset(zip(*np.nonzero(rng.random((5, 7)) < p), strict=True)) for p in (0.4,) * 33]
    links, sure, possible = cells[:11], cells[11:22], cells[22:]
    found = alignment_scores(
        links, [Reference(s, s | p) for s, p in zip(sure, possible, strict=True)]
    )
    total = lambda sets: sum(map(len, sets))  # noqa: E731
    a_s = total(a & s for a, s in zip(links, sure, strict=True))
    a_p = total(a & (s | p) for a, s, p in zip(links, sure, possible, strict=True))
    assert found.aer == pytest.approx(1 - (a_s + a_p) / (total(links) + total(sure)))
    means = [1 - 2 * len(a & s) / (len(a) + len(s)) for a, s in zip(links, sure, strict=True)]
    assert found.aer != pytest.approx(np.mean(means))


def test_the_reference_itself_has_no_error_and_disjoint_links_have_only_errors():
    sure = frozenset({(0, 0), (1, 2)})
    assert alignment_scores([sure], [Reference(sure, sure)]).aer == 0
    assert alignment_scores([frozenset({(0, 1)})], [Reference(sure, sure)]).aer == 1


def test_a_sure_link_is_possible_although_a_reference_lists_it_only_once():
    link = frozenset({(2, 3)})
    assert alignment_scores([link], [Reference(link, frozenset())]).precision == 1


def test_rates_without_a_divisor_are_none():
    empty = frozenset()
    found = alignment_scores([empty], [Reference(empty, empty)])
    assert (found.aer, found.precision, found.recall) == (None, None, None)
    found = alignment_scores([empty], [Reference(frozenset({(0, 0)}), empty)])
    assert (found.aer, found.precision, found.recall) == (1, None, 0)


def test_lines_are_read_as_they_are_written():
    for size in (0, 1, 5):
        links = frozenset(itertools.islice(itertools.product(range(11), (10, 2)), size))
        assert word_links.links_of(word_links.line_of(links), where="") == links
    assert word_links.line_of([(10, 1), (2, 3), (2, 3), (2, 1)]) == "2-1 2-3 10-1"


def test_both_signs_of_possible_links_are_read():
    for sign in "p:":
        found = word_links.reference_of(f"3-1  2{sign}4 ", where="")
        assert found == ({(3, 1)}, {(3, 1), (2, 4)})


@pytest.mark.parametrize("part", ["0", "0-", "a-1", "0-0-1", "-1-2", "0–1", "1-2:0.9", "٣-1"])
def test_an_error_names_the_file_the_line_and_the_part(part):
    with pytest.raises(InputError, match=r"^dev\.align, line 2: expected links") as error:
        word_links.references(["0-0", f"1-1 {part}"], name="dev.align")
    assert repr(part) in str(error.value)


def test_a_hypothesis_has_no_possible_links():
    with pytest.raises(InputError, match=r"^hyp, line 1: .* possible link"):
        word_links.all_links(["0-0 1p1"], name="hyp")


def test_as_many_references_as_alignments_are_needed():
    with pytest.raises(InputError, match="got 2 and 1"):
        alignment_scores([frozenset()] * 2, [Reference(frozenset(), frozenset())])
