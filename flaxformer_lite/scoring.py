"""How good translations are: BLEU and chrF by sacreBLEU, exact match by counting, and how sure of it one can be.

There are two ways, and a score says which by its name. Raw texts are compared with raw, untouched references: `bleu`,
which cuts both into tokens itself, and `chrf`. Texts that were tokenised beforehand are compared token by token:
`bleu_tokenized`, as papers before sacreBLEU did. Its value depends on who tokenised the references, and says nothing
beside a `bleu` (Post 2018, "A Call for Clarity in Reporting BLEU Scores").
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import sacrebleu
from sacrebleu.significance import PairedTest, estimate_ci

from flaxformer_lite.system.errors import InputError

SEED = 12345  # of resampling; sacreBLEU's own

Texts = Sequence[str]


@dataclasses.dataclass(frozen=True)
class Scores:
    """What was found out about translations."""

    values: dict[str, float]  # exact_match from 0 to 1; bleu and chrf, or bleu_tokenized, from 0 to 100
    signatures: dict[str, str]  # sacreBLEU's, of each of its scores
    # Of resampled sentences: the mean, and half the width of the interval that holds 95 % of them.
    intervals: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    p_values: dict[str, float] = dataclasses.field(default_factory=dict)  # of so large a difference to the baseline


def exact_matches(hypotheses: Texts, references: Sequence[Texts]) -> np.ndarray:
    """1.0 for each translation that equals one of its references, character by character; else 0.0."""
    return np.array([h in r for h, r in zip(hypotheses, zip(*references, strict=True), strict=True)], np.float64)


def check_counts(counts: Mapping[str, int]) -> None:
    """Raises InputError if the numbers of lines of these texts, by name, are not all the same, or none."""
    (first, expected), *others = counts.items()
    if not expected:
        raise InputError(f"{first}: expected a line for each sentence, got none.")
    for name, count in others:
        if count != expected:
            raise InputError(f"{name}: expected {expected} lines, as many as {first} has, got {count}.")


def score(hypotheses: Texts, references: Sequence[Texts], *, tokenized: bool = False) -> Scores:
    """Scores of translations against one or more references each.

    Args:
      references: each holds one for every translation.
      tokenized: the texts come cut into tokens.

    Raises:
      InputError: there are no translations, or not as many in each of the references.
    """
    _check(hypotheses, references)
    values = {"exact_match": float(exact_matches(hypotheses, references).mean())}
    signatures = {}
    for name, metric in _metrics(tokenized).items():
        values[name] = metric.corpus_score(list(hypotheses), [list(texts) for texts in references]).score
        signatures[name] = str(metric.get_signature())
    return Scores(values, signatures)


def resample(
    systems: Sequence[Texts], references: Sequence[Texts], *, bootstrap: int, seed: int = SEED, tokenized: bool = False
) -> list[Scores]:
    """`score` of one system or more, with how sure it is: bootstrap resampling of sentences. Koehn 2004.

    Sentences are drawn with replacement, as many as there are, `bootstrap` times, the same for every system. Of a
    system after the first, which is the baseline, p says how likely chance alone makes so large a difference, either
    way: approximate randomisation, which `bootstrap` times gives either system each sentence of the two by a coin
    (Riezler 2005; the paired bootstrap's p is too low, of equal systems in a tenth of all cases under 0.05).
    All resamples are in memory at once: of chrF 72 bytes for each sentence of each.

    Raises:
      InputError: as `score`, or the seed is not positive.
    """
    for hypotheses in systems:
        _check(hypotheses, references)
    if seed < 1:
        raise InputError(f"the seed of resampling: expected 1 or more, got {seed}.")  # sacreBLEU takes 0 for none
    references = [list(texts) for texts in references]
    named = [(str(number), list(hypotheses)) for number, hypotheses in enumerate(systems)]
    found = [_resampled_matches(systems, references, bootstrap=bootstrap, seed=seed)]
    signatures = {}
    for name, metric in _metrics(tokenized).items():
        options = {"metrics": {name: metric}, "references": references, "n_samples": bootstrap}
        with _seed_of_sacrebleu(seed):
            alone = [PairedTest([system], test_type="bs", **options)() for system in named]
            tested = PairedTest(named, test_type="ar", **options)()[1] if len(named) > 1 else None
        ((title, signature),) = alone[0][0].items()
        if tested:
            signature.update("ar", bootstrap)
        signatures[name] = str(signature)
        rows = [scores[title][0] for _, scores in alone]
        p_values = [row.p_value for row in tested[title]] if tested else [None]
        found.append([(name, row.score, (row.mean, row.ci), p) for row, p in zip(rows, p_values, strict=True)])
    systems_found = list(zip(*found, strict=True))
    baseline = {name: value for name, value, _, _ in systems_found[0]}
    return [
        Scores(
            values={name: float(value) for name, value, _, _ in rows},
            signatures=signatures,
            intervals={name: (float(mean), float(half)) for name, _, (mean, half), _ in rows},
            # Chance alone always makes a difference of nothing, of which sacreBLEU, who counts larger ones, says 0.
            p_values={
                name: 1.0 if value == baseline[name] else float(p) for name, value, _, p in rows if p is not None
            },
        )
        for rows in systems_found
    ]


def _resampled_matches(systems: Sequence[Texts], references: Sequence[Texts], *, bootstrap: int, seed: int) -> list:
    """(name, value, interval, p) of the exact matches of each system, drawn and tested as sacreBLEU does its scores."""
    rng, count = np.random.default_rng(seed), len(systems[0])
    draws = rng.choice(count, size=(bootstrap, count), replace=True)
    sign = 1.0 - 2.0 * rng.integers(2, size=(bootstrap, count))
    rows, baseline = [], None
    for hypotheses in systems:
        hits = exact_matches(hypotheses, references)
        baseline, p = hits if baseline is None else baseline, None
        if rows:
            gained = hits - baseline
            by_chance = np.abs(sign @ gained) >= abs(gained.sum())
            p = (by_chance.sum() + 1) / (bootstrap + 1)
        rows.append(("exact_match", hits.mean(), estimate_ci(hits[draws].mean(axis=1)), p))
    return rows


def _metrics(tokenized: bool) -> dict[str, sacrebleu.BLEU | sacrebleu.CHRF]:
    """What is measured, by name; the two kinds share none. `force`: that the text is tokenised is no surprise."""
    if tokenized:
        return {"bleu_tokenized": sacrebleu.BLEU(tokenize="none", force=True)}
    return {"bleu": sacrebleu.BLEU(), "chrf": sacrebleu.CHRF()}


def _check(hypotheses: Texts, references: Sequence[Texts]) -> None:
    if not references:
        raise InputError("the references: expected one text or more for each translation, got none.")
    numbered = {f"references {number}": len(texts) for number, texts in enumerate(references, start=1)}
    check_counts({"the translations": len(hypotheses), **numbered})


@contextlib.contextmanager
def _seed_of_sacrebleu(seed: int) -> Iterator[None]:
    """sacreBLEU takes the seed of its draws from the environment, and from nowhere else."""
    before = os.environ.get("SACREBLEU_SEED")
    os.environ["SACREBLEU_SEED"] = str(seed)
    try:
        yield
    finally:
        if before is None:
            del os.environ["SACREBLEU_SEED"]
        else:
            os.environ["SACREBLEU_SEED"] = before
