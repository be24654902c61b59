"""Trains a config of Multi30k in several directions, and scores the test captions of 2016.

With `--kind=raw` the config `multi30k`, and sacreBLEU on raw text, greedy and with beam 5, alpha 1;
with `--kind=tok` the config `multi30k_tok`, and BLEU on tokenised text with beam 5, as published.
Each direction has the settings that were chosen for English to German. Finished runs are not
trained again, so an interrupted command can be started again.

    python -m benchmarks.multi30k --data=data/multi30k --directions en-fr de-en --seeds 0 1 2
    python -m benchmarks.multi30k --data=data/multi30k --kind=tok --directions en-fr --seeds 0
"""

import argparse
import functools
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks import figures, groups, public_data, train_config
from flaxformer_lite.system.errors import InputError

SOURCE = "data/task1 of https://github.com/multi30k/dataset"
LANGUAGES = ("cs", "de", "en", "fr")
PARTS = {"train": "train", "validation": "val", "test": "test_2016_flickr"}
ENDINGS = {"raw": "", "tok": ".lc.norm.tok"}
CONFIGS = {"raw": "multi30k", "tok": "multi30k_tok"}
DIGESTS = {
    "test_2016_flickr.cs": "45adb85f688de8407fddcbe1b36dca15d12aab868149b337e2576f2d6d2ff8d8",
    "test_2016_flickr.de": "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16",
    "test_2016_flickr.en": "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182",
    "test_2016_flickr.fr": "cb3160d69b002bb638e66cc7612fcd56cb0af82eadc9c142dedc438afb885ef6",
    "train.cs": "2be68b38c8d586ff4f54eb13cc6e1baaaa053695b3f070d3038303a47f2268da",
    "train.de": "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72",
    "train.en": "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6",
    "train.fr": "5925a3c18f1587b6b54b87743106e6e8ab93618edb6f65d19eac0621f853a10d",
    "val.cs": "d53827e469b0a1ca8d57e9e26b2b64c4bc4b33f5479c7b03ae87ae5c882c3e33",
    "val.de": "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660",
    "val.en": "1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227",
    "val.fr": "5304e444d842e962b2dda4d816b70b22a1765b15401642b7ca37a67477e708dc",
    "test_2016_flickr.lc.norm.tok.cs": (
        "748c8816de928732365176e5c5d2f9bbabcec9b8d4448fba2d230feb057898a7"
    ),
    "test_2016_flickr.lc.norm.tok.de": (
        "c6a33d39d48f9f510de147651316cd9d918e09ad0219df734a2f16b6baccacc4"
    ),
    "test_2016_flickr.lc.norm.tok.en": (
        "5b7f32627cf99eced828311b955dae9800bb52bc8b91cf8b6526829e605b29d2"
    ),
    "test_2016_flickr.lc.norm.tok.fr": (
        "1463bd5960f9bfe098ec3cd752d3df0c49c84dc646fb518964a29232658cd836"
    ),
    "train.lc.norm.tok.cs": "7645fb91efa18f94c83d493f740a5d5a941e4b01efa6a124bf2d4af040e133e0",
    "train.lc.norm.tok.de": "cb5a23529b65ec2061f1dc446192a9c37382b63cc75f81a0be59d34894b3a505",
    "train.lc.norm.tok.en": "08925f8e0572bcd5a006702fc5fe20e2d77c6917d4eebd576fc20de6693c2119",
    "train.lc.norm.tok.fr": "8fa41bb718412bcb7c5dfa58603842810a01543eae86a51279f9886b901266e1",
    "val.lc.norm.tok.cs": "b87ee4917f4a0f9ca6cca03e402026c9f4437dc1bd6a7dadfd2544ecfb6c5501",
    "val.lc.norm.tok.de": "97232bd273eceb7207f689527386a97e4be2616b18ada47576bdaf96c8ae1f00",
    "val.lc.norm.tok.en": "46573ce391ae227f1c72f873392436a20ef18e0a6d518098cfbd70b77c8572ec",
    "val.lc.norm.tok.fr": "b303e301aa21fe7822a846b2b3fb2d5a1121ec807cd5b1d006fb7b2b5507168a",
}
KEPT = "multi30k_scores.json"  # file of a workdir
BEAM = ["--method=beam", "--beam_size=5", "--alpha=1"]


def flags_of(folder: Path, direction: str, kind: str) -> list[str]:
    """Returns the flags that name the languages and the files of a direction, such as 'en-fr'.

    Raises:
      InputError: a file is missing, or has other contents.
    """
    languages = direction.split("-")
    names = {
        part: [f"{name}{ENDINGS[kind]}.{language}" for language in languages]
        for part, name in PARTS.items()
    }
    digests = {name: DIGESTS[name] for each in names.values() for name in each}
    paths = public_data.find(folder, digests, source=SOURCE)
    flags = [f"--config.data.languages={','.join(languages)}"]
    for part, each in names.items():
        files = ",".join(str(paths[name].absolute()) for name in each)
        flags.append(f"--config.data.{part}_files={files}")
    return flags


def scores_of(workdir: Path, kind: str) -> dict[str, float]:
    """Returns the scores of a finished run."""
    logged = train_config.scores_of(workdir)
    if kind == "tok":
        names = ["validation bleu_tokenized", "test bleu_tokenized"]
        return {name: logged[name] for name in [*names, "minutes"]}
    found = {name: logged[name] for name in ("validation bleu", "test bleu")}
    beam = train_config.evaluated(workdir, "test", BEAM)
    found |= {f"{name}, beam 5": beam[name] for name in ("test bleu", "test chrf")}
    return found | {"minutes": logged["minutes"]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains missing runs, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    public_data.add_flag(parser, "multi30k")
    directions = [f"{a}-{b}" for a in LANGUAGES for b in LANGUAGES if a != b]
    parser.add_argument("--directions", nargs="+", choices=directions, default=["en-fr"])
    parser.add_argument("--kind", choices=CONFIGS, default="raw", help="of the texts")
    parser.add_argument("--devices", type=int, help="CPU devices; default: 1 with all threads")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the runs")
    folder = figures.OUTPUT / "multi30k"
    parser.add_argument("--output", type=Path, default=folder, help="folder of the runs")
    figures.add_flag(parser)
    options, more = parser.parse_known_args(arguments)
    if options.devices:
        threads = train_config.ONE_THREAD_A_DEVICE.format(options.devices)
        os.environ["XLA_FLAGS"] = threads
    found: dict[str, dict[int, dict[str, float]]] = {}
    for direction in options.directions:
        try:
            flags = flags_of(options.data, direction, options.kind)
        except InputError as error:
            parser.error(str(error))
        folder = options.output / f"{direction}-{options.kind}"
        for seed in options.seeds:
            workdir = train_config.train(CONFIGS[options.kind], seed, folder, [*flags, *more])
            measure = functools.partial(scores_of, workdir, options.kind)
            scores = groups.kept(workdir / KEPT, measure)
            found.setdefault(f"{direction} {options.kind}", {})[seed] = scores
            print(f"{direction}, seed {seed}: {scores}", flush=True)
    print(groups.table(found, digits=2))
    figures.write(options.json, groups.figures_of(found))


if __name__ == "__main__":
    main()
