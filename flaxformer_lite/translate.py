"""A trained encoder-decoder, ready to translate.

from flaxformer_lite import translate
translator = translate.load("runs/mine")
print(translator(["Monday, May 5, 2025"]))

By beam search, `translate.load("runs/mine", method="beam")`, it also has `n_best(texts, 3)`. Texts without end, or too
long for the model, are for `translator.stream(texts, long="split")`.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from flaxformer_lite import trained
from flaxformer_lite.lines import chunks
from flaxformer_lite.lines.line_windows import WINDOW, Answer, Window
from flaxformer_lite.system.errors import InputError

LONG = ("refuse", "split")  # what becomes of a text that is too long for the model
SEGMENT_STRIDE = 1_000_003  # segment k of text n draws at random as text n + k times this would


class Translator:
    """Texts in the source language to texts in the target language, in order."""

    def __init__(self, run: trained.Trained):
        self.run = run
        self._decoder = trained.make_decoder(run.model, run.config, run.mesh)

    def __call__(self, texts: Sequence[str], prefixes: Sequence[str] | None = None) -> list[str]:
        """One translation a text, which begins with its prefix; an empty text, or one of white space, has an empty one.

        Raises:
          InputError: a text or a prefix has more tokens than the model takes; it is named by its number, counted from
            1. Or there are not as many prefixes as texts.
        """
        return self.translate_ids(*self._encode(texts, prefixes))

    def translate_ids(
        self,
        sources: Sequence[np.ndarray],
        prefixes: Sequence[np.ndarray] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> list[str]:
        """The same for ids, of which there are not too many; `numbers`: what the draws of each depend on."""
        rows = self._decoder(self.run.params, sources, prefixes=prefixes, numbers=numbers)
        return self.run.tokenizer.decode(rows)

    def stream(self, texts: Iterable[str], *, long: str = "refuse", window: int = WINDOW) -> Iterator[str]:
        """One translation a text, in order, of which `window` are taken and translated at a time.

        Args:
          long: 'refuse', or 'split': a text that is too long is translated in segments; see `lines.chunks`.

        Raises:
          InputError: as when called, but only where such a text is reached.
        """
        answer, texts, first = LineTranslator(self, long=long), iter(texts), 0
        while lines := list(itertools.islice(texts, window)):
            yield from answer(Window(lines, first)).lines
            first += len(lines)

    def n_best(
        self, texts: Sequence[str], n: int, prefixes: Sequence[str] | None = None
    ) -> list[list[tuple[str, float]]]:
        """The n best translations of each text with their scores, best first, by beam search; fewer if there are fewer.

        A score is the log-probability (natural) of the translation's tokens, its end symbol among them, over the length
        penalty. Two translations may be the same text in other tokens. An empty text has the empty one, with score 0.

        Raises:
          InputError: as when called; or `decode.method` is not 'beam', or `decode.beam_size` is less than n.
        """
        sources, beginnings = self._encode(texts, prefixes)
        return self.n_best_of_ids(sources, n, beginnings)

    def n_best_of_ids(
        self, sources: Sequence[np.ndarray], n: int, prefixes: Sequence[np.ndarray] | None = None
    ) -> list[list[tuple[str, float]]]:
        """The same for ids, of which there are not too many."""
        found = self._decoder.n_best(self.run.params, sources, n, prefixes=prefixes)
        decode = self.run.tokenizer.decode
        return [list(zip(decode(ids for ids, _ in row), (score for _, score in row), strict=True)) for row in found]

    def _encode(
        self, texts: Sequence[str], prefixes: Sequence[str] | None
    ) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        sources = _sources(self.run, texts)
        if prefixes is None:
            return sources, None
        if len(prefixes) != len(texts):
            raise InputError(f"prefixes: expected one a text, {len(texts)}, got {len(prefixes)}; '' is none.")
        return sources, self.run.encode(prefixes, name="prefix", advice="shorten it", side="target")


class LineTranslator:
    """What the command writes for a window of lines: a translation each, or the n best with numbers and scores."""

    def __init__(
        self, translator: Translator, *, prefix: str | None = None, n_best: int | None = None, long: str = "refuse"
    ):
        """Raises InputError if the prefix is too long, or for what goes not together."""
        self._translator, self._run, self._n_best, self._long = translator, translator.run, n_best, long
        if long not in LONG:
            raise InputError(f"long: expected {' or '.join(LONG)}, got {long!r}.")
        if prefix is not None and self._run.config.decode.method == "mask_predict":
            raise InputError("--prefix: decode.method='mask_predict' writes all tokens at once; leave it out.")
        if n_best and long == "split":
            raise InputError("--long=split: goes with one translation a line; leave out --n_best.")
        if n_best:
            translator.n_best([], n_best)  # a number that it could not write
        as_prefix = {"name": "prefix", "advice": "shorten it", "side": "target"}
        self._prefix = None if prefix is None else self._run.encode([prefix], **as_prefix)[0]

    def __call__(self, window: Window) -> Answer:
        """Raises InputError for a line that is too long, by its number."""
        if self._n_best:
            return Answer(self._several(window))
        cut = chunks.cut if self._long == "split" else lambda line, fits: [chunks.Segment(line)]
        parts = [cut(line, self._run.fits) for line in window.lines]
        placed = [(n, k, part) for n, line in enumerate(parts, start=window.first) for k, part in enumerate(line)]
        sources = self._encode([part.text for *_, part in placed], window.name, [n + 1 for n, *_ in placed])
        prefixes = None
        if self._prefix is not None:
            prefixes = [self._prefix if k == 0 else np.empty(0, np.int32) for _, k, _ in placed]
        draws = [(n + k * SEGMENT_STRIDE) % 2**31 for n, k, _ in placed]
        texts = iter(self._translator.translate_ids(sources, prefixes, draws))
        lines = [chunks.join(list(itertools.islice(texts, len(line))), line) for line in parts]
        return Answer(lines, sum(len(line) > 1 for line in parts))

    def _several(self, window: Window) -> list[str]:
        sources = self._encode(window.lines, window.name, window.numbers)
        prefixes = None if self._prefix is None else [self._prefix] * len(sources)
        found = zip(window.numbers, self._translator.n_best_of_ids(sources, self._n_best, prefixes), strict=True)
        return [f"{number}\t{score:.6f}\t{text}" for number, row in found for text, score in row]

    def _encode(self, texts: Sequence[str], name: str, numbers: Sequence[int]) -> list[np.ndarray]:
        advice = "split it into shorter sentences, or have that done by --long=split"
        if name == "text" or self._n_best:
            advice = "split it into shorter sentences"
        return _sources(self._run, texts, name=name, numbers=numbers, advice=advice)


def _sources(run: trained.Trained, texts: Sequence[str], **called: object) -> list[np.ndarray]:
    """`run.encode` of the texts, of which those of white space alone are as empty ones."""
    return run.encode(["" if text.isspace() else text for text in texts], **called)


def load(
    workdir: str | Path,
    *,
    average: str | None = None,
    parameters: str | None = None,
    ensemble: str | Path | Sequence[str | Path] = (),
    tensor: int = 1,
    **decode: object,
) -> Translator:
    """The best model of a finished or half-finished run; without an evaluation yet, the newest.

    Args:
      average, parameters, ensemble, tensor: as `trained.load` takes them; an average is 'last:5' or 'best:5'
        checkpoints, an ensemble other runs that decide together with this one, and a model lies on `tensor` devices.
      decode: fields of `DecodeConfig` to use in place of the run's own.

    Raises:
      InputError: the folder holds no run, no checkpoint that can be read, or a model that does not translate; or a
        field is wrong.
    """
    chosen = {"average": average, "parameters": parameters, "ensemble": ensemble, "tensor": tensor}
    run = trained.load(workdir, command="translate", architecture="encoder_decoder", **chosen)
    return Translator(trained.with_decode(run, decode))
