"""Trains on one half of Multi30k, then on the other half from these weights and from nothing.

All runs have the same model, tokenizer and number of steps. Figures are the BLEU and the loss of
the test split: of the run on the first half, and of the runs on the second half, mean over the
seeds. Finished runs are not trained again, so an interrupted command can be started again.

    python -m benchmarks.warm_start --data=multi30k/raw --devices=2
"""

import argparse
import gzip
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import figures, train_config

SIDES = ("en", "de")
SMALLER = (
    "--config.model.num_encoder_layers=2",
    "--config.model.num_decoder_layers=2",
    "--config.data.vocab_size=6000",
    "--config.optim.warmup_steps=200",
    "--config.train.num_steps=600",
)


def read(file: Path) -> list[str]:
    """Returns the lines of a text file, gzip or not."""
    packed = file.with_name(f"{file.name}.gz")
    content = gzip.decompress(packed.read_bytes()) if packed.exists() else file.read_bytes()
    return content.decode().splitlines()


def write_halves(data: Path, folder: Path) -> None:
    """Writes the even and the odd lines of the training files to `half0.*` and `half1.*`."""
    folder.mkdir(parents=True, exist_ok=True)
    for side in SIDES:
        lines = read(data / f"train.{side}")
        for half in (0, 1):
            text = "\n".join(lines[half::2]) + "\n"
            (folder / f"half{half}.{side}").write_text(text, encoding="utf-8")


def files(folder: Path, name: str) -> str:
    """Returns the two files of a split, 'A,B', gzip or not."""
    return ",".join(str(next(folder.glob(f"{name}.{side}*"))) for side in SIDES)


def train(folder: Path, data: Path, half: int, name: str, more: Sequence[str]) -> dict[str, float]:
    """Trains a run on one half if it is not finished, and returns its scores."""
    workdir = folder / name
    flags = ["--config=multi30k", f"--workdir={workdir}", *SMALLER, *more]
    flags += [f"--config.data.train_files={files(folder, f'half{half}')}"]
    flags += [f"--config.data.validation_files={files(data, 'val')}"]
    flags += [f"--config.data.test_files={files(data, 'test_2016_flickr')}"]
    subprocess.run([sys.executable, "train.py", *flags], cwd=train_config.ROOT, check=True)
    scores = train_config.scores_of(workdir)
    return {score: scores[score] for score in ("test bleu", "test loss", "minutes")}


def main() -> None:
    """Trains all runs, and prints a line for each figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("multi30k/raw"), help="raw files")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="values of train.seed")
    parser.add_argument("--devices", type=int, help="CPU devices; default: 1 with all threads")
    parser.add_argument("--output", type=Path, help="folder of the runs; default: runs/warm_start")
    figures.add_flag(parser)
    arguments = parser.parse_args()
    if arguments.devices:
        os.environ["XLA_FLAGS"] = train_config.ONE_THREAD_A_DEVICE.format(arguments.devices)
    folder = (arguments.output or figures.OUTPUT / "warm_start").absolute()
    data = arguments.data.absolute()
    write_halves(data, folder)
    first = train(folder, data, 0, "first", [])
    found = {f"first half, {name}": value for name, value in first.items()}
    starts = {
        "from the first half": f"--init={folder / 'first'}",
        "from nothing": f"--config.data.tokenizer_file={folder / 'first'}",
    }
    for start, flag in starts.items():
        of_seed = {
            seed: train(
                folder,
                data,
                1,
                f"{start.replace(' ', '_')}_{seed}",
                [flag, f"--config.train.seed={seed}"],
            )
            for seed in arguments.seeds
        }
        scores = train_config.over_seeds(of_seed)
        found |= {f"{start}, {name}": value for name, value in scores.items()}
    figures.write(arguments.json, found)
    for name, figure in found.items():
        value = figure["value"] if isinstance(figure, dict) else figure
        print(f"{name:40} {value:.4f}")


if __name__ == "__main__":
    main()
