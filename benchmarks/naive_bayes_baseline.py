"""Classifies the language of phrases by naive Bayes over characters: a baseline for classifiers.

The features are the counts of all sequences of 1 to n characters, each plus `--smoothing`. Both
numbers are chosen on the validation split; the test split is scored once, with the chosen ones.

    python -m benchmarks.naive_bayes_baseline
"""

import argparse
import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np

from benchmarks import figures
from flaxformer_lite.data.sources.datasets import Dataset

SMOOTHING = (0.03, 0.1, 0.3, 1.0)


def grams(text: str, longest: int) -> list[str]:
    """Returns all sequences of 1 to `longest` characters, with a mark at both ends of the text."""
    text = f"\0{text}\0"
    return [text[i : i + n] for n in range(1, longest + 1) for i in range(len(text) - n + 1)]


class NaiveBayes:
    """Counts of each gram in each class; all classes have the same prior."""

    def __init__(self, texts: Sequence[str], labels: Sequence[int], longest: int):
        self.longest, classes = longest, max(labels) + 1
        counts = [Counter() for _ in range(classes)]
        for text, label in zip(texts, labels, strict=True):
            counts[label].update(grams(text, longest))
        self.number = {gram: i for i, gram in enumerate(dict.fromkeys(itertools.chain(*counts)))}
        self.count_GC = np.array(
            [[count[gram] for count in counts] for gram in self.number], np.float32
        )

    def accuracy(self, texts: Sequence[str], labels: Sequence[int], smoothing: float) -> float:
        """Returns the share of texts classified correctly; grams not in training are ignored."""
        log_GC = np.log(self.count_GC + smoothing) - np.log((self.count_GC + smoothing).sum(axis=0))
        rows = [
            [self.number[gram] for gram in grams(text, self.longest) if gram in self.number]
            for text in texts
        ]
        return float(
            np.mean(
                [
                    log_GC[row].sum(axis=0).argmax() == label
                    for row, label in zip(rows, labels, strict=True)
                ]
            )
        )


def main() -> None:
    """Prints the validation accuracy of each choice, and the test accuracy of the best one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--longest", type=int, default=5, help="longest sequence of characters")
    figures.add_flag(parser)
    arguments = parser.parse_args()
    dataset = Dataset("cldr_language", architecture="encoder_classifier")
    dataset.prepare()
    train, validation, test = (dataset.read(split) for split in ("train", "validation", "test"))
    best = (0.0,)
    for longest in range(1, arguments.longest + 1):
        model = NaiveBayes(train.source, train.label, longest)
        for smoothing in SMOOTHING:
            found = model.accuracy(validation.source, validation.label, smoothing)
            print(
                f"1 to {longest} characters, smoothing {smoothing}: {100 * found:.2f} % of "
                "validation"
            )
            best = max(best, (found, longest, smoothing, model), key=lambda choice: choice[0])
    chosen, longest, smoothing, model = best
    found = model.accuracy(test.source, test.label, smoothing)
    print(f"test, 1 to {longest} characters, smoothing {smoothing}: {100 * found:.2f} %")
    figures.write(arguments.json, {"validation": 100 * chosen, "test": 100 * found})


if __name__ == "__main__":
    main()
