"""Scores given texts with a trained model: the log-probability of a target given its source.

from flaxformer_lite import rescore
rescorer = rescore.load("runs/mine")
print(rescorer([("Monday, May 5, 2025", "Montag, 5. Mai 2025")]))

With a language model, a text has no source: `rescorer(["Monday, May 5, 2025"])`.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np

from flaxformer_lite import config as config_lib
from flaxformer_lite import trained
from flaxformer_lite.checks.rescore_checks import (
    check_directions,
    check_model,
    check_penalty,
    check_translates,
    checked_stride,
)
from flaxformer_lite.data.sources import whole_texts
from flaxformer_lite.data.tokens.any_tokenizer import cut_at_end
from flaxformer_lite.data.tokens.offsets import Span
from flaxformer_lite.data.tokens.spans import spans, spans_of_piece
from flaxformer_lite.data.tokens.store import encode_pieces
from flaxformer_lite.decoding import beam
from flaxformer_lite.decoding.decoder import EMPTY
from flaxformer_lite.fields import EOS
from flaxformer_lite.lines.score_lines import WordScore, word_scores
from flaxformer_lite.system import given
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training.token_scores import TokenScorer, TokenScores

Pair = tuple[str, str]  # a source, '' for a language model, and a target
ADVICE = "shorten it, or leave such lines without a score by --long=skip"


class Scored(NamedTuple):
    """The scores of a pair."""

    forward: float  # of the target given the source
    tokens: TokenScores  # of the target
    backward: float | None  # of the source given the target; None without a model for it

    @property
    def score(self) -> float:
        """The sum of both directions."""
        return self.forward if self.backward is None else self.forward + self.backward


class Rescorer:
    """Scores pairs of a source and a target, or the texts of a language model, in order.

    A score is the natural log-probability of the tokens, the end symbol included, divided by the
    length penalty. With `reverse`, it is the sum of the scores of both directions.

    Attributes:
      run: the model.
      has_source: whether it scores pairs.
      reverse: the model of the other direction, or None.
      has_end: whether the end symbol counts; in windows of whole files it is between files only.
    """

    def __init__(
        self,
        run: trained.Trained,
        *,
        alpha: float = 0.0,
        penalty: str | None = None,
        stride: int | None = None,
        tokens_per_batch: int | None = None,
        reverse: "Rescorer | None" = None,
    ):
        """See `load` for the arguments."""
        check_model(run.config.model, where=str(run.folder))
        decode, data = run.config.decode, run.config.data
        self.run, self.reverse = run, reverse
        self.has_source = run.config.model.architecture == "encoder_decoder"
        self._alpha, self._penalty = alpha, penalty or decode.penalty
        check_penalty(penalty, alpha)
        beam.check_alpha(alpha, self._penalty, run.config.model.max_length)
        self.windows = data.windows
        self._stride = checked_stride(stride, data.windows)
        self.has_end = not (data.whole_files and data.windows is not None)
        self._pieces = run.tokenizer.vocabulary_of("target")
        tokens = tokens_per_batch or data.tokens_per_batch
        self._scorer = TokenScorer(run.model, run.mesh, tokens_per_batch=tokens)
        if reverse is not None:
            _check_reverse(run, reverse.run)

    def __call__(self, texts: Iterable[Pair] | Iterable[str]) -> list[float]:
        """Returns the score of each pair, or of each text of a language model.

        The only translation of a blank source is the empty one: its score is 0, that of any other
        target is -inf.

        Raises:
          InputError: a text has more tokens than the model takes.
        """
        return [each.score for each in self.scored(self.checked(texts))]

    def tokens(self, texts: Iterable[Pair] | Iterable[str]) -> list[TokenScores]:
        """Returns the tokens of each target, or text, with their log-probabilities; see above."""
        return self._tokens(self.checked(texts))

    def words(self, texts: Iterable[Pair] | Iterable[str]) -> list[list[WordScore]]:
        """Returns the words of each target, or text, with their surprisal.

        A token belongs to the first word that it overlaps; one between 2 words to the second. The
        end symbol belongs to no word.
        """
        pairs = self.checked(texts)
        found = zip(pairs, self._tokens(pairs), strict=True)
        return [self.words_of(target, tokens) for (_, target), tokens in found]

    def words_of(self, text: str, tokens: TokenScores) -> list[WordScore]:
        """Returns the words of a text from the scores of its tokens."""
        of_tokens = spans(self.run.tokenizer, text, "target")
        return word_scores(text, of_tokens, tokens.log_probs[: len(of_tokens)])

    def scored(
        self, pairs: Sequence[Pair], *, name: str = "text", numbers: Sequence[int] | None = None
    ) -> list[Scored]:
        """Returns the scores of both directions and the tokens of each pair.

        Args:
          name, numbers: as in `Trained.encode`.

        Raises:
          InputError: a text has more tokens than the model takes.
        """
        tokens = self._tokens(pairs, name=name, numbers=numbers)
        forward = [self.score(each) for each in tokens]
        backward: list[float | None] = [None] * len(pairs)
        if self.reverse is not None:
            swapped = [(target, source) for source, target in pairs]
            of_reverse = self.reverse.scored(swapped, name=name, numbers=numbers)
            backward = [each.forward for each in of_reverse]
        return list(map(Scored, forward, tokens, backward))

    def of_ids(
        self,
        sources: Sequence[np.ndarray] | None,
        targets: Sequence[np.ndarray],
        *,
        ended: bool | Sequence[bool] = True,
    ) -> list[TokenScores]:
        """Returns the tokens of each target, with their log-probabilities.

        Args:
          sources: ids of each source; None for a language model.
          targets: ids; what follows a first end symbol is ignored.
          ended: whether the end symbol follows each target and counts. An output that was cut at
            the limit of its length has none.

        Raises:
          InputError: the numbers of sources and targets differ; or a text has more tokens than the
            model takes.
        """
        targets = [cut_at_end(np.asarray(ids, np.int32)) for ids in targets]
        flags = [ended] * len(targets) if isinstance(ended, bool) else list(ended)
        if len(flags) != len(targets):
            raise InputError(
                f"ended: expected one a target, {len(targets)}, got {len(flags)}; or pass one bool."
            )
        labels = [
            np.append(ids, np.int32(EOS)) if is_ended else ids
            for ids, is_ended in zip(targets, flags, strict=True)
        ]
        if self.has_source:
            if sources is None or len(sources) != len(targets):
                got = "None" if sources is None else len(sources)
                raise InputError(f"sources: expected one a target, {len(targets)}, got {got}.")
            sources = [cut_at_end(np.asarray(ids, np.int32)) for ids in sources]
            found = self._of_pairs(sources, targets, labels)
        elif sources is not None:
            raise InputError("sources: a language model has none; pass None.")
        else:
            found = self._of_texts(labels)
        return [TokenScores.of(*each, self._pieces) for each in found]

    def score(self, tokens: TokenScores) -> float:
        """Returns the log-probability of a text divided by its length penalty."""
        count = len(tokens.log_probs)
        if not count or not self._alpha:
            return tokens.log_prob
        penalty = beam.length_penalty(float(count), alpha=self._alpha, kind=self._penalty)
        return tokens.log_prob / penalty

    def fits(self, pair: Pair) -> bool:
        """Whether the model, and that of the other direction, takes all tokens of a pair."""
        source, target = _without_blank(pair)
        if self.windows is not None:
            return True
        is_short = (not self.has_source or self.run.fits(source)) and (
            len(self.run.tokenizer.encode([target], side="target")[0]) <= self.run.longest
        )
        return is_short and (self.reverse is None or self.reverse.fits((target, source)))

    def checked(self, texts: Iterable[Pair] | Iterable[str]) -> list[Pair]:
        """Returns the texts as pairs; raises InputError if one is no pair, or no text."""
        if not self.has_source:
            return [("", text) for text in given.texts(texts)]
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise InputError(
                f"pairs: expected a list of pairs (source, target), got {type(texts).__name__}."
            )
        pairs = list(texts)
        for number, pair in enumerate(pairs, start=1):
            if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
                raise InputError(f"pair {number}: expected (source, target), got {pair!r:.60}.")
        sources = given.texts((pair[0] for pair in pairs), item="source")
        targets = given.texts((pair[1] for pair in pairs), item="target")
        return list(zip(sources, targets, strict=True))

    def asked(self) -> dict[str, object]:
        """Returns the settings that determine the scores."""
        own: dict[str, object] = {
            "model": self.run.asked()["model"],
            "--alpha": self._alpha,
            "--penalty": self._penalty,
            "--stride": self._stride,
        }
        return own if self.reverse is None else own | {"--reverse": self.reverse.asked()["model"]}

    def _tokens(self, pairs: Sequence[Pair], **called: Any) -> list[TokenScores]:
        """Returns the tokens of each target; arguments as of `scored`."""
        called["advice"] = "shorten it" if called.get("name", "text") == "text" else ADVICE
        sources, targets = (
            [_without_blank(pair)[0] for pair in pairs], [target for _, target in pairs]
        )  # fmt: skip
        if self.windows is not None:
            ids = self.run.tokenizer.encode(targets, side="target")
            return self.of_ids(None, ids, ended=self.has_end)
        source_ids = self.run.encode(sources, **called) if self.has_source else None
        return self.of_ids(source_ids, self.run.encode(targets, side="target", **called))

    def _of_pairs(
        self,
        sources: Sequence[np.ndarray],
        targets: Sequence[np.ndarray],
        labels: Sequence[np.ndarray],
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the counted ids of each pair and their log-probabilities."""
        self._check_lengths("source", [len(ids) + 1 for ids in sources])
        self._check_lengths("target", [len(ids) for ids in labels])
        given_ids = [
            ids if len(source) else EMPTY for source, ids in zip(sources, labels, strict=True)
        ]
        log_probs = self._scorer(self.run.params, given_ids, sources=sources)
        found = []
        for source, target, ids, scores in zip(sources, targets, labels, log_probs, strict=True):
            if len(source):
                found.append((ids, scores))
            elif len(target):  # a blank source has another translation
                found.append((ids, np.full(len(ids), -np.inf)))
            else:
                found.append((EMPTY, np.zeros(0)))
        return found

    def _of_texts(self, labels: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the counted ids of each text of a language model, and their log-probabilities."""
        if self.windows is None:
            self._check_lengths("text", [len(ids) for ids in labels])
            log_probs = self._scorer(self.run.params, labels)
        else:
            assert self._stride is not None, "it is set with windows"
            log_probs = self._scorer.in_windows(
                self.run.params, labels, windows=self.windows, stride=self._stride
            )
        return list(zip(labels, log_probs, strict=True))

    def _check_lengths(self, name: str, lengths: Sequence[int]) -> None:
        most = self.run.config.model.max_length
        for number, length in enumerate(lengths, start=1):
            if length > most:
                raise InputError(
                    f"{name} {number}: {length} tokens with its end symbol, and the model takes at "
                    f"most {most}; shorten it."
                )


def _without_blank(pair: Pair) -> Pair:
    """Returns a pair whose source is empty if it is blank, as in translation."""
    source, target = pair
    return ("" if source.isspace() else source), target


def whole_file(rescorer: Rescorer, path: str) -> tuple[str, TokenScores, list[Span]]:
    """Returns the text of a file as a model of whole files reads it, its tokens and their spans.

    The tokens are those of `evaluate` for this file.
    """
    tokenizer, start = rescorer.run.tokenizer, 0
    parts, of_tokens = list(whole_texts.pieces(path)), list[Span]()
    starts = [number == 0 for number in range(len(parts))]
    ids = np.concatenate(encode_pieces(tokenizer, parts, starts, side="target"))
    for piece, is_start in zip(parts, starts, strict=True):
        found = spans_of_piece(tokenizer, piece, is_start=is_start)
        of_tokens += [(start + first, start + stop) for first, stop in found]
        start += len(piece)
    (tokens,) = rescorer.of_ids(None, [ids], ended=rescorer.has_end)
    return "".join(parts), tokens, of_tokens


def _check_reverse(run: trained.Trained, reverse: trained.Trained) -> None:
    """Raises InputError if `reverse` is no model of the other direction."""
    for each in (run, reverse):
        check_translates(each.config.model, where=str(each.folder))
    languages = [
        (config_lib.source_language(each.config), config_lib.target_language(each.config))
        for each in (run, reverse)
    ]
    check_directions(*languages, where=str(reverse.folder))


def load(
    workdir: str | Path,
    *,
    reverse: str | Path | None = None,
    alpha: float = 0.0,
    penalty: str | None = None,
    stride: int | None = None,
    tokens_per_batch: int | None = None,
    **options: Unpack[trained.LoadOptions],
) -> Rescorer:
    """Returns the best model of a run as a scorer of texts; the newest if none is evaluated yet.

    Args:
      reverse: a run that translates in the other direction.
      alpha, penalty: the exponent and the kind of the length penalty, as in beam search; 0: none.
        The default of `penalty` is that of the run.
      stride: for a language model with `data.windows`, the tokens that each window of a longer text
        adds; the others are context. None: whole windows, as in evaluation.
      tokens_per_batch: target positions scored at once; None: `data.tokens_per_batch`, as in
        evaluation.
      options: `average`, `parameters`, `ensemble` and `tensor`, as in `trained.load`. All but
        `ensemble` apply to `reverse` too.

    Raises:
      InputError: there is no such run, or its model assigns no probability to texts; the runs do
        not translate in opposite directions; or an argument has another value.
    """
    common: dict[str, Any] = {"alpha": alpha, "penalty": penalty}
    if tokens_per_batch is not None:
        common["tokens_per_batch"] = given.whole_number(tokens_per_batch, name="tokens_per_batch")
    run = trained.load(workdir, command="rescore", **options)
    check_model(run.config.model, where=str(run.folder))
    backward = None
    if reverse is not None:
        of_reverse: Any = {name: value for name, value in options.items() if name != "ensemble"}
        other = trained.load(given.folder(reverse, name="reverse"), command="rescore", **of_reverse)
        _check_reverse(run, other)
        backward = Rescorer(other, **common)
    return Rescorer(run, stride=stride, reverse=backward, **common)
