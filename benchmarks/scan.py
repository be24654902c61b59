"""Trains the config `benchmarks/scan` on 3 splits of SCAN, and scores whole action sequences.

Splits of Lake and Baroni 2018: `simple` is random, `length` has up to 22 actions to train on and 24
to 48 to test on, `addprim_jump` has 'jump' to train on alone, and to test on in all other commands.
`length_26` has the commands of `length` with up to 26 actions to train on, and the others to test
on (Newman 2020; Csordas 2021).
500 of the training commands are held out for choices; commands of 1 word stay in training. The
test commands are scored once, by greedy decoding with the last parameters. Figures of a run, in %:

  exact match         of the whole sequence, the accuracy of the paper
  too short           outputs with fewer actions than the reference
  with oracle length  exact match if the end symbol is suppressed up to the reference's length, and
                      the output ends there. If this is high and exact match is low, the model has
                      the actions right and the end wrong (Newman 2020, "The EOS Decision")
  actions             share of reference actions that are right at their position, with that length
  held out            exact match of the 500 commands

Finished runs are not trained again, so an interrupted command can be started again.

    python -m benchmarks.scan --data=data/scan --positions sinusoidal relative --seeds 0 1 2
"""

import argparse
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

from benchmarks import figures, groups, public_data, train_config
from benchmarks.public_data import Pairs
from flaxformer_lite import scoring, translate
from flaxformer_lite.config import CHOICES
from flaxformer_lite.scores.symbols import symbols_of
from flaxformer_lite.system.errors import InputError

SOURCE = "https://github.com/brendenlake/SCAN"
DIGESTS = {
    "tasks_train_simple.txt": "941bb8a088c5f53ceff12fde902dc008933cf0c4203cc672c47b5f79d73262dd",
    "tasks_test_simple.txt": "1fe1c8f5a19d0dc40e41bab94278f45f66f3dc415a978bd29855a23440610fc6",
    "tasks_train_length.txt": "b034212dc7cf87ce62f3a067dd6ad49c4d5cd18d51d615d13825516bcb1ebbc2",
    "tasks_test_length.txt": "0760752ed34a75116ae11dcc1ee17526b7500060da1366540730fa24894d7db3",
    "tasks_train_addprim_jump.txt": (
        "e3c78485692e028eed4205e1b8b3fd0e785ef2c12d45b5b89204dadf5b239e23"
    ),
    "tasks_test_addprim_jump.txt": (
        "8147ae2651422c701162e174d9d66158daa57858a26b30317ac61797118ac7a5"
    ),
}
SPLITS = ("simple", "length", "addprim_jump")
CUTOFF = "length_26"
HELD_OUT = 500
KEPT = "scan_scores.json"  # file of a workdir


def pairs_of(text: str) -> list[tuple[str, str]]:
    """Returns the command and the actions of each line 'IN: command OUT: ACTIONS'."""
    return [
        (command.removeprefix("IN:").strip(), actions.strip())
        for command, _, actions in (line.partition("OUT:") for line in text.splitlines())
    ]


def hold_out(pairs: Pairs, count: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Returns the pairs to train on, and `count` random ones with 2 or more words for choices.

    Every line of a held-out command is held out.
    """
    commands = sorted({command for command, _ in pairs if len(command.split()) > 1})
    chosen = set(random.Random(0).sample(commands, count))
    train = [pair for pair in pairs if pair[0] not in chosen]
    held = [pair for pair in dict.fromkeys(pairs) if pair[0] in chosen]
    return train, held


def parts_of(texts: dict[str, str], split: str) -> dict[str, Pairs]:
    """Returns the pairs of 'train', 'validation' and 'test' of a split."""
    name = "length" if split == CUTOFF else split
    train, test = (pairs_of(texts[f"tasks_{part}_{name}.txt"]) for part in ("train", "test"))
    if split == CUTOFF:
        longest = int(split.removeprefix("length_"))
        train += [pair for pair in test if len(symbols_of(pair[1])) <= longest]
        test = [pair for pair in test if len(symbols_of(pair[1])) > longest]
    train, held = hold_out(train, HELD_OUT)
    return {"train": train, "validation": held, "test": test}


def figures_of(
    outputs: Sequence[str], unended: Sequence[str], references: Sequence[str]
) -> dict[str, float]:
    """Returns the figures of outputs that ended by themselves, and of those that did not, in %.

    Args:
      unended: outputs with at least as many actions as their reference.
    """
    count = len(references)
    ended, longer, wanted = (
        [symbols_of(text) for text in side] for side in (outputs, unended, references)
    )
    cut = [output[: len(right)] for output, right in zip(longer, wanted, strict=True)]
    hits = sum(
        action == other
        for output, right in zip(cut, wanted, strict=True)
        for action, other in zip(output, right, strict=False)
    )
    return {
        "exact match": 100 * float(scoring.exact_matches(outputs, [references]).mean()),
        "too short": 100 * sum(len(a) < len(b) for a, b in zip(ended, wanted, strict=True)) / count,
        "with oracle length": 100 * sum(a == b for a, b in zip(cut, wanted, strict=True)) / count,
        "actions": 100 * hits / sum(map(len, wanted)),
    }


def scores_of(workdir: Path, test: Pairs) -> dict[str, float]:
    """Returns the figures of a finished run; stores them in the workdir for the next start."""

    def measure() -> dict[str, float]:
        (file,) = (workdir / "samples").glob("test.*.hypotheses.txt")
        outputs = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        commands, references = map(list, zip(*test, strict=True))
        longest = max(len(symbols_of(text)) for text in references)
        unended = translate.load(workdir, min_length=longest)(commands)
        found = figures_of(outputs, unended, references)
        logged = train_config.scores_of(workdir)
        found["held out"] = 100 - logged["validation sequence_error_rate"]
        found["minutes"] = logged["minutes"]
        return found

    return groups.kept(workdir / KEPT, measure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains missing runs, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    public_data.add_flag(parser, "scan")
    parser.add_argument("--splits", nargs="+", choices=(*SPLITS, CUTOFF), default=SPLITS)
    schemes = CHOICES["model.position"]
    parser.add_argument("--positions", nargs="+", choices=schemes, default=["sinusoidal"])
    groups.add_flags(parser, "scan", steps=2000)
    options, more = parser.parse_known_args(arguments)
    try:
        texts = public_data.read(options.data, DIGESTS, source=SOURCE)
    except InputError as error:
        parser.error(str(error))
    found: dict[str, dict[int, dict[str, float]]] = {}
    for split, scheme in itertools.product(options.splits, options.positions):
        parts = parts_of(texts, split)
        flags = public_data.write_parts(options.output / "data" / split, parts)
        flags += [f"--config.model.position={scheme}"]
        flags += [f"--config.train.num_steps={options.steps}", *more]
        folder = options.output / f"{split}-{scheme}-{options.steps}"
        runs = found.setdefault(f"{split} {scheme}", {})
        for seed in options.seeds:
            seeded = [f"--config.data.seed={seed}", *flags]
            workdir = train_config.train("benchmarks/scan", seed, folder, seeded)
            runs[seed] = scores_of(workdir, parts["test"])
            print(f"{split} {scheme}, seed {seed}: {runs[seed]}", flush=True)
    print(groups.table(found))
    figures.write(options.json, groups.figures_of(found))


if __name__ == "__main__":
    main()
