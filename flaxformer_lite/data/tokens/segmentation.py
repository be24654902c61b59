"""Sampled segmentations of texts: BPE-dropout and unigram sampling, in numpy only.

SentencePiece can sample too, but no seed makes its generator repeatable across processes. Here a
sample is a function of the text and its key. All texts of a batch are segmented together: no piece
crosses a space, so words are independent, and each array operation does one step in every word.

A symbol is the id of a piece, or `unknown + code point` for a character without a piece, which is
encoded as bytes.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from flaxformer_lite.data.tokens.ragged import Ragged, mixed, ranges

SPACE = "\u2581"  # SentencePiece's symbol for a space
UNKNOWN_PENALTY = 10.0  # below the worst piece, as in SentencePiece
CODE_POINTS = 0x110000


class Segmenter:
    """Segments texts with the pieces of a SentencePiece model that has a piece for each byte."""

    def __init__(self, kind: str, pieces: Mapping[str, tuple[int, float]], byte_ids: Sequence[int]):
        """
        Args:
          kind: 'bpe' or 'unigram'.
          pieces: the id and the score of each piece of text.
          byte_ids: the ids of the bytes 0 to 255.
        """
        self._bytes, self._kind = np.array(byte_ids), kind
        self._unknown = 1 + max(*(id for id, _ in pieces.values()), *byte_ids)
        self._score = np.full(self._unknown, -np.inf)
        self._score[[id for id, _ in pieces.values()]] = [score for _, score in pieces.values()]
        self._symbol = np.arange(self._unknown, self._unknown + CODE_POINTS)  # of each code point
        for piece, (id, _) in pieces.items():
            if len(piece) == 1:
                self._symbol[ord(piece)] = id
        # If a piece crosses a space, a whole text is one word.
        self._splits_at_spaces = not any(SPACE in piece[1:] for piece in pieces)
        ids = {piece: id for piece, (id, _) in pieces.items()}
        if kind == "bpe":
            self._pairs = _Pairs(self._merges(ids))
            self._rank = np.argsort(np.argsort(-self._score, kind="stable"))
        else:
            self._pairs, self._node, self._piece = self._trie(ids)
            self._longest = max(map(len, pieces))

    def __call__(self, texts: Sequence[str], keys: np.ndarray, strength: float) -> Ragged:
        """Returns the ids of each text.

        Args:
          keys: uint64, one a text.
          strength: `dropout` of `bpe`, or `alpha` of `unigram`.
        """
        marked = [SPACE + text.replace(" ", SPACE) if text else "" for text in texts]
        size_N = np.array([len(text) for text in marked], np.int64)
        code_M = np.frombuffer("".join(marked).encode("utf-32-le"), np.uint32).astype(np.int64)
        starts_M = np.zeros(len(code_M) + 1, bool)
        starts_M[np.cumsum(size_N) - size_N] = True
        starts_M = starts_M[:-1] | ((code_M == ord(SPACE)) & self._splits_at_spaces)
        key_M = np.repeat(keys, size_N) + ranges(np.zeros_like(size_N), size_N).astype(np.uint64)
        segment = self.bpe if self._kind == "bpe" else self.unigram
        symbol_M = segment(self._symbol[code_M], np.cumsum(starts_M) - 1, key_M, strength)
        kept_M = symbol_M >= 0
        text_K = np.repeat(np.arange(len(texts)), size_N)[kept_M]
        return self._ids(symbol_M[kept_M], text_K, len(texts))

    def bpe(
        self, symbol_M: np.ndarray, word_M: np.ndarray, key_M: np.ndarray, dropout: float
    ) -> np.ndarray:
        """Applies Algorithm 1 of Provilkov 2020: in turns, the best non-skipped merge of each word.

        Args:
          symbol_M: the symbol of each character; overwritten.
          word_M: the number of its word, non-decreasing.
          key_M: uint64 keys.
          dropout: the probability to skip a merge, independently in each turn.

        Returns:
          The symbol of each piece at its first character, and -1 at its other characters.
        """
        result_M = np.full(len(symbol_M), -1, np.int64)
        at, turn = np.arange(len(symbol_M)), 0
        while len(at):
            symbol, word = symbol_M[at], word_M[at]
            merged = self._pairs.find(symbol[:-1], symbol[1:])
            possible = (merged >= 0) & (word[:-1] == word[1:])
            if dropout:
                possible &= uniform(key_M[at[:-1]], turn) >= dropout
            pair = np.flatnonzero(possible)
            # lexsort is stable: of equal ranks the first pair wins
            order = pair[np.lexsort((self._rank[merged[pair]], word[pair]))]
            best = order[np.flatnonzero(np.diff(word[order], prepend=-1))]
            is_active = np.zeros(word[-1] + 1, bool)
            is_active[word[best]] = True
            done = ~is_active[word]
            result_M[at[done]] = symbol[done]
            symbol_M[at[best]] = merged[best]
            done[best + 1] = True  # merged into the symbol before it
            at, turn = at[~done], turn + 1
        return result_M

    def unigram(
        self, symbol_M: np.ndarray, word_M: np.ndarray, key_M: np.ndarray, alpha: float
    ) -> np.ndarray:
        """Samples a segmentation by its likelihood to the power `alpha`: Kudo 2018, section 3.

        The forward pass computes, for each position, the log of the summed weights of all
        segmentations of the characters before it. The backward pass samples one piece after
        another from the end of each word, by its share of that sum. Arguments and result are those
        of `bpe`.
        """
        size_W = np.bincount(word_M)
        first_W = np.cumsum(size_W) - size_W
        position_M = np.arange(len(symbol_M)) - first_W[word_M]
        piece_ML = self._pieces_from(symbol_M, size_W[word_M] - position_M)
        weight_ML = np.where(piece_ML >= 0, alpha * self._score_of(piece_ML), -np.inf)
        # A word of n characters has n + 1 positions; position p has its sum at first + word + p.
        origin_W = first_W + np.arange(len(size_W))
        total = np.full(len(symbol_M) + len(size_W), -np.inf)
        total[origin_W] = 0.0
        longer = np.argsort(-size_W, kind="stable")
        for position in range(1, int(size_W.max(initial=0)) + 1):
            longer = longer[: np.searchsorted(-size_W[longer], -position, side="right")]
            index, at = origin_W[longer] + position, first_W[longer] + position
            weights = self._weights_by_last_piece(total, weight_ML, index, at, position)
            total[index] = np.logaddexp.reduce(weights, axis=1)
        result_M = np.full(len(symbol_M), -1, np.int64)
        word, position_W = np.arange(len(size_W)), size_W.copy()
        while len(word):
            ends = position_W[word]
            index, at = origin_W[word] + ends, first_W[word] + ends
            weights = self._weights_by_last_piece(
                total, weight_ML, index, at, int(ends.max()), ends
            )
            share = np.exp(weights - total[index][:, None])
            threshold = uniform(key_M[at - 1], 0) * share.sum(axis=1)
            length = 1 + np.minimum(
                (np.cumsum(share, axis=1) <= threshold[:, None]).sum(axis=1), share.shape[1] - 1
            )
            result_M[at - length] = piece_ML[at - length, length - 1]
            position_W[word] = ends - length
            word = word[position_W[word] > 0]
        return result_M

    def _weights_by_last_piece(
        self,
        total: np.ndarray,
        weight_ML: np.ndarray,
        index: np.ndarray,
        at: np.ndarray,
        widest: int,
        position: np.ndarray | None = None,
    ) -> np.ndarray:
        """Returns log weights (positions, lengths): column i has a last piece of i + 1 characters.

        Args:
          total: log of the summed weights, by index.
          weight_ML: log weight of each piece, by first character and length - 1.
          index: of each position in `total`.
          at: the number of the character at each position.
          widest: the longest last piece to consider.
          position: of each position within its word; None: at least `widest`.
        """
        lengths = np.arange(1, min(self._longest, widest) + 1)
        before = np.maximum(at[:, None] - lengths, 0)
        weights = total[np.maximum(index[:, None] - lengths, 0)] + weight_ML[before, lengths - 1]
        if position is None:
            return weights
        return np.where(lengths <= position[:, None], weights, -np.inf)

    def _pieces_from(self, symbol_M: np.ndarray, left_M: np.ndarray) -> np.ndarray:
        """Returns (M, longest): the piece of the next 1, 2, ... characters of the word, or -1.

        Args:
          left_M: the number of characters from each character to the end of its word.
        """
        piece_ML = np.full((len(symbol_M), self._longest), -1, np.int64)
        piece_ML[:, 0] = symbol_M
        at, node = np.arange(len(symbol_M)), self._node[np.minimum(symbol_M, self._unknown)]
        for length in range(2, self._longest + 1):
            is_active = (node >= 0) & (left_M[at] >= length)
            at, node = at[is_active], node[is_active]
            node = self._pairs.find(node, symbol_M[at + length - 1])
            piece_ML[at, length - 1] = np.where(node >= 0, self._piece[node], -1)
        return piece_ML

    def _score_of(self, symbol: np.ndarray) -> np.ndarray:
        worst = self._score[np.isfinite(self._score)].min() - UNKNOWN_PENALTY
        return np.where(
            symbol < self._unknown, self._score[np.minimum(symbol, self._unknown - 1)], worst
        )

    def _merges(self, ids: Mapping[str, int]) -> dict[tuple[int, int], int]:
        """Returns {(left symbol, right symbol): piece} for each split of each piece in two."""
        found = {}
        for piece, id in ids.items():
            for cut in range(1, len(piece)):
                left, right = (self._symbol_of(part, ids) for part in (piece[:cut], piece[cut:]))
                if left is not None and right is not None:
                    found[left, right] = id
        return found

    def _trie(self, ids: Mapping[str, int]) -> tuple["_Pairs", np.ndarray, np.ndarray]:
        """Returns the prefix tree of all pieces.

        Returns:
          (node, symbol of the next character) -> next node; the node of each first symbol; the
          piece of each node, or -1.
        """
        nodes: dict[str, int] = {}
        for piece in ids:
            for end in range(1, len(piece) + 1):
                nodes.setdefault(piece[:end], len(nodes))
        steps = {
            (nodes[text[:-1]], self._symbol_of_character(text[-1], ids)): node
            for text, node in nodes.items()
            if len(text) > 1
        }
        first = np.full(self._unknown + 1, -1)
        for text, node in nodes.items():
            # The first character of a longer piece must be a piece itself.
            if len(text) == 1 and text in ids:
                first[ids[text]] = node
        return _Pairs(steps), first, np.array([ids.get(text, -1) for text in nodes])

    def _symbol_of(self, part: str, ids: Mapping[str, int]) -> int | None:
        return self._symbol_of_character(part, ids) if len(part) == 1 else ids.get(part)

    def _symbol_of_character(self, character: str, ids: Mapping[str, int]) -> int:
        return ids.get(character, self._unknown + ord(character))

    def _ids(self, symbol_K: np.ndarray, text_K: np.ndarray, texts: int) -> Ragged:
        """Returns the ids of each text; a character without a piece becomes its bytes."""
        unknown = symbol_K >= self._unknown
        codes, which = np.unique(symbol_K[unknown] - self._unknown, return_inverse=True)
        encoded = Ragged.of([self._bytes[list(chr(code).encode())] for code in codes.tolist()])
        size_K = np.ones(len(symbol_K), np.int64)
        size_K[unknown] = encoded.lengths()[which]
        ids = np.repeat(symbol_K, size_K).astype(np.int32)
        ids[np.repeat(unknown, size_K)] = encoded.take(which).values
        size_N = np.bincount(text_K, weights=size_K, minlength=texts).astype(np.int64)
        return Ragged(ids, np.concatenate([[0], np.cumsum(size_N)]))


class _Pairs:
    """A hash table from pairs of numbers to numbers, for whole arrays.

    It uses linear probing and is at most 25 % full.
    """

    def __init__(self, found: Mapping[tuple[int, int], int]):
        pair = np.array(list(found), np.int64).reshape(-1, 2)
        self._base = np.int64(2**32)
        key, value = pair[:, 0] * self._base + pair[:, 1], np.array(list(found.values()), np.int64)
        self._shift = np.uint64(62 - max(1, len(key)).bit_length())
        self._key = np.full(2 ** (64 - int(self._shift)), -1, np.int64)
        self._value = np.full(len(self._key), -1, np.int64)
        slot = self._slot(key)
        while len(key):
            free = self._key[slot] == -1
            self._key[slot[free]] = key[free]  # of several keys for one slot, the last one wins
            placed = self._key[slot] == key
            self._value[slot[placed]] = value[placed]
            key, value, slot = key[~placed], value[~placed], self._next(slot[~placed])

    def find(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Returns the value of each pair, or -1."""
        key, result = first * self._base + second, np.full(len(first), -1, np.int64)
        slot, query = self._slot(key), np.arange(len(key))
        while len(query):
            found = self._key[slot]
            hit = found == key
            result[query[hit]] = self._value[slot[hit]]
            further = ~hit & (found != -1)
            key, slot, query = key[further], self._next(slot[further]), query[further]
        return result

    def _slot(self, key: np.ndarray) -> np.ndarray:
        return ((key.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> self._shift).astype(
            np.int64
        )

    def _next(self, slot: np.ndarray) -> np.ndarray:
        return (slot + 1) & (len(self._key) - 1)


def uniform(key: np.ndarray, turn: int) -> np.ndarray:
    """Returns a pseudo-random number in [0, 1) for each key and turn."""
    return (mixed(key, turn) >> np.uint64(11)) * 2.0**-53
