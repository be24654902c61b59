"""One of the ways to cut a text into pieces, drawn: BPE-dropout and the unigram model's sampling, in numpy only.

SentencePiece draws too, but from a generator that no seed makes start alike in two processes. Here a draw is a function
of the text and its key. All texts of a batch are cut at once: no piece crosses a space, so that words are independent,
and each operation on arrays does the next thing in every word.

A symbol is the id of a piece, or `unknown + code point` for a character that is no piece, which is written in bytes.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from flaxformer_lite.data.tokens.ragged import Ragged, ranges

SPACE = "\u2581"  # what SentencePiece writes a space as
UNKNOWN_PENALTY = 10.0  # below the worst piece, as in SentencePiece
CODE_POINTS = 0x110000


class Segmenter:
    """Cuts texts by the pieces of a SentencePiece model that has a piece for each byte."""

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
        self._words = not any(SPACE in piece[1:] for piece in pieces)  # else a text is one word
        ids = {piece: id for piece, (id, _) in pieces.items()}
        if kind == "bpe":
            self._pairs = _Pairs(self._merges(ids))
            self._rank = np.argsort(np.argsort(-self._score, kind="stable"))
        else:
            self._pairs, self._node, self._piece = self._trie(ids)
            self._longest = max(map(len, pieces))

    def __call__(self, texts: Sequence[str], keys: np.ndarray, strength: float) -> Ragged:
        """The ids of each text; `keys`: uint64, one a text; `strength` as in `bpe` and `unigram`."""
        marked = [SPACE + text.replace(" ", SPACE) if text else "" for text in texts]
        size_N = np.array([len(text) for text in marked], np.int64)
        code_M = np.frombuffer("".join(marked).encode("utf-32-le"), np.uint32).astype(np.int64)
        begins_M = np.zeros(len(code_M) + 1, bool)
        begins_M[np.cumsum(size_N) - size_N] = True
        begins_M = begins_M[:-1] | ((code_M == ord(SPACE)) & self._words)
        key_M = np.repeat(keys, size_N) + ranges(np.zeros_like(size_N), size_N).astype(np.uint64)
        cut = self.bpe if self._kind == "bpe" else self.unigram
        symbol_M = cut(self._symbol[code_M], np.cumsum(begins_M) - 1, key_M, strength)
        kept_M = symbol_M >= 0
        text_K = np.repeat(np.arange(len(texts)), size_N)[kept_M]
        return self._written(symbol_M[kept_M], text_K, len(texts))

    def bpe(self, symbol_M: np.ndarray, word_M: np.ndarray, key_M: np.ndarray, dropout: float) -> np.ndarray:
        """Algorithm 1 of Provilkov 2020: in each word the best merge that is not left out, again and again.

        Args:
          symbol_M: of each character.
          word_M: the number of its word, never falling.
          dropout: the probability that a merge is left out, drawn anew each time.

        Returns:
          The symbol of each piece at its first character, and -1 at the others.
        """
        result_M = np.full(len(symbol_M), -1, np.int64)
        at, turn = np.arange(len(symbol_M)), 0
        while len(at):
            symbol, word = symbol_M[at], word_M[at]
            merged = self._pairs.find(symbol[:-1], symbol[1:])
            possible = (merged >= 0) & (word[:-1] == word[1:])
            if dropout:
                possible &= uniform(key_M[at[:-1]], turn) >= dropout
            left = np.flatnonzero(possible)
            order = left[np.lexsort((self._rank[merged[left]], word[left]))]  # stable: the first of equals comes first
            best = order[np.flatnonzero(np.diff(word[order], prepend=-1))]
            going_on = np.zeros(word[-1] + 1, bool)
            going_on[word[best]] = True
            done = ~going_on[word]
            result_M[at[done]] = symbol[done]
            symbol_M[at[best]] = merged[best]
            done[best + 1] = True  # it is part of what stands before it now
            at, turn = at[~done], turn + 1
        return result_M

    def unigram(self, symbol_M: np.ndarray, word_M: np.ndarray, key_M: np.ndarray, alpha: float) -> np.ndarray:
        """A segmentation drawn with its likelihood to the power `alpha`, among all: Kudo 2018, section 3.

        Forward, the log of the summed weights of all ways to cut the characters before each place; backward from the
        end of each word, one piece after another by its share of that. Arguments and result are those of `bpe`.
        """
        size_W = np.bincount(word_M)
        first_W = np.cumsum(size_W) - size_W
        place_M = np.arange(len(symbol_M)) - first_W[word_M]
        piece_ML = self._pieces_from(symbol_M, size_W[word_M] - place_M)
        weight_ML = np.where(piece_ML >= 0, alpha * self._score_of(piece_ML), -np.inf)
        # Place p of a word, 0 to its size, has its sum at index first + word + p: one more place than characters.
        origin_W = first_W + np.arange(len(size_W))
        total = np.full(len(symbol_M) + len(size_W), -np.inf)
        total[origin_W] = 0.0
        longer = np.argsort(-size_W, kind="stable")
        for place in range(1, int(size_W.max(initial=0)) + 1):
            longer = longer[: np.searchsorted(-size_W[longer], -place, side="right")]
            ways = self._ways(total, weight_ML, origin_W[longer] + place, first_W[longer] + place, place)
            total[origin_W[longer] + place] = np.logaddexp.reduce(ways, axis=1)
        result_M, word, place_W = np.full(len(symbol_M), -1, np.int64), np.arange(len(size_W)), size_W.copy()
        while len(word):
            place = place_W[word]
            at = first_W[word] + place
            ways = self._ways(total, weight_ML, origin_W[word] + place, at, int(place.max()), place)
            share = np.exp(ways - total[origin_W[word] + place][:, None])
            drawn = uniform(key_M[at - 1], 0) * share.sum(axis=1)
            length = 1 + np.minimum((np.cumsum(share, axis=1) <= drawn[:, None]).sum(axis=1), share.shape[1] - 1)
            result_M[at - length] = piece_ML[at - length, length - 1]
            place_W[word] = place - length
            word = word[place_W[word] > 0]
        return result_M

    def _ways(self, total, weight_ML, index, at, widest: int, place=None) -> np.ndarray:
        """Log weights of all ways up to a place whose last piece is 1, 2, ... characters long: a row for each place."""
        lengths = np.arange(1, min(self._longest, widest) + 1)
        before = np.maximum(at[:, None] - lengths, 0)
        ways = total[np.maximum(index[:, None] - lengths, 0)] + weight_ML[before, lengths - 1]
        return ways if place is None else np.where(lengths <= place[:, None], ways, -np.inf)

    def _pieces_from(self, symbol_M: np.ndarray, left_M: np.ndarray) -> np.ndarray:
        """The piece of the next 1, 2, ... characters of its word from each character, or -1: (M, longest)."""
        piece_ML = np.full((len(symbol_M), self._longest), -1, np.int64)
        piece_ML[:, 0] = symbol_M
        at, node = np.arange(len(symbol_M)), self._node[np.minimum(symbol_M, self._unknown)]
        for length in range(2, self._longest + 1):
            going_on = (node >= 0) & (left_M[at] >= length)
            at, node = at[going_on], node[going_on]
            node = self._pairs.find(node, symbol_M[at + length - 1])
            piece_ML[at, length - 1] = np.where(node >= 0, self._piece[node], -1)
        return piece_ML

    def _score_of(self, symbol: np.ndarray) -> np.ndarray:
        worst = self._score[np.isfinite(self._score)].min() - UNKNOWN_PENALTY
        return np.where(symbol < self._unknown, self._score[np.minimum(symbol, self._unknown - 1)], worst)

    def _merges(self, ids: Mapping[str, int]) -> dict[tuple[int, int], int]:
        """Two symbols to the piece that they are together, for each piece and each place to cut it in two."""
        found = {}
        for piece, id in ids.items():
            for cut in range(1, len(piece)):
                left, right = (self._symbol_of(part, ids) for part in (piece[:cut], piece[cut:]))
                if left is not None and right is not None:
                    found[left, right] = id
        return found

    def _trie(self, ids: Mapping[str, int]) -> tuple["_Pairs", np.ndarray, np.ndarray]:
        """A node and the symbol of the next character to the next node; each first symbol's node; each node's piece."""
        nodes = {}
        for piece in ids:
            for end in range(1, len(piece) + 1):
                nodes.setdefault(piece[:end], len(nodes))
        steps = {
            (nodes[text[:-1]], self._symbol_of(text[-1], ids)): node for text, node in nodes.items() if len(text) > 1
        }
        first = np.full(self._unknown + 1, -1)
        for text, node in nodes.items():
            if len(text) == 1 and text in ids:  # a longer piece cannot begin with a character that is none
                first[ids[text]] = node
        return _Pairs(steps), first, np.array([ids.get(text, -1) for text in nodes])

    def _symbol_of(self, part: str, ids: Mapping[str, int]) -> int | None:
        return ids.get(part, self._unknown + ord(part) if len(part) == 1 else None)

    def _written(self, symbol_K: np.ndarray, text_K: np.ndarray, texts: int) -> Ragged:
        """Symbols as ids: what is no piece becomes the bytes of its character."""
        unknown = symbol_K >= self._unknown
        codes, which = np.unique(symbol_K[unknown] - self._unknown, return_inverse=True)
        spelt = Ragged.of([self._bytes[list(chr(code).encode())] for code in codes.tolist()])
        size_K = np.ones(len(symbol_K), np.int64)
        size_K[unknown] = spelt.lengths()[which]
        ids = np.repeat(symbol_K, size_K).astype(np.int32)
        ids[np.repeat(unknown, size_K)] = spelt.take(which).values
        size_N = np.bincount(text_K, weights=size_K, minlength=texts).astype(np.int64)
        return Ragged(ids, np.concatenate([[0], np.cumsum(size_N)]))


class _Pairs:
    """Two numbers to a third, for whole arrays: a hash table with linear probing, at most a quarter full."""

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
            self._key[slot[free]] = key[free]  # of several for one slot the last
            placed = self._key[slot] == key
            self._value[slot[placed]] = value[placed]
            key, value, slot = key[~placed], value[~placed], self._next(slot[~placed])

    def find(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """The third number of each two, or -1."""
        key, result = first * self._base + second, np.full(len(first), -1, np.int64)
        slot, asked = self._slot(key), np.arange(len(key))
        while len(asked):
            there = self._key[slot]
            hit = there == key
            result[asked[hit]] = self._value[slot[hit]]
            further = ~hit & (there != -1)
            key, slot, asked = key[further], self._next(slot[further]), asked[further]
        return result

    def _slot(self, key: np.ndarray) -> np.ndarray:
        return ((key.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> self._shift).astype(np.int64)

    def _next(self, slot: np.ndarray) -> np.ndarray:
        return (slot + 1) & (len(self._key) - 1)


def uniform(key: np.ndarray, turn: int) -> np.ndarray:
    """A number from 0 to 1 for each key and turn, any two of them unrelated."""
    return (mixed(key, turn) >> np.uint64(11)) * 2.0**-53


def mixed(key: np.ndarray, *words: int) -> np.ndarray:
    """uint64 keys and numbers to other keys (the generator SplitMix64, Steele 2014)."""
    with np.errstate(over="ignore"):
        for word in words:
            key = key + (np.uint64(word) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
            key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            key = key ^ (key >> np.uint64(31))
    return key
