"""Extends a tokenizer by pieces of new text; its own pieces keep their ids and scores.

New characters come first. Then Algorithm 1 of Sennrich 2016 goes on from the tokenizer's
segmentation of the new text: the most frequent pair of neighbours becomes a new piece. So every
new piece is a sequence of old pieces, and old text is segmented as before, except that such a
sequence becomes one piece:

    bpe      The scores are ranks of merges. New ones are the lowest, so all old merges come first.
    unigram  The score is the sum of the scores of its two parts, plus GAIN. So the new piece is
             better than its parts by so little that no other boundary moves.
"""

import collections
import heapq
import itertools
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from flaxformer_lite.data.tokens import sentencepiece_tokenizer as tokenizer
from flaxformer_lite.data.tokens.sentencepiece_tokenizer import SPACE_MARK, Tokenizer, escape
from flaxformer_lite.system.errors import InputError

# Log probability. Rounding of float32 is 3e-5 in a text of 100 pieces, whose score is about -1000.
GAIN = 1e-3
LONGEST = 16  # characters of a piece, as in SentencePiece
Pair = tuple[str, str]


def extended(
    content: bytes,
    texts: Iterable[str],
    *,
    vocab_size: int,
    vocab_limit: str = "hard",
    character_coverage: float | None = None,
) -> bytes:
    """Returns the model file of a tokenizer with new pieces for `texts`, after its own pieces.

    Args:
      content: the model file of the old tokenizer.
      vocab_size: number of pieces of the result.
      vocab_limit: 'soft': texts with fewer new pieces get all that they have.
      character_coverage: share of the characters of `texts` that become pieces; None: 0.9995.

    Raises:
      InputError: `vocab_size` is not more than that of the old tokenizer; or the texts have fewer
        pieces, under the 'hard' limit.
    """
    old = tokenizer.open_model(content)
    free = vocab_size - old.vocab_size()
    if free <= 0:
        raise InputError(
            f"config.data.vocab_size: the tokenizer to extend has {old.vocab_size():,} pieces, got "
            f"{vocab_size:,}; raise it, or set init.vocabulary='same'."
        )
    texts = [escape(text) for text in texts]
    scores = [
        old.get_score(i)
        for i in range(old.vocab_size())
        if not (old.is_control(i) or old.is_byte(i))
    ]
    lowest, is_bpe = min(scores), tokenizer.kind_of(content) == "bpe"
    known = {old.id_to_piece(i) for i in range(old.vocab_size())}
    new = _characters(texts, known, 0.9995 if character_coverage is None else character_coverage)
    pieces = [(each, lowest - number - 1 if is_bpe else lowest) for number, each in enumerate(new)]
    pieces = pieces[:free]
    content = tokenizer.with_pieces(content, pieces)
    words = _words(content, texts)
    known |= set(new)
    score = {old.id_to_piece(i): old.get_score(i) for i in range(old.vocab_size())} | dict(pieces)
    for number, (left, right) in enumerate(merges(words, known, free - len(pieces))):
        # Float32, as a model stores it: the sums of longer pieces start from these.
        of_unigram = float(np.float32(score[left] + score[right] + GAIN))
        score[left + right] = lowest - len(new) - number - 1 if is_bpe else of_unigram
        pieces.append((left + right, score[left + right]))
    if len(pieces) < free and vocab_limit == "hard":
        raise InputError(
            f"config.data.vocab_size: this text adds at most {len(pieces):,} pieces to the "
            f"{old.vocab_size():,} of the tokenizer, got {vocab_size:,}; lower it, or set "
            "data.vocab_limit='soft', which takes all of them."
        )
    return tokenizer.with_pieces(content, pieces[len(new[:free]) :])


def _characters(texts: Sequence[str], known: set[str], coverage: float) -> list[str]:
    """Returns the characters of `texts` that are no pieces yet, the most frequent first.

    The rarest characters, a share of 1 - `coverage` of the text, are left out.
    """
    counts = collections.Counter("".join(texts).replace(" ", SPACE_MARK))
    found, covered, total = [], 0, counts.total()
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if covered >= coverage * total:
            break
        covered += count
        if character not in known:
            found.append(character)
    return found


