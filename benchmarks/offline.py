"""Collects the files for `benchmarks.accelerator` on a machine without a network.

    python -m benchmarks.offline --python=3.12 [--multi30k=FOLDER] [OUTPUT]

Collects wheels, and the data of `multi30k_tok`. Runs on any machine that reaches the package index.
The target machine needs Linux on x86-64, Python, and the usual contents of images for JAX: JAX with
its plugin, Flax, Optax, Orbax, NumPy, Abseil, SentencePiece and sacreBLEU. There, in the checkout,
run `python -m pip install --no-index --no-deps OUTPUT/*.whl`, and copy OUTPUT/multi30k to the root
of the checkout. FOLDER is data/task1/tok of the public repository multi30k/dataset.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

LIMIT = 60e6  # bytes
WHEELS = (
    "ml_collections tensorflow-datasets grain array_record dm-tree immutabledict simple_parsing "
    "docstring_parser toml tensorflow-metadata googleapis-common-protos protobuf "
    "importlib_resources etils termcolor babel tensorboardX zipp tzdata portalocker wadler-lindig"
).split()
FROM_SOURCE = ["promise"]  # has no wheel
PLATFORMS = [
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "any",
]


def main() -> None:
    """Writes the folder and prints its size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, nargs="?", default=Path("offline"))
    parser.add_argument("--python", default="3.12", help="Python version of the target machine")
    parser.add_argument(
        "--multi30k",
        type=Path,
        help="folder with train.lc.norm.tok.en and so on, gzip or not",
    )
    arguments = parser.parse_args()
    output = arguments.output
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    target = ["--python-version", arguments.python, "--only-binary=:all:"]
    target += [option for platform in PLATFORMS for option in ("--platform", platform)]
    subprocess.run([*pip, "download", "--no-deps", "--dest", output, *target, *WHEELS], check=True)
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", output, *FROM_SOURCE], check=True)
    if arguments.multi30k:
        copy_multi30k(arguments.multi30k, output / "multi30k" / "tok")
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    print(f"{output}: {size / 1e6:.1f} MB")
    if size > LIMIT:
        sys.exit(f"{output}: more than {LIMIT / 1e6:.0f} MB")


def copy_multi30k(source: Path, target: Path) -> None:
    """Copies the English and German halves of the three splits.

    Raises:
      SystemExit: a file is missing.
    """
    target.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val", "test_2016_flickr"):
        for language in ("en", "de"):
            name = f"{split}.lc.norm.tok.{language}"
            found = [path for path in (source / name, source / f"{name}.gz") if path.is_file()]
            if not found:
                sys.exit(
                    f"--multi30k={source}: no {name}, gzip or not; expected data/task1/tok "
                    "of multi30k/dataset"
                )
            shutil.copy(found[0], target)


if __name__ == "__main__":
    main()
