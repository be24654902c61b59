"""Trains a plain `torch.nn.Transformer` on the words and phones of benchmarks/g2p.py, to compare.

Size, dropout, label smoothing, the tokens of a batch, the number of steps and the choice of the
best evaluation on `dev` are those of the config `benchmarks/g2p`; so is the decoding, greedy. The
model is PyTorch's own, with sinusoidal positions; its optimizer is Adam with a learning rate of
2e-3. Decoding has no cache. Finished runs are not trained again. It requires PyTorch.

    python -m benchmarks.g2p_torch --data=data/g2p --languages kor --seeds 0
"""

import argparse
import copy
import functools
import math
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn

from benchmarks import figures, g2p, groups, public_data
from flaxformer_lite import scoring
from flaxformer_lite.system.errors import InputError

PAD, BOS, EOS, UNK = 0, 1, 2, 3
WIDTH, HEADS, INNER, LAYERS, DROPOUT = 128, 4, 512, 3, 0.3
RATE, WARMUP, TOKENS, EVAL_EVERY, LONGEST = 2e-3, 200, 1024, 200, 64


class Vocabulary:
    """The symbols of one side of the training pairs."""

    def __init__(self, texts: Sequence[Sequence[str]]):
        symbols = sorted({symbol for text in texts for symbol in text})
        self._id_of = {symbol: number for number, symbol in enumerate(symbols, start=4)}
        self._symbols = ["", "", "", "", *symbols]

    def __len__(self) -> int:
        return len(self._symbols)

    def encode(self, text: Sequence[str]) -> list[int]:
        """Returns the ids of a text and the end symbol."""
        return [*(self._id_of.get(symbol, UNK) for symbol in text), EOS]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the symbols before the end symbol, with spaces."""
        ids = list(ids)
        ids = ids[: ids.index(EOS)] if EOS in ids else ids
        return " ".join(self._symbols[i] for i in ids)


class Model(nn.Module):
    """The encoder-decoder of PyTorch with embeddings, sinusoidal positions and a projection."""

    def __init__(self, sources: int, targets: int):
        super().__init__()
        self.transformer = nn.Transformer(
            WIDTH, HEADS, LAYERS, LAYERS, INNER, DROPOUT, batch_first=True, norm_first=True
        )
        self.source = nn.Embedding(sources, WIDTH, padding_idx=PAD)
        self.target = nn.Embedding(targets, WIDTH, padding_idx=PAD)
        for table in (self.source, self.target):
            nn.init.normal_(table.weight, std=WIDTH**-0.5)
        self.dropout = nn.Dropout(DROPOUT)
        angles = torch.arange(LONGEST)[:, None] / 1e4 ** (torch.arange(0, WIDTH, 2) / WIDTH)
        self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], dim=1))

    def embed(self, table: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        """Returns scaled embeddings with positions."""
        positions = self.positions[: ids.shape[1]]  # type: ignore[index]
        return self.dropout(table(ids) * math.sqrt(WIDTH) + positions)

    def encode(self, source: torch.Tensor) -> torch.Tensor:
        """Returns the encoder's output."""
        embedded = self.embed(self.source, source)
        return self.transformer.encoder(embedded, src_key_padding_mask=source == PAD)

    def logits(
        self, memory: torch.Tensor, source: torch.Tensor, inputs: torch.Tensor
    ) -> torch.Tensor:
        """Returns the logits of the token after each input; the projection is the embedding."""
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
        out = self.transformer.decoder(
            self.embed(self.target, inputs),
            memory,
            tgt_mask=mask,
            memory_key_padding_mask=source == PAD,
            tgt_is_causal=True,
        )
        return out @ self.target.weight.T


def padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Returns ids (rows, the longest)."""
    length = max(map(len, rows))
    return torch.tensor([[*row, *[PAD] * (length - len(row))] for row in rows])


def batches(
    pairs: Sequence[tuple[list[int], list[int]]], rng: np.random.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields batches of pairs of similar length, at most TOKENS positions a side, without end."""
    lengths = np.array([max(map(len, pair)) for pair in pairs])
    while True:
        order = np.lexsort((rng.random(len(pairs)), lengths))
        cut: list[list[int]] = [[]]
        for i in order:
            if (len(cut[-1]) + 1) * lengths[i] > TOKENS:
                cut.append([])
            cut[-1].append(int(i))
        for number in rng.permutation(len(cut)):
            sources, targets = zip(*(pairs[i] for i in cut[number]), strict=True)
            yield padded(sources), padded(targets)


