"""Translates by copying and filling the nearest template: what a model has to beat.

A template is a source text with the numbers that its target repeats cut out as slots, and that target with the same
numbers cut out. A text is looked up with as few of its numbers cut out as possible. Without an exact match the most
similar template is filled, and its words that the target repeats give way to those that stand in their place.

    python benchmarks/template_baseline.py --split=test
"""

import argparse
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection
from difflib import SequenceMatcher

from flaxformer_lite.data.sources import builders

TOKEN = re.compile(r"\d+|[^\W\d_]+|.", re.DOTALL)
Template = tuple[str | int, ...]  # text, or the rank among the numbers of the source of the one that fills the slot
NEAREST = 30  # so many templates, which share the rarest words, are compared in full


def cut(tokens: list[str], slots: Collection[int]) -> Template:
    """The source with the numbers in `slots`, by their rank among its numbers, cut out."""
    ranks = itertools.count()
    return tuple(rank if token.isdigit() and (rank := next(ranks)) in slots else token for token in tokens)


def learn(pairs: list[tuple[str, str]]) -> dict[Template, Template]:
    """Source template -> its most frequent target template."""
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
    """Fills the templates that it learned from pairs of source and target."""

    def __init__(self, pairs: list[tuple[str, str]]):
        self.templates = learn(pairs)
        self.with_token = defaultdict(list)
        for template in self.templates:
            for token in set(template):
                self.with_token[token].append(template)

    def translate(self, source: str) -> str:
        """Exact match first, then the nearest template."""
        tokens = TOKEN.findall(source)
        numbers = [token for token in tokens if token.isdigit()]
        for count in range(len(numbers) + 1):
            for slots in itertools.combinations(range(len(numbers)), count):
                if target := self.templates.get(cut(tokens, slots)):
                    return "".join(token if isinstance(token, str) else numbers[token] for token in target)
        template = self.nearest(tokens, len(numbers))
        exchange = dict(enumerate(numbers))
        for tag, i, j, m, n in SequenceMatcher(None, template, tokens, autojunk=False).get_opcodes():
            if tag == "replace" and j - i == n - m:
                exchange = dict(zip(template[i:j], tokens[m:n], strict=True)) | exchange
        return "".join(exchange.get(token, token) for token in self.templates.get(template, ()))

    def nearest(self, tokens: list[str], count: int) -> Template:
        """The template most like `tokens` whose slots `count` numbers can fill."""
        scores: Counter = Counter()
        known = {token for token in tokens if token in self.with_token}
        for token in sorted(known, key=lambda token: (len(self.with_token[token]), token))[:6]:
            for template in self.with_token[token]:
                scores[template] += math.log(len(self.templates) / len(self.with_token[token]))
        fits = (one for one, _ in scores.most_common() if all(isinstance(t, str) or t < count for t in one))
        text = cut(tokens, range(count))
        likeness = {one: SequenceMatcher(None, one, text, False).ratio() for one in itertools.islice(fits, NEAREST)}
        return max(likeness, key=likeness.get, default=())


def main() -> None:
    """Prints exact match on a split, in total and by kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="cldr_translate/en-de", help="cldr_translate/<source>-<target>")
    parser.add_argument("--split", default="validation", choices=("validation", "test"), help="what to score")
    parser.add_argument("--data_dir", help="the folder of all datasets, by default that of TFDS")
    flags = parser.parse_args()
    pair = flags.dataset.removeprefix("cldr_translate/")
    builder = builders.cldr_translate(pair, data_dir=flags.data_dir)
    builders.prepare(builder)
    keys = (*builders.locales_of(pair), "kind")
    train, held_out = (
        [tuple(example[key].decode() for key in keys) for example in data.__getitems__(range(len(data)))]
        for data in builder.as_data_source(split=["train", flags.split])
    )
    translator = Translator([(source, target) for source, target, _ in train])
    right, total = Counter(), Counter()
    for source, target, kind in held_out:
        total[kind] += 1
        right[kind] += translator.translate(source) == target
    for kind in total:
        print(f"{kind:16} {right[kind] / total[kind]:7.1%} of {total[kind]}")
    print(f"{'exact match':16} {right.total() / total.total():7.1%} of {total.total()} ({flags.split})")


if __name__ == "__main__":
    main()
