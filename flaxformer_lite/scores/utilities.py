"""Utilities of minimum Bayes risk: how good a translation is if another one were the reference."""

import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import sacrebleu

from flaxformer_lite.system.errors import InputError

# (translations, references) -> a number of each pair, higher is better.
Utility = Callable[[Sequence[str], Sequence[str]], Sequence[float]]
UTILITIES = ("chrf", "bleu")


def utility_of(name: str | Utility, *, bleu_tokenizer: str) -> Utility:
    """Returns a utility by its name: 'chrf', 'bleu', or 'path.py:function'; a function as it is.

    Args:
      bleu_tokenizer: sacreBLEU's tokenizer for 'bleu'.

    Raises:
      InputError: there is no such utility, or the file has no such function.
    """
    if not isinstance(name, str):
        if not callable(name):
            raise InputError(f"utility: expected a name or a function, got {name!r:.40}.")
        return name
    if name == "chrf":
        return _chrf
    if name == "bleu":
        bleu = sacrebleu.BLEU(tokenize=bleu_tokenizer, force=True, effective_order=True)
        return lambda hypotheses, references: [
            bleu.sentence_score(hypothesis, [reference]).score
            for hypothesis, reference in zip(hypotheses, references, strict=True)
        ]
    return _from_file(name)


def _chrf(hypotheses: Sequence[str], references: Sequence[str]) -> list[float]:
    """Returns sentence chrF of each pair; the n-grams of a reference are extracted once."""
    metrics: dict[str, sacrebleu.CHRF] = {}
    for reference in references:
        if reference not in metrics:
            metrics[reference] = sacrebleu.CHRF(references=[[reference]])
    return [
        metrics[reference].corpus_score([hypothesis], None).score
        for hypothesis, reference in zip(hypotheses, references, strict=True)
    ]


def _from_file(name: str) -> Utility:
    """Returns the function of 'path.py:function'; raises InputError if there is none."""
    path, colon, function = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise InputError(
            f"utility: expected {', '.join(UTILITIES)} or path.py:function, got {name!r}."
        )
    spec = importlib.util.spec_from_file_location(f"utility_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        found: Utility = getattr(module, function)
    except Exception as error:  # of the user's file
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"utility: {name}: cannot be read: {reason or type(error).__name__}; expected a file "
            "of Python with this function."
        ) from error
    if not callable(found):
        raise InputError(f"utility: {name}: expected a function, got {type(found).__name__}.")
    return found


def checked(values: object, count: int) -> list[float]:
    """Returns the numbers of a utility; raises InputError unless there are `count` finite ones."""
    try:
        found = [float(value) for value in values]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        found = []
    if len(found) != count or not all(map(math.isfinite, found)):
        raise InputError(
            f"utility: expected {count:,} finite numbers, one for each pair of a translation and "
            f"a reference, got {values!r:.60}; correct the function."
        )
    return found
