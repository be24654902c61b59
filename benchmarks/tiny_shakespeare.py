"""Trains the config `benchmarks/tiny_shakespeare`, a language model of characters, and nanoGPT.

The first 90 % of the characters are for training. The loss is that of the last 10 %, in nats a
character, over windows that follow one another: every character is predicted once. nanoGPT's README
has 1.88 for its small recipe for a CPU, an estimate from 240 random windows.

The config is that recipe. TUNED has other settings for the same steps, chosen by the loss of
one seed.

With `--nanogpt=FOLDER`, a checkout of https://github.com/karpathy/nanoGPT, its recipe is trained by
its own code and PyTorch, after the first seed. The loss of its best checkpoint is computed over the
same windows. Finished runs are not trained again.

    python -m benchmarks.tiny_shakespeare --data=data/tiny_shakespeare --nanogpt=../nanoGPT
"""

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks import figures, public_data, train_config
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import write_whole

SOURCE = "data/tinyshakespeare of https://github.com/karpathy/char-rnn"
DIGESTS = {"input.txt": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"}
# of nanoGPT's README, section "quick start"
RECIPE = """
    config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1
    --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000
    --lr_decay_iters=2000 --dropout=0.0
""".split()
# Chosen among rates of 1e-3 and 4e-3, AdamW and Muon, learned and rotary positions.
TUNED = """
    --config.optim.optimizer=muon --config.optim.learning_rate=4e-3 --config.optim.final_rate=0.02
    --config.model.position=rotary
""".split()
ARMS = {"recipe": [], "tuned": TUNED}
# Prints the loss of a checkpoint of nanoGPT over contiguous windows; runs in its folder.
EXACT_LOSS = """
import numpy as np, torch
from model import GPT, GPTConfig
saved = torch.load("out-shakespeare-char/ckpt.pt", map_location="cpu", weights_only=False)
model = GPT(GPTConfig(**saved["model_args"]))
model.load_state_dict(saved["model"])
model.eval()
ids = torch.from_numpy(np.fromfile("data/shakespeare_char/val.bin", np.uint16).astype(np.int64))
length, total = model.config.block_size, 0.0
with torch.no_grad():
    for first in range(0, len(ids) - 1, length):
        labels = ids[first + 1 : first + 1 + length]
        inputs = ids[first : first + len(labels)]
        total += model(inputs[None], labels[None])[1].item() * len(labels)
print(total / (len(ids) - 1))
"""


def nanogpt(checkout: Path, text: str, folder: Path) -> dict[str, float]:
    """Returns the loss and the minutes of nanoGPT's recipe, trained in a copy of its checkout.

    The minutes are those of the whole command, as those of our runs.
    """
    kept = folder / "minutes.txt"
    if not kept.exists():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(checkout, folder, ignore=shutil.ignore_patterns(".git"))
        data = folder / "data" / "shakespeare_char"
        (data / "input.txt").write_text(text, encoding="utf-8")
        subprocess.run([sys.executable, "prepare.py"], cwd=data, check=True)
        started = time.monotonic()
        subprocess.run([sys.executable, "train.py", *RECIPE], cwd=folder, check=True)
        write_whole(kept, f"{(time.monotonic() - started) / 60}")
    command = [sys.executable, "-c", EXACT_LOSS]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return {"loss": float(done.stdout.split()[-1]), "minutes": float(kept.read_text())}


def of_run(arm: str, scores: Mapping[str, float]) -> dict[str, float]:
    """Returns the losses of a run at its evaluations, and its minutes."""
    steps = {name: x for name, x in scores.items() if name.startswith("validation loss, step ")}
    named = {f"{arm}, {name.removeprefix('validation ')}": x for name, x in steps.items()}
    return named | {f"{arm}, loss": scores["test loss"], f"{arm}, minutes": scores["minutes"]}


def main() -> None:
    """Trains the missing runs, and prints a line for each figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    public_data.add_flag(parser, "tiny_shakespeare")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the runs")
    parser.add_argument("--nanogpt", type=Path, help="folder of a checkout of nanoGPT to compare")
    parser.add_argument(
        "--output", type=Path, default=figures.OUTPUT / "tiny_shakespeare", help="of the runs"
    )
    figures.add_flag(parser)
    options, more = parser.parse_known_args()
    try:
        text = public_data.read(options.data, DIGESTS, source=SOURCE)["input.txt"]
    except InputError as error:
        parser.error(str(error))
    file = options.output.absolute() / "input.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, text)
    flags = [f"--config.data.train_files={file}", *more]
    runs: dict[int, dict[str, float]] = {}
    beside: dict[str, float] = {}
    for seed in options.seeds:
        runs[seed] = {}
        for arm, changes in ARMS.items():
            seeded = [f"--config.data.seed={seed}", *flags, *changes]
            folder = options.output / arm
            workdir = train_config.train("benchmarks/tiny_shakespeare", seed, folder, seeded)
            runs[seed] |= of_run(arm, train_config.scores_of(workdir))
        if options.nanogpt and not beside:
            beside = nanogpt(options.nanogpt, text, options.output / "nanogpt")
    found = train_config.over_seeds(runs) | {f"nanoGPT, {name}": x for name, x in beside.items()}
    figures.write(options.json, found)
    for name, figure in found.items():
        print(f"{name:28} {figure['value'] if isinstance(figure, dict) else figure:.4f}")


if __name__ == "__main__":
    main()
