"""Measures the word alignments of two runs of the default config: plain, and with a guided head.

Both train on the English-German CLDR phrases, written to files. The guided run gets the alignments
of those kinds of phrases whose alignment follows from their construction. The AER of each layer,
head and step is measured on the validation phrases, and that of a few readings on the test phrases.

    python -m benchmarks.alignment --steps=500
    python -m benchmarks.alignment --plain=runs/a --guided=runs/b      (two finished runs)
"""

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks import figures, train_config
from flaxformer_lite import alignments, trained
from flaxformer_lite.alignments import Aligner, Pair, Reading
from flaxformer_lite.data.cldr import phrase_alignments
from flaxformer_lite.data.sources import builders, preparation
from flaxformer_lite.scores import word_links
from flaxformer_lite.scores.alignment_error import AlignmentScores, alignment_scores
from flaxformer_lite.scores.word_links import Reference

ROOT = Path(__file__).parent.parent
SPLITS = ("train", "validation", "test")
NO_LINKS = Reference(frozenset(), frozenset())
Aligned = list[tuple[Pair, Reference]]


def phrases() -> dict[str, Aligned]:
    """Returns the pairs of each split of `cldr_translate/en-de`; some kinds have no links."""
    builder = builders.cldr_translate("en-de")
    preparation.prepare(builder)
    aligned = phrase_alignments.aligned_phrases("en", "de")
    known = {(each.source, each.target): each.reference for each in aligned}
    found: dict[str, Aligned] = {}
    for split in SPLITS:
        texts = builder.as_data_source(split=split)
        pairs = [(each["en"].decode(), each["de"].decode()) for each in texts]
        found[split] = [(pair, known.get(pair, NO_LINKS)) for pair in pairs]
    return found


def write(splits: dict[str, Aligned], folder: Path) -> None:
    """Writes SPLIT.en, SPLIT.de and SPLIT.align, whose sure links are those to learn."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, pairs in splits.items():
        columns = {
            "en": [pair[0] for pair, _ in pairs],
            "de": [pair[1] for pair, _ in pairs],
            "align": [word_links.line_of(reference.sure) for _, reference in pairs],
        }
        for suffix, lines in columns.items():
            text = "".join(f"{line}\n" for line in lines)
            (folder / f"{split}.{suffix}").write_text(text, encoding="utf-8")


def train(folder: Path, workdir: Path, steps: int, *more: str) -> Path:
    """Trains the default config on the files in `folder`, unless the run is finished."""
    flags = [f"--workdir={workdir}", "--config.data.dataset=parallel_text"]
    flags += [f"--config.data.{n}_files={folder}/{n}.en,{folder}/{n}.de" for n in SPLITS]
    flags += ["--config.data.normalization=none", f"--config.train.num_steps={steps}"]
    flags += [f"--config.train.{name}={steps}" for name in ("eval_every", "checkpoint_every")]
    subprocess.run([sys.executable, "train.py", *flags, *more], cwd=ROOT, check=True)
    return workdir


def measured(run: trained.Trained, splits: dict[str, Aligned]) -> dict[str, float]:
    """Returns the AER, in percent, of each reading on validation, and of some on test."""
    table = chosen(Aligner(run), splits["validation"])
    found = {f"validation, {reading}": percent(scores) for reading, scores in table}
    for name, reading in (
        ("by default", alignments.reading_of(run.config)),
        ("lowest on validation", table[0][0]),
    ):
        found[f"test, {name}"] = percent(of_reading(run, reading, splits["test"]))
    return found


def chosen(aligner: Aligner, pairs: Aligned) -> list[tuple[Reading, AlignmentScores]]:
    """Returns the table of `choose` on the pairs that have links."""
    linked = [each for each in pairs if each[1] != NO_LINKS]
    return aligner.choose([pair for pair, _ in linked], [links for _, links in linked])


def of_reading(run: trained.Trained, reading: Reading, pairs: Aligned) -> AlignmentScores:
    """Returns the scores of one reading on the pairs that have links."""
    linked = [each for each in pairs if each[1] != NO_LINKS]
    found = Aligner(run, reading)([pair for pair, _ in linked])
    return alignment_scores(list(map(frozenset, found)), [links for _, links in linked])


def percent(scores: AlignmentScores) -> float:
    """Returns the AER in percent."""
    assert scores.aer is not None, "the pairs have links"
    return 100 * scores.aer


def main() -> None:
    """Prints a line for each figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500, help="training steps of a run")
    parser.add_argument("--weight", type=float, default=0.05, help="train.guided_alignment")
    parser.add_argument("--layer", type=int, default=1, help="layer of the guided head")
    parser.add_argument("--plain", type=Path, help="a finished run, in place of a new one")
    parser.add_argument("--guided", type=Path, help="a finished run, in place of a new one")
    figures.add_flag(parser)
    arguments = parser.parse_args()
    splits, output = phrases(), (figures.OUTPUT / "alignment").absolute()
    write(splits, output / "files")
    guide = [
        f"--config.data.train_alignments={output}/files/train.align",
        f"--config.train.guided_alignment={arguments.weight}",
        f"--config.train.alignment_layer={arguments.layer}",
    ]
    found: dict[str, float] = {}
    for name, more in (("plain", []), ("guided", guide)):
        workdir: Path = getattr(arguments, name) or train(
            output / "files", output / name, arguments.steps, *more
        )
        test = train_config.scores_of(workdir)
        figures_of_run = {key: test[f"test {key}"] for key in ("exact_match", "loss")}
        figures_of_run |= measured(trained.load(workdir), splits)
        found |= {f"{name} {key}": value for key, value in figures_of_run.items()}
    figures.write(arguments.json, found)
    for name, value in found.items():
        print(f"{name:60} {value:.2f}")


if __name__ == "__main__":
    main()