@torch.no_grad()
def translate(model: Model, sources: Sequence[list[int]], target: Vocabulary) -> list[str]:
    """Returns the greedy output for each source."""
    model.eval()
    texts: list[str] = []
    for first in range(0, len(sources), 64):
        source = padded(sources[first : first + 64])
        memory = model.encode(source)
        ids = torch.full((len(source), 1), BOS)
        for _ in range(LONGEST - 1):
            logits = model.logits(memory, source, ids)[:, -1]
            logits[:, [PAD, BOS, UNK]] = -torch.inf
            ids = torch.cat([ids, logits.argmax(dim=-1, keepdim=True)], dim=1)
            if (ids == EOS).any(dim=1).all():
                break
        texts += [target.decode(row[1:]) for row in ids.tolist()]
    model.train()
    return texts


def train(parts: dict[str, list[tuple[str, str]]], steps: int, seed: int) -> dict[str, float]:
    """Trains on 'train', and returns WER and PER of 'test' by the best model on 'validation'."""
    torch.manual_seed(seed)
    split = {
        name: [(list(word), phones.split(" ")) for word, phones in parts[name]] for name in parts
    }
    source, target = (Vocabulary([pair[side] for pair in split["train"]]) for side in (0, 1))
    encoded = {
        name: [(source.encode(word), target.encode(phones)) for word, phones in pairs]
        for name, pairs in split.items()
    }
    model = Model(len(source), len(target))
    adam = torch.optim.Adam(model.parameters(), lr=RATE, betas=(0.9, 0.98), eps=1e-9)
    rates = torch.optim.lr_scheduler.LambdaLR(
        adam, lambda step: min((step + 1) / WARMUP, (steps - step) / max(1, steps - WARMUP))
    )
    criterion = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)

    def scores(name: str) -> dict[str, float]:
        outputs = translate(model, [word for word, _ in encoded[name]], target)
        found = scoring.score(
            outputs, [[phones for _, phones in parts[name]]], tokenized=True, symbols=True
        )
        return {rate: found.values[metric] for rate, metric in g2p.RATES.items()}

    start, best, kept = time.monotonic(), math.inf, model.state_dict()
    data = batches(encoded["train"], np.random.default_rng(seed))
    for step in range(1, steps + 1):
        sources, targets = next(data)
        inputs = torch.cat([torch.full((len(targets), 1), BOS), targets[:, :-1]], dim=1)
        logits = model.logits(model.encode(sources), sources, inputs)
        loss = criterion(logits.flatten(0, 1), targets.flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
        rates.step()
        if step % EVAL_EVERY == 0 or step == steps:
            rate = scores("validation")["WER"]
            print(f"step {step}  loss {loss.item():.3f}  WER on dev {rate:.2f}", flush=True)
            if rate < best:
                best, kept = rate, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    return {**scores("test"), "dev WER": best, "minutes": (time.monotonic() - start) / 60}


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains a model for each language and seed, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    public_data.add_flag(parser, "g2p")
    parser.add_argument("--languages", nargs="+", choices=g2p.LANGUAGES, default=["kor"])
    groups.add_flags(parser, "g2p_torch", steps=2800)
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        texts = public_data.read(options.data, g2p.DIGESTS, source=g2p.SOURCE)
    except InputError as error:
        parser.error(str(error))
    found: dict[str, dict[int, dict[str, float]]] = {}
    for language in options.languages:
        parts = g2p.parts_of(texts, language, "NFD")
        for seed in options.seeds:
            file = options.output / f"{language}-{options.steps}-seed{seed}.json"
            scores = groups.kept(file, functools.partial(train, parts, options.steps, seed))
            found.setdefault(language, {})[seed] = scores
            print(f"{language}, seed {seed}: {scores}", flush=True)
    print(groups.table(found, digits=2))
    figures.write(options.json, groups.figures_of(found))


if __name__ == "__main__":
    main()
