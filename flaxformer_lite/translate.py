"""Translates texts with a trained encoder-decoder.

from flaxformer_lite import translate
translator = translate.load("runs/mine")
print(translator(["Monday, May 5, 2025"]))

With beam search, `translate.load("runs/mine", method="beam")`, `translator.n_best(texts, 3)` works
too. `translator.stream(texts, long="split")` translates streams, and texts that are too long for
the model. `translator.scored(texts)` returns translations with their log-probabilities.
"""

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

import numpy as np

from flaxformer_lite import trained
from flaxformer_lite.fields import EOS
from flaxformer_lite.lines import chunks
from flaxformer_lite.lines.line_windows import WINDOW, Answer, Window
from flaxformer_lite.system import given
from flaxformer_lite.system.errors import InputError

if TYPE_CHECKING:
    from flaxformer_lite.alignments import Aligner
    from flaxformer_lite.decoding.mbr import MbrRule
    from flaxformer_lite.scores.utilities import Utility
    from flaxformer_lite.training.token_scores import TokenScorer, TokenScores

LONG = ("refuse", "split")  # the treatments of a text that is too long for the model
SHORTER = "split it into shorter sentences"
CHUNK_STRIDE = 1_000_003  # chunk k of text n is sampled with the number n + k * CHUNK_STRIDE


class ReadingOptions(TypedDict, total=False):
    """Keyword arguments that choose the attention weights of an alignment."""

    layer: int | None
    head: int | None
    shift: str | None


def aligner_of(run: trained.Trained, **reading: Unpack[ReadingOptions]) -> "Aligner":
    """Returns the aligner of a run; raises InputError as `alignments.Aligner`."""
    from flaxformer_lite import alignments  # only translations with alignments need it

    return alignments.Aligner(run, alignments.reading_of(run.config, **reading))


class ScoredText(NamedTuple):
    """A translation, and the log-probabilities of its tokens."""

    text: str
    tokens: "TokenScores"


