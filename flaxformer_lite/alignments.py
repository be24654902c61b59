"""Aligns the words of given pairs of texts by the cross-attention of a trained encoder-decoder.

from flaxformer_lite import alignments
aligner = alignments.load("runs/mine")
print(aligner([("Monday, May 5, 2025", "Montag, 5. Mai 2025")]))  # [[(0, 0), (1, 2), ...]]

`choose` finds the layer, head and step that agree best with reference alignments.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

import numpy as np

from flaxformer_lite import trained
from flaxformer_lite.checks.alignment_checks import guided_layer
from flaxformer_lite.data.tokens.any_tokenizer import AnyTokenizer
from flaxformer_lite.data.tokens.spans import spans, word_of, words
from flaxformer_lite.decoding.cross_attention import CrossAttention, Heads
from flaxformer_lite.fields import Config
from flaxformer_lite.model.ensemble import Ensemble
from flaxformer_lite.scores.alignment_error import AlignmentScores, alignment_scores
from flaxformer_lite.scores.word_links import Links, Reference
from flaxformer_lite.system import given
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training.parallel import decoding_shardings

Pair = tuple[str, str]  # (source, target)
SHIFTS = ("output", "input")
NONE = -1  # a token without a source token


@dataclasses.dataclass(frozen=True)
class Reading:
    """Which attention weights are the alignment.

    Attributes:
      heads: a layer and a head, or means of them.
      shift: the decoder step at which a target token is aligned: 'output', the step that predicts
        it, or 'input', the next step, whose input it is (Shift-Att of Chen 2020). With a masked
        decoder they are the same step.
    """

    heads: Heads
    shift: str = "output"

    def __str__(self) -> str:
        layer, head = self.heads
        return (
            f"{'all layers' if layer is None else f'layer {layer}'}, "
            f"{'mean of heads' if head is None else f'head {head}'}, {self.shift}"
        )


def reading_of(
    config: Config, *, layer: int | None = None, head: int | None = None, shift: str | None = None
) -> Reading:
    """Returns the weights that are the alignment of a run.

    Args:
      layer: None: the mean of all layers, or the layer of `train.guided_alignment`.
      head: None: the mean of all heads, or with no `layer` the head of `train.guided_alignment`.
      shift: None: 'output'.

    Raises:
      InputError: the decoder has no such layer or head, there is a head without its layer, or
        `shift` is not in SHIFTS.
    """
    if config.train.guided_alignment and layer is None and head is None:
        layer, head = guided_layer(config), config.train.alignment_head
    reading = Reading(Heads(layer, head), "output" if shift is None else shift)
    _check(reading, config)
    return reading


def _check(reading: Reading, config: Config) -> None:
    """Raises InputError if the model has no such weights."""
    model, (layer, head) = config.model, reading.heads
    limits = (("layer", layer, model.num_decoder_layers), ("head", head, model.num_heads))
    for name, number, count in limits:
        if number is not None and not 0 <= number < count:
            raise InputError(
                f"alignment_{name}: expected 0 to {count - 1}, as there are {count} {name}s, got "
                f"{number}."
            )
    if head is not None and layer is None:
        raise InputError(f"alignment_head: {head} is of no layer; add alignment_layer.")
    if reading.shift not in SHIFTS:
        raise InputError(f"alignment_shift: expected {' or '.join(SHIFTS)}, got {reading.shift!r}.")


class Aligner:
    """Returns the word alignment of each of some pairs of texts, in order."""

    def __init__(self, run: trained.Trained, reading: Reading | None = None):
        """
        Args:
          reading: None: that of `reading_of` by default.

        Raises:
          InputError: the run is an ensemble, has no cross-attention, or lacks the layer or head.
        """
        if isinstance(run.model, Ensemble):
            raise InputError(
                "alignments: expected the attention of one model, got an ensemble; align with one "
                "of its runs."
            )
        if run.config.model.architecture != "encoder_decoder":
            raise InputError(
                "alignments: expected a model with cross-attention (encoder_decoder), got "
                f"{run.config.model.architecture}."
            )
        self.run = run
        self.reading = reading_of(run.config) if reading is None else reading
        _check(self.reading, run.config)
        self._spaces = {side: is_space(run.tokenizer, side) for side in ("source", "target")}
        self._attention = CrossAttention(
            run.config.model,
            tokens_per_batch=run.config.decode.tokens_per_batch,
            ignored_V=self._spaces["source"],
            rows_multiple=run.mesh.size,
            sharding=decoding_shardings(run.mesh)[0],
        )

    def __call__(self, pairs: Sequence[Pair]) -> list[list[tuple[int, int]]]:
        """Returns the links of each pair as sorted (source word, target word), from 0.

        White space separates words. A source word and a target word are linked if the source token
        of any target token of the one is in the other. A token that is only white space is not
        aligned. A pair with a blank text has no links.

        Raises:
          InputError: a text has more tokens than the model takes.
        """
        sources, targets = _texts(pairs)
        return self._links(sources, targets, *self._encode(sources, targets))

    def of_translations(
        self, sources: Sequence[str], translations: Sequence[str]
    ) -> list[list[tuple[int, int]]]:
        """Returns the links of translations by the model itself.

        One that reaches the model's limit has no links of tokens beyond it.

        Raises:
          InputError: a source has more tokens than the model takes.
        """
        sources, translations = _texts(list(zip(sources, translations, strict=True)))
        target_ids = self.run.tokenizer.encode(translations, side="target")
        return self._links(sources, translations, self.run.encode(sources), target_ids)

    def _links(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        source_ids: Sequence[np.ndarray],
        target_ids: Sequence[np.ndarray],
    ) -> list[list[tuple[int, int]]]:
        tokens = self.of_ids(source_ids, target_ids)
        numbers = self._words(sources, "source"), self._words(targets, "target")
        return [
            sorted(word_links(token_T, *of_pair))
            for token_T, *of_pair in zip(tokens, *numbers, strict=True)
        ]

    def of_ids(
        self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Returns the position of the source token of each target token, int64, or NONE.

        Args:
          sources, targets: ids without end symbols, at most `max_length` of each.
        """
        found = self._steps(sources, targets, (self.reading.heads,))
        return [
            self._of_tokens(position_1T[0], ids, self.reading.shift)
            for position_1T, ids in zip(found, targets, strict=True)
        ]

    def choose(
        self, pairs: Sequence[Pair], references: Sequence[Reference]
    ) -> list[tuple[Reading, AlignmentScores]]:
        """Returns the scores of each layer, head, mean and step on pairs; the lowest AER first.

        Raises:
          InputError: as when called; or there are no links in the references, or another number of
            them than of pairs.
        """
        if not any(each.sure or each.possible for each in references):
            raise InputError("references: expected links, got none; give pairs that have some.")
        sources, targets = _texts(pairs)
        ids = self._encode(sources, targets)
        numbers = list(
            zip(self._words(sources, "source"), self._words(targets, "target"), strict=True)
        )
        model = self.run.config.model
        each_head = (*range(model.num_heads), None)
        chosen = tuple(
            Heads(n, head) for n in range(model.num_decoder_layers) for head in each_head
        )
        chosen += (Heads(None, None),)
        steps = self._steps(*ids, chosen)
        table = []
        for c, heads in enumerate(chosen):
            for shift in SHIFTS if model.decoder == "causal" else SHIFTS[:1]:
                links: list[Links] = [
                    word_links(self._of_tokens(each_CT[c], target, shift), *of_pair)
                    for each_CT, target, of_pair in zip(steps, ids[1], numbers, strict=True)
                ]
                table.append((Reading(heads, shift), alignment_scores(links, references)))
        return sorted(table, key=lambda row: 1.0 if row[1].aer is None else row[1].aer)

    def _steps(
        self,
        sources: Sequence[np.ndarray],
        targets: Sequence[np.ndarray],
        chosen: tuple[Heads, ...],
    ) -> list[np.ndarray]:
        """Returns `CrossAttention`'s positions; those of a pair with an empty side are NONE."""
        filled = [i for i in range(len(sources)) if len(sources[i]) and len(targets[i])]
        found = self._attention(
            self.run.params, [sources[i] for i in filled], [targets[i] for i in filled], chosen
        )
        by_number = dict(zip(filled, found, strict=True))
        empty = [np.full((len(chosen), len(target) + 1), NONE) for target in targets]
        return [by_number.get(i, none) for i, none in enumerate(empty)]

    def _of_tokens(self, position_T: np.ndarray, ids: np.ndarray, shift: str) -> np.ndarray:
        """Returns the source token of each target token from that of each step, see `of_tokens`."""
        later = shift == "input" and self.run.config.model.decoder == "causal"
        found = of_tokens(position_T, len(ids), int(later))
        return np.where(self._spaces["target"][ids], NONE, found)

    def _encode(
        self, sources: Sequence[str], targets: Sequence[str]
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        return (
            self.run.encode(sources, name="source", advice="split it"),
            self.run.encode(targets, name="target", advice="split it", side="target"),
        )

    def _words(self, texts: Sequence[str], side: str) -> list[np.ndarray]:
        """Returns the number of the word of each token of each text."""
        tokenizer = self.run.tokenizer
        return [word_of(spans(tokenizer, text, side), words(text)) for text in texts]


def is_space(tokenizer: AnyTokenizer, side: str) -> np.ndarray:
    """Returns for each id whether its token is only white space, bool (V,)."""
    ids = range(len(tokenizer.vocabulary_of(side)))
    return np.array([not piece.strip() for piece in tokenizer.pieces(ids, side=side)])


def of_tokens(position_T: np.ndarray, count: int, offset: int) -> np.ndarray:
    """Returns the position of the source token of each of `count` target tokens, int64.

    Args:
      position_T: the source token of each decoder step.
      offset: token t is aligned at step t + `offset`; without such a step it has NONE.
    """
    found = position_T[offset : offset + count].astype(np.int64)
    return np.pad(found, (0, count - len(found)), constant_values=NONE)


def word_links(token_T: np.ndarray, source_word_S: np.ndarray, target_word_T: np.ndarray) -> Links:
    """Returns the links of words whose tokens are linked.

    Args:
      token_T: the position of the source token of each target token, or NONE.
      source_word_S, target_word_T: the number of the word of each token, or -1.
    """
    linked_T = token_T != NONE
    pairs = zip(source_word_S[token_T[linked_T]], target_word_T[linked_T], strict=True)
    return frozenset((int(i), int(j)) for i, j in pairs if i >= 0 and j >= 0)


def _texts(pairs: Sequence[Pair]) -> tuple[list[str], list[str]]:
    """Returns sources and targets, and '' for a blank text; raises InputError for no pairs."""
    for number, pair in enumerate(pairs, start=1):
        if isinstance(pair, str) or len(pair) != 2:
            raise InputError(f"pair {number}: expected (source, target), got {pair!r:.60}.")
    sides = (given.texts([pair[i] for pair in pairs], name="pairs", item="pair") for i in (0, 1))
    sources, targets = (["" if text.isspace() else text for text in side] for side in sides)
    return sources, targets


def load(
    workdir: str | Path,
    *,
    layer: int | None = None,
    head: int | None = None,
    shift: str | None = None,
    **model: Unpack[trained.LoadOptions],
) -> Aligner:
    """Returns the aligner of the best model of a run.

    Args:
      layer, head, shift: see `reading_of`.
      model: see `trained.load`.

    Raises:
      InputError: as `trained.load`, `Aligner` and `reading_of`.
    """
    run = trained.load(workdir, command="align", architecture="encoder_decoder", **model)
    return Aligner(run, reading_of(run.config, layer=layer, head=head, shift=shift))