def _words(content: bytes, texts: Sequence[str]) -> dict[tuple[str, ...], int]:
    """Returns how often each sequence of pieces that may be merged occurs in `texts`.

    A sequence ends before a space, and before and after anything but letters.
    """
    model = tokenizer.open_model(content)
    pieces = [model.id_to_piece(i) for i in range(model.vocab_size())]
    is_part = [_is_of_letters(piece) and not model.is_byte(i) for i, piece in enumerate(pieces)]
    words: collections.Counter[tuple[str, ...]] = collections.Counter()
    for row in model.encode(list(texts)):
        word: list[str] = []
        for each in row:
            if not is_part[each] or pieces[each].startswith(SPACE_MARK):
                words[tuple(word)] += 1
                word = []
            if is_part[each]:
                word.append(pieces[each])
        words[tuple(word)] += 1
    return {word: count for word, count in words.items() if len(word) > 1}


def _is_of_letters(piece: str) -> bool:
    """Whether a piece has only letters and their marks, after at most one space."""
    return all(unicodedata.category(each)[0] in "LM" for each in piece.removeprefix(SPACE_MARK))


def merges(words: Mapping[tuple[str, ...], int], known: set[str], most: int) -> list[Pair]:
    """Returns at most `most` pairs to merge, one after another: Sennrich 2016, Algorithm 1.

    A pair that occurs once is not merged. Of equally frequent pairs the first in order is.

    Args:
      words: sequences of pieces, and how often each occurs.
      known: pieces that exist already; no pair becomes one of them.
    """
    rows, counts = [list(word) for word in words], list(words.values())
    total: collections.Counter[Pair] = collections.Counter()
    places: dict[Pair, set[int]] = collections.defaultdict(set)
    for number, row in enumerate(rows):
        for pair in itertools.pairwise(row):
            total[pair] += counts[number]
            places[pair].add(number)
    queue = [(-count, pair) for pair, count in total.items()]
    heapq.heapify(queue)
    found: list[Pair] = []
    known = set(known)
    while queue and len(found) < most:
        count, pair = heapq.heappop(queue)
        if -count != total[pair]:  # it has changed; its new count is in the queue too
            continue
        if -count < 2:
            break
        if "".join(pair) in known or len("".join(pair)) > LONGEST:
            continue
        found.append(pair)
        known.add("".join(pair))
        changed: set[Pair] = set()
        for number in places.pop(pair):
            changed |= _merge(rows, number, pair, counts[number], total, places)
        for each in changed - {pair}:
            heapq.heappush(queue, (-total[each], each))
        del total[pair]
    return found


def _merge(
    rows: list[list[str]],
    number: int,
    pair: Pair,
    count: int,
    total: collections.Counter[Pair],
    places: dict[Pair, set[int]],
) -> set[Pair]:
    """Merges `pair` everywhere in a row; returns the pairs whose total count has changed."""
    row, merged = rows[number], list[str]()
    for piece in row:
        merged.append(piece)
        if tuple(merged[-2:]) == pair:
            merged[-2:] = ["".join(pair)]
    before, after = (collections.Counter(itertools.pairwise(each)) for each in (row, merged))
    for each in before.keys() | after.keys():
        total[each] += (after[each] - before[each]) * count
        if after[each]:
            places[each].add(number)
    rows[number] = merged
    return {each for each in before.keys() | after.keys() if before[each] != after[each]}


def spellings(old: Tokenizer, new: Tokenizer) -> list[np.ndarray]:
    """Returns, for each piece that `new` has after those of `old`, the ids of `old` that spell it.

    Raises:
      InputError: `new` does not start with the pieces of `old`.
    """
    pieces, kept = new.vocabulary_of("source"), old.vocab_size
    if pieces[:kept] != old.vocabulary_of("source"):
        raise InputError(
            "the tokenizer does not start with the pieces of init.run; put the run's own back, or "
            "use a new --workdir."
        )
    model = tokenizer.open_without_prefix(old.content)
    return [np.asarray(model.encode(piece), np.int64) for piece in pieces[kept:]]
