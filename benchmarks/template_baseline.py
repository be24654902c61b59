"""Translates by copying and filling the nearest template: a baseline for translators.

A template is a source text and its target, in which the numbers that both contain are replaced by
slots. A text is looked up with as few of its numbers in slots as possible. Without an exact match,
the most similar template is filled: its words that differ from the text, and that its target
repeats, are replaced by those of the text.

    python -m benchmarks.template_baseline --split=test
"""

import argparse
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection
from difflib import SequenceMatcher

from benchmarks import figures
from flaxformer_lite.data.sources import builders, preparation

TOKEN = re.compile(r"\d+|[^\W\d_]+|.", re.DOTALL)
# Text, or slots. A slot is the rank of its number among the numbers of the source.
Template = tuple[str | int, ...]
NEAREST = 30  # templates with the rarest common words that are compared in full


def cut(tokens: list[str], slots: Collection[int]) -> Template:
    """Returns the source with the numbers in `slots`, by their ranks, replaced by slots."""
    ranks = itertools.count()
    return tuple(
        rank if token.isdigit() and (rank := next(ranks)) in slots else token for token in tokens
    )


def learn(pairs: list[tuple[str, str]]) -> dict[Template, Template]:
    """Returns source template -> its most frequent target template."""
    votes: dict[Template, Counter] = defaultdict(Counter)
    for source, target in pairs:
        tokens, result = TOKEN.findall(source), []
        free = dict(enumerate(token for token in tokens if token.isdigit()))
        for token in TOKEN.findall(target):
            slot = next((rank for rank, number in free.items() if number == token), None)
            free.pop(slot, None)
            result.append(token if slot is None else slot)
        votes[cut(tokens, [slot for slot in result if isinstance(slot, int)])][tuple(result)] += 1
    return {source: targets.most_common(1)[0][0] for source, targets in votes.items()}


class Translator:
    """Fills templates that are learned from pairs of source and target."""

    def __init__(self, pairs: list[tuple[str, str]]):
        self.templates = learn(pairs)
        self.with_token = defaultdict(list)
        for template in self.templates:
            for token in set(template):
                self.with_token[token].append(template)

    def translate(self, source: str) -> str:
        """Returns the filled template: an exact match, or else the nearest template."""
        tokens = TOKEN.findall(source)
        numbers = [token for token in tokens if token.isdigit()]
        for count in range(len(numbers) + 1):
            for slots in itertools.combinations(range(len(numbers)), count):
                if target := self.templates.get(cut(tokens, slots)):
                    return "".join(
                        token if isinstance(token, str) else numbers[token] for token in target
                    )
        template = self.nearest(tokens, len(numbers))
        exchange = dict(enumerate(numbers))
        for tag, i, j, m, n in SequenceMatcher(
            None, template, tokens, autojunk=False
        ).get_opcodes():
            if tag == "replace" and j - i == n - m:
                exchange = dict(zip(template[i:j], tokens[m:n], strict=True)) | exchange
        return "".join(exchange.get(token, token) for token in self.templates.get(template, ()))

    def nearest(self, tokens: list[str], count: int) -> Template:
        """Returns the most similar template whose slots `count` numbers can fill."""
        scores: Counter = Counter()
        known = {token for token in tokens if token in self.with_token}
        for token in sorted(known, key=lambda token: (len(self.with_token[token]), token))[:6]:
            for template in self.with_token[token]:
                scores[template] += math.log(len(self.templates) / len(self.with_token[token]))
        fits = (
            one
            for one, _ in scores.most_common()
            if all(isinstance(t, str) or t < count for t in one)
        )
        text = cut(tokens, range(count))
        likeness = {
            one: SequenceMatcher(None, one, text, False).ratio()
            for one in itertools.islice(fits, NEAREST)
        }
        return max(likeness, key=likeness.get, default=())


def main() -> None:
    """Prints exact match on a split, by kind and in total."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dataset", default="cldr_translate/en-de", help="cldr_translate/<source>-<target>"
    )
    parser.add_argument(
        "--split", default="validation", choices=("validation", "test"), help="split to score"
    )
    parser.add_argument("--data_dir", help="folder of all datasets; default: that of TFDS")
    figures.add_flag(parser)
    flags = parser.parse_args()
    pair = flags.dataset.removeprefix("cldr_translate/")
    builder = builders.cldr_translate(pair, data_dir=flags.data_dir)
    preparation.prepare(builder)
    keys = (*builders.locales_of(pair), "kind")
    train, held_out = (
        [
            tuple(example[key].decode() for key in keys)
            for example in data.__getitems__(range(len(data)))
        ]
        for data in builder.as_data_source(split=["train", flags.split])
    )
    translator = Translator([(source, target) for source, target, _ in train])
    right, total = Counter(), Counter()
    for source, target, kind in held_out:
        total[kind] += 1
        right[kind] += translator.translate(source) == target
    for kind in total:
        print(f"{kind:16} {right[kind] / total[kind]:7.1%} of {total[kind]}")
    print(
        f"{'exact match':16} {right.total() / total.total():7.1%} of {total.total()} "
        f"({flags.split})"
    )
    shares = {"all": 100 * right.total() / total.total()}
    figures.write(flags.json, shares | {kind: 100 * right[kind] / total[kind] for kind in total})


if __name__ == "__main__":
    main()