class Translator:
    """Translates texts in the source language to the target language, in order."""

    def __init__(self, run: trained.Trained):
        self.run = run
        self._aligners: dict[tuple[tuple[str, object], ...], Aligner] = {}
        self._decoder = trained.make_decoder(run.model, run.config, run.mesh, run.tokenizer)
        self._scorer: TokenScorer | None = None  # compiled for the first scores

    def __call__(self, texts: Sequence[str], prefixes: Sequence[str] | None = None) -> list[str]:
        """Returns a translation of each text that starts with its prefix; empty for a blank text.

        Raises:
          InputError: a text or a prefix has more tokens than the model takes, or the numbers of
            prefixes and texts differ.
        """
        return self.translate_ids(*self._encode(texts, prefixes))

    def translate_ids(
        self,
        sources: Sequence[np.ndarray],
        prefixes: Sequence[np.ndarray] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> list[str]:
        """Returns a translation of each array of ids.

        Args:
          sources, prefixes: ids that fit into the model.
          numbers: sampling depends on these; None: 0, 1, 2, ...
        """
        rows = self._decoder(self.run.params, sources, prefixes=prefixes, numbers=numbers)
        return self.run.tokenizer.decode(rows)

    def aligned(
        self, texts: Sequence[str], **reading: Unpack[ReadingOptions]
    ) -> list[tuple[str, list[tuple[int, int]]]]:
        """Returns a translation of each text with its links, (source word, target word) from 0.

        Args:
          reading: `layer`, `head` and `shift`: the weights that are the alignment, see
            `alignments.reading_of`.

        Raises:
          InputError: see `__call__`, `alignments.Aligner` and `alignments.reading_of`.
        """
        texts = given.texts(texts)
        chosen = tuple(sorted(reading.items()))
        if chosen not in self._aligners:  # each compiles its functions once
            self._aligners[chosen] = aligner_of(self.run, **reading)
        translations = self(texts)
        aligner = self._aligners[chosen]
        return list(zip(translations, aligner.of_translations(texts, translations), strict=True))

    def scored(
        self, texts: Sequence[str], prefixes: Sequence[str] | None = None
    ) -> list[ScoredText]:
        """Returns a translation of each text with the log-probabilities of its tokens.

        They are those of `Rescorer.of_ids` for these tokens, whatever the method of decoding. The
        tokens of a prefix count. A blank text has no tokens, and the log-probability 0.

        Raises:
          InputError: see `__call__`; or `decode.method` is 'mask_predict', whose texts have no
            probability.
        """
        return self.scored_ids(*self._encode(texts, prefixes))

    def scored_ids(
        self,
        sources: Sequence[np.ndarray],
        prefixes: Sequence[np.ndarray] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> list[ScoredText]:
        """Returns `scored` of arrays of ids; arguments as of `translate_ids`."""
        from flaxformer_lite.training.token_scores import (  # only scores need it
            TokenScorer,
            TokenScores,
        )

        if self.run.config.decode.method == "mask_predict":
            raise InputError(
                "scores: decode.method='mask_predict' predicts all tokens at once, and its texts "
                "have no probability; leave them out."
            )
        if self._scorer is None:
            tokens = self.run.config.data.tokens_per_batch
            self._scorer = TokenScorer(self.run.model, self.run.mesh, tokens_per_batch=tokens)
        found = self._decoder.with_ends(
            self.run.params, sources, prefixes=prefixes, numbers=numbers
        )
        labels = [np.append(ids, np.int32(EOS)) if ended else ids for ids, ended in found]
        log_probs = self._scorer(self.run.params, labels, sources=sources)
        texts = self.run.tokenizer.decode(ids for ids, _ in found)
        pieces = self.run.tokenizer.vocabulary_of("target")
        return [
            ScoredText(text, TokenScores.of(ids, scores, pieces))
            for text, ids, scores in zip(texts, labels, log_probs, strict=True)
        ]

    def stream(
        self, texts: Iterable[str], *, long: str = "refuse", window: int = WINDOW
    ) -> Iterator[str]:
        """Returns an iterator of the translation of each text, in order.

        It reads and translates `window` texts at a time.

        Args:
          long: 'refuse', or 'split' to translate a text that is too long in chunks, see
            `lines.chunks`.

        Raises:
          InputError: an argument has another type or value. About a text, see `__call__`: only
            when the text is reached.
        """
        window = min(given.whole_number(window, name="window"), sys.maxsize)  # islice's limit
        answer, checked = LineTranslator(self, long=long), given.each_text(texts)

        def translations() -> Iterator[str]:
            first = 0
            while lines := list(itertools.islice(checked, window)):
                yield from answer(Window(lines, first)).lines
                first += len(lines)

        return translations()

    def n_best(
        self, texts: Sequence[str], n: int, prefixes: Sequence[str] | None = None
    ) -> list[list[tuple[str, float]]]:
        """Returns up to n translations of each text with their scores, best first, by beam search.

        A score is the natural log-probability of the tokens, including the end symbol, divided by
        the length penalty; of 'stochastic_beam' it is the perturbed log-probability (Kool 2019). 2
        translations may be the same text with different tokens. A blank text has 1 empty
        translation with score 0.

        Raises:
          InputError: see `__call__`; or `decode.method` is no beam search, or `decode.beam_size` is
            less than n.
        """
        n = given.whole_number(n, name="n")
        sources, prefix_ids = self._encode(texts, prefixes)
        return self.n_best_of_ids(sources, n, prefix_ids)

    def n_best_of_ids(
        self,
        sources: Sequence[np.ndarray],
        n: int,
        prefixes: Sequence[np.ndarray] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> list[list[tuple[str, float]]]:
        """Returns `n_best` of arrays of ids; arguments as of `translate_ids`."""
        found = self._decoder.n_best(
            self.run.params, sources, n, prefixes=prefixes, numbers=numbers
        )
        decode = self.run.tokenizer.decode
        return [
            list(zip(decode(ids for ids, _ in row), (score for _, score in row), strict=True))
            for row in found
        ]

    def mbr(
        self,
        texts: Sequence[str],
        samples: int = 16,
        utility: "str | Utility" = "chrf",
        prefixes: Sequence[str] | None = None,
    ) -> list[str]:
        """Returns the translation of each text with minimum Bayes risk, see `decoding.mbr`.

        Args:
          samples: the number of candidates: samples if `decode.method` is 'sample', the n best if
            it is a beam search.
          utility: 'chrf', 'bleu', 'path.py:function', or a function of lists of translations and of
            references that returns a number for each pair, higher is better.

        Raises:
          InputError: see `__call__`; or `decode.method` is another one, the beam is too small, or
            the utility cannot be used.
        """
        rule = self.mbr_rule(samples, utility)
        return rule(*self._encode(texts, prefixes))

    def mbr_rule(self, samples: int, utility: "str | Utility") -> "MbrRule":
        """Returns the function that `mbr` applies to ids; raises InputError, see `mbr`."""
        # Only this function needs sacreBLEU.
        from flaxformer_lite.decoding.mbr import MbrRule
        from flaxformer_lite.scores.utilities import utility_of
        from flaxformer_lite.training import evaluations

        config = self.run.config
        tokenizer = "none" if config.data.pretokenized else evaluations.bleu_tokenizer(config)
        rule = MbrRule(
            self.translate_ids,
            self.n_best_of_ids,
            method=config.decode.method,
            candidates=given.whole_number(samples, name="mbr", least=2),
            utility=utility_of(utility, bleu_tokenizer=tokenizer),
        )
        rule([])  # raises if the beam is too small
        return rule

    def _encode(
        self, texts: Sequence[str], prefixes: Sequence[str] | None
    ) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        texts = given.texts(texts)
        sources = _sources(self.run, texts)
        if prefixes is None:
            return sources, None
        prefixes = given.texts(prefixes, name="prefixes", item="prefix")
        if len(prefixes) != len(texts):
            raise InputError(
                f"prefixes: expected one a text, {len(texts)}, got {len(prefixes)}; '' is none."
            )
        return sources, self.run.encode(prefixes, name="prefix", advice="shorten it", side="target")


class LineTranslator:
    """Returns the translation of each line of a window of input lines."""

    def __init__(
        self,
        translator: Translator,
        *,
        prefix: str | None = None,
        long: str = "refuse",
        rule: "MbrRule | None" = None,
    ):
        """
        Args:
          prefix: the start of each translation.
          long: see `Translator.stream`.
          rule: translates ids; None: `Translator.translate_ids`.

        Raises:
          InputError: the prefix is too long, or an option has another value.
        """
        self._run, self._long = translator.run, long
        self._translate: Callable[..., list[str]] = rule or translator.translate_ids
        if long not in LONG:
            raise InputError(f"long: expected {' or '.join(LONG)}, got {long!r}.")
        if prefix is not None and self._run.config.decode.method == "mask_predict":
            raise InputError(
                "--prefix: decode.method='mask_predict' predicts all tokens at once; leave it out."
            )
        self._prefix = None
        if prefix is not None:
            (self._prefix,) = self._run.encode(
                [prefix], name="prefix", advice="shorten it", side="target"
            )

    def __call__(self, window: Window) -> Answer:
        """Raises InputError if a line is too long."""
        cut = chunks.cut if self._long == "split" else lambda line, fits: [chunks.Segment(line)]
        chunks_of_lines = [cut(line, self._run.fits) for line in window.lines]
        numbered = [
            (n, k, chunk)
            for n, line in enumerate(chunks_of_lines, start=window.first)
            for k, chunk in enumerate(line)
        ]
        texts = [chunk.text for *_, chunk in numbered]
        advice = "split it into shorter sentences, or have that done by --long=split"
        sources = _sources(
            self._run,
            texts,
            name=window.name,
            numbers=[n + 1 for n, *_ in numbered],
            advice=SHORTER if window.name == "text" else advice,
        )
        prefixes = None
        if self._prefix is not None:
            prefixes = [self._prefix if k == 0 else np.empty(0, np.int32) for _, k, _ in numbered]
        sampled_as = [(n + k * CHUNK_STRIDE) % 2**31 for n, k, _ in numbered]
        translated = iter(self._translate(sources, prefixes, sampled_as))
        lines = [
            chunks.join(list(itertools.islice(translated, len(line))), line)
            for line in chunks_of_lines
        ]
        return Answer(lines, sum(len(line) > 1 for line in chunks_of_lines))

    def encode(self, window: Window) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        """Returns the ids of whole lines and of their prefixes; raises InputError if too long."""
        sources = _sources(
            self._run, window.lines, name=window.name, numbers=window.numbers, advice=SHORTER
        )
        return sources, None if self._prefix is None else [self._prefix] * len(sources)


def _sources(run: trained.Trained, texts: Sequence[str], **called: Any) -> list[np.ndarray]:
    """Returns `run.encode` of the texts; a blank text is encoded as an empty one."""
    return run.encode(["" if text.isspace() else text for text in texts], **called)


def load(
    workdir: str | Path,
    *,
    average: str | None = None,
    parameters: str | None = None,
    ensemble: str | Path | Sequence[str | Path] = (),
    tensor: int = 1,
    **decode: Unpack[trained.DecodeOptions],
) -> Translator:
    """Returns the best translator of a run, finished or not; the newest if none is evaluated yet.

    Args:
      average, parameters, ensemble, tensor: see `trained.load`.
      decode: fields of `DecodeConfig`, in place of the run's own.

    Raises:
      InputError: the folder contains no run, no readable checkpoint, or a model that does not
        translate; or a field is wrong.
    """
    run = trained.load(
        workdir,
        command="translate",
        architecture="encoder_decoder",
        average=average,
        parameters=parameters,
        ensemble=ensemble,
        tensor=tensor,
    )
    return Translator(trained.with_decode(run, decode))
