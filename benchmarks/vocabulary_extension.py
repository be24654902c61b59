"""Extends the tokenizer of an English-German run by French text, and measures what changes.

Segmentation: the share of test texts that are segmented as before, and the pieces of French texts.
Loss: of the run on the test pairs that are segmented as before, in nats a token, before the first
step: over the old ids only, and over all ids, by the start of the new output vectors.

    python -m benchmarks.vocabulary_extension --run=runs/warm_start/first --data=multi30k/raw
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from benchmarks import figures, warm_start
from flaxformer_lite import trained
from flaxformer_lite.config import Config, with_vocabulary
from flaxformer_lite.data.tokens import extension, tokenizer
from flaxformer_lite.data.tokens.tokenizer import Tokenizer
from flaxformer_lite.fields import BOS, InitConfig
from flaxformer_lite.model import parameters, transformer
from flaxformer_lite.training import parent as parent_lib

ROWS, BIAS = 50, -10.0


def opened(content: bytes, folder: Path, name: str) -> Tokenizer:
    """Returns the tokenizer with these bytes."""
    (folder / name).write_bytes(content)
    return Tokenizer(folder / name)


def unchanged(old: Tokenizer, new: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    """Returns, for each text, whether both tokenizers give it the same ids."""
    pairs = zip(old.encode(texts), new.encode(texts), strict=True)
    return np.array([np.array_equal(first, second) for first, second in pairs])


def segmentation(kind: str, texts: dict[str, list[str]], folder: Path) -> dict[str, float]:
    """Returns the figures of a new tokenizer of English and German, extended by French."""
    content = tokenizer.trained(texts["train en"] + texts["train de"], vocab_size=6000, kind=kind)
    old = opened(content, folder, "old.model")
    french = texts["train en"] + texts["train fr"]
    new = opened(extension.extended(content, french, vocab_size=8000), folder, "new.model")
    fresh = opened(tokenizer.trained(french, vocab_size=8000, kind=kind), folder, "fresh.model")
    found = {
        f"{kind}, {side} as before": 100 * unchanged(old, new, texts[f"test {side}"]).mean()
        for side in ("en", "de")
    }
    for name, each in (("old", old), ("extended", new), ("trained on it", fresh)):
        sizes = [len(ids) for ids in each.encode(texts["test fr"])]
        found[f"{kind}, French pieces, {name}"] = float(np.mean(sizes))
    return found


def log_probabilities(
    config: Config, params: parameters.Params, pairs: list[tuple[np.ndarray, np.ndarray]], kept: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log probability of each label: over the `kept` first ids, and over all ids."""
    apply = jax.jit(transformer.build_model(config.model).apply)
    over_kept, over_all = [], []
    longest = max(len(ids) for pair in pairs for ids in pair) + 1
    for first in range(0, len(pairs), ROWS):
        some = pairs[first : first + ROWS]
        some += [some[-1]] * (ROWS - len(some))
        source_BS, label_BT = (
            tokenizer.pad_rows([pair[side] for pair in some], longest) for side in (0, 1)
        )
        start_B1 = np.full((ROWS, 1), BOS, np.int32)
        target_BT = np.concatenate([start_B1, label_BT[:, :-1]], axis=1)
        is_label = label_BT > 0
        is_label[len(pairs) - first :] = False
        logits_BTV = np.asarray(apply({"params": params}, source_BS, target_BT))
        logits_NV, label_N = logits_BTV[is_label].astype(np.float64), label_BT[is_label]
        label = logits_NV[np.arange(len(label_N)), label_N]
        weights_NV = np.exp(logits_NV - logits_NV.max(axis=1, keepdims=True))
        for found, size in ((over_kept, kept), (over_all, logits_NV.shape[1])):
            total = np.log(weights_NV[:, :size].sum(axis=1)) + logits_NV.max(axis=1)
            found.append(label - total)
    return np.concatenate(over_kept), np.concatenate(over_all)


def losses(run: Path, texts: dict[str, list[str]], folder: Path) -> dict[str, float]:
    """Returns the losses of a run with an extended vocabulary on its own direction."""
    config = dataclasses.replace(trained.load(run).config, init=InitConfig(run=str(run)))
    old_run = parent_lib.read(config)
    old, size = old_run.tokenizer, old_run.tokenizer.vocab_size + 2000
    french = texts["train en"] + texts["train fr"]
    new = opened(extension.extended(old.content, french, vocab_size=size), folder, "of_run.model")
    same = unchanged(old, new, texts["test en"]) & unchanged(old, new, texts["test de"])
    sides = [new.encode([texts[f"test {side}"][i] for i in np.flatnonzero(same)])
             for side in ("en", "de")]  # fmt: skip
    pairs = [pair for pair in zip(*sides, strict=True) if max(map(len, pair)) < 60]
    found = {"pairs as before": 100 * same.mean()}

    def measure(**changes: object) -> tuple[np.ndarray, np.ndarray]:
        model = dataclasses.replace(config.model, vocab_size=None)
        new_config = dataclasses.replace(
            config,
            model=model,
            data=dataclasses.replace(config.data, vocab_size=size),
            init=InitConfig(run=str(run), vocabulary="extend", missing="random"),
        )
        bias = changes.pop("new_bias", 0.0)
        init = dataclasses.replace(new_config.init, new_bias=bias, **changes)
        model = dataclasses.replace(model, output_bias=bias != 0)
        new_config = dataclasses.replace(new_config, init=init, model=model)
        new_config = with_vocabulary(new_config, size)
        built = transformer.build_model(new_config.model)
        fresh = jax.jit(lambda: parameters.initial(built, jax.random.key(0)))()
        again = parent_lib.read(config)
        params, _ = parent_lib.first_parameters(new_config, again, jax.device_get(fresh), new)
        return log_probabilities(new_config, params, pairs, old.vocab_size)

    before = trained.load(run)
    _, reference = log_probabilities(before.config, before.params, pairs, old.vocab_size)
    found["loss before"] = -reference.mean()
    starts = {
        "mean": {"new_embeddings": "mean"},
        "random": {"new_embeddings": "random"},
        "mean, bias": {"new_embeddings": "mean", "new_bias": BIAS},
    }
    for name, changes in starts.items():
        over_old, over_all = measure(**changes)
        found[f"{name}, over old ids, largest difference"] = np.abs(over_old - reference).max()
        found[f"{name}, loss over old ids, difference"] = reference.mean() - over_old.mean()
        found[f"{name}, loss over all ids"] = -over_all.mean()
    return {name: float(value) for name, value in found.items()}


def main() -> None:
    """Prints a line for each figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, help="English-German run; default: of warm_start")
    parser.add_argument("--data", type=Path, default=Path("multi30k/raw"), help="raw files")
    figures.add_flag(parser)
    arguments = parser.parse_args()
    texts = {
        f"{split} {side}": warm_start.read(arguments.data / f"{file}.{side}")
        for split, file in (("train", "train"), ("test", "test_2016_flickr"))
        for side in ("en", "de", "fr")
    }
    folder = figures.OUTPUT / "vocabulary_extension"
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for kind in ("bpe", "unigram"):
        found |= segmentation(kind, texts, folder)
    found |= losses(arguments.run or figures.OUTPUT / "warm_start" / "first", texts, folder)
    figures.write(arguments.json, found)
    for name, value in found.items():
        print(f"{name:50} {value:.8g}")


if __name__ == "__main__":
    main()
