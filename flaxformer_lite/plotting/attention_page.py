"""The HTML page on which attention maps are explored, and the names of tokens in figures.

Layers, heads and tokens are counted from 0, as in the arrays.
"""

import dataclasses
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_lite.system.errors import InputError

TEMPLATE = Path(__file__).with_name("attention_page.html")


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionMap:
    """The weights of one kind of attention: (layers, heads, queries, keys).

    `aligned`: if not None, which queries are linked to which keys, each to the one with the largest
    weight: bool, (queries,) and (keys,). The others are end symbols and spaces.

    Raises:
      InputError: the weights are not finite, or their shape does not fit the tokens.
    """

    name: str
    query_tokens: Sequence[str]
    key_tokens: Sequence[str]
    weights_NHTS: np.ndarray
    aligned: tuple[np.ndarray, np.ndarray] | None = None

    def __post_init__(self) -> None:
        shape = np.shape(self.weights_NHTS)
        tokens = len(self.query_tokens), len(self.key_tokens)
        fits = len(shape) == 4 and shape[2:] == tokens
        if not fits or not np.isfinite(self.weights_NHTS).all():
            raise InputError(
                f"{self.name}: expected finite weights (layers, heads, {tokens[0]}, {tokens[1]}), "
                f"got {shape}."
            )

    def links(self) -> list[Any] | None:
        """Returns the key of each query, or -1, by layer and head; the mean is the last head.

        None: the queries are not aligned.
        """
        if self.aligned is None or not all(map(np.any, self.aligned)):
            return None
        queries_T, keys_S = self.aligned
        weights_NHTS = np.asarray(self.weights_NHTS, np.float64)
        mean_N1TS = weights_NHTS.mean(axis=1, keepdims=True)
        weights_NHTS = np.where(keys_S, np.concatenate([weights_NHTS, mean_N1TS], axis=1), -1.0)
        found: list[Any] = np.where(queries_T, weights_NHTS.argmax(-1), -1).tolist()
        return found


def visible(token: str) -> str:
    """Returns `token` with a sign for each invisible character: U+202F becomes ⟨202F⟩."""
    signs = {" ": "␣", "\n": "↵", "\t": "⇥"}
    shown = [signs.get(c) or (c if c.isprintable() else f"⟨{ord(c):04X}⟩") for c in token]
    return "".join(shown) or "⟨⟩"


def _thousandths(weights_NHTS: np.ndarray) -> list[Any]:
    return np.rint(np.asarray(weights_NHTS, np.float64) * 1000).astype(int).tolist()


def html_page(maps: Sequence[AttentionMap], *, title: str) -> str:
    """Returns a self-contained HTML page on which one or more maps are explored.

    The fragment of its URL is the selection: `#map=2&layer=1&head=0&token=3`; `head=mean` is the
    mean of all heads.
    """
    data = [
        {
            "name": each.name,
            "queries": [visible(token) for token in each.query_tokens],
            "keys": [visible(token) for token in each.key_tokens],
            "weights": _thousandths(each.weights_NHTS),
            "links": each.links(),
        }
        for each in maps
    ]
    parts = {
        "title": html.escape(title),
        # Without "<", no token can close the element that contains the data.
        "data": json.dumps(data, separators=(",", ":")).replace("<", r"\u003c"),
    }
    return re.sub(
        r"\{\{(title|data)\}\}", lambda found: parts[found[1]], TEMPLATE.read_text(encoding="utf-8")
    )
