"""Trains the config `benchmarks/g2p` on each of 15 languages, and scores the phones of words.

Task 1 of SIGMORPHON 2020 (Gorman 2020): 3,600 words of each language to train on, 450 for choices
(`dev`), 450 to test. Figures, by greedy decoding of the best checkpoint on `dev`, in %:

  WER  words whose phones are not exactly right, `sequence_error_rate`
  PER  edits over reference phones, `symbol_error_rate`

of each language, and the mean over the languages, in which all have the same weight. `--part=dev`
prints the figures of `dev`, for choices. Words are decomposed (Unicode's NFD): a Korean syllable
becomes its letters, and an accent a symbol of its own.

`--together` trains one model on all the languages, with a symbol for the language in front of each
word. `--ensemble` also scores the mean probabilities of the seeds' models. Finished runs are not
trained again, so an interrupted command can be started again.

    python -m benchmarks.g2p --data=data/g2p --languages ady vie --seeds 0 1 2
"""

import argparse
import statistics
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from benchmarks import figures, groups, public_data, train_config
from benchmarks.public_data import Pair, Pairs
from flaxformer_lite import scoring, translate
from flaxformer_lite.system.errors import InputError

SOURCE = "task1/data of https://github.com/sigmorphon/2020"
DIGESTS = {
    "ady_train.tsv": "8ab54e92ecf5245ea2ed9a5677df890a3917372fb928e44c1df9b954ffe3c010",
    "ady_dev.tsv": "3a540e30adf286a226ab9faea9b0b08cf0726e8549cdbe8414ae1028a7f1f14f",
    "ady_test.tsv": "f873313ebf8afc63b55b8a2421225c4981b8556b88c6090bad7f8e362587aa59",
    "arm_train.tsv": "881b301408460b84443a768b697c7c1e5895994b6157daa3752a4078e088253b",
    "arm_dev.tsv": "13ac315cb0025b243455ec44b5c68a9b6b888071f85028a4b64f749fd6996bcf",
    "arm_test.tsv": "9957ae5d42f94fa9ae5ffe1737e75efe878b57034f3c40e68b4098f0654e82c4",
    "bul_train.tsv": "726c92b03b5f6e8d414d407141cb82a4782fdac7ef9c7bd3be3c91a5a650bb1f",
    "bul_dev.tsv": "813ac9f3983ad80538ea9aca5d4cc3cfe6308a27cc63076564c043f2650ae62c",
    "bul_test.tsv": "4e05ff7a239bda2ca83e6d167ce1497855f77c94a153892bbe1c9698346a6810",
    "dut_train.tsv": "ee825c27cf5cc82a097819bdd6ae50900e449e49504fa3c1d06b318301ef28aa",
    "dut_dev.tsv": "bb86ff20577e0c9706ce3aa88d2ea5963032212bc92facef251ba435f3eb791f",
    "dut_test.tsv": "f84dde7d2af37aabbb492bf8862be1e69bbe2b95e16728452775fd902cf94197",
    "fre_train.tsv": "fcc1c1c19a19381105662b412e8de1a143802da40fb401dd3cc452bc935128a6",
    "fre_dev.tsv": "eb2b3fb761b02591a93981c448c6c7972da0499fd0fb1d7a0b60142463f6b355",
    "fre_test.tsv": "cd75ca22c697f93e23d10898a87a86e1bc08d0d4eb318946f28e085cd1aca9a8",
    "geo_train.tsv": "5a9d9cadc41e6c514be51eb257f7005dea67f8a528db3f839cd9bc8f9799caf5",
    "geo_dev.tsv": "2f0b707103648fb09c04084a8f60a1307cf14b4bfd5d5892664ba32920604e59",
    "geo_test.tsv": "f5d2c616ae5800bb958cc03965179c588176356668e7b018fff21a9135f9a588",
    "gre_train.tsv": "acc3450422d1d44e5d596d6b5092919ebf5e0f8a26ddde4ccac7aa9dec1e0996",
    "gre_dev.tsv": "bac8a18261aa39e125db95423cc33dfaa60683d72eb2b0bb933f2f66b913c7a9",
    "gre_test.tsv": "a10265ed5370a687f2bc840d5ac7338c53b36b044d71e2bcfa0b359094f9fd2f",
    "hin_train.tsv": "74c5359152b21349bafafdc280b9f7ac1a8391056111f7442b3fed04c2a5251b",
    "hin_dev.tsv": "51807c402408a8da95fde02b9f9af35a39715ff0e31020f5fa95937962fa66a1",
    "hin_test.tsv": "027a4a65f3674c2fff19e1c6d28081c78bedc9d7858284143fb188c487c4e9ef",
    "hun_train.tsv": "e729f49b9b232848ee5bb98afeae2e236f1ec7d0e89d43cf930a9526ad1b9e1e",
    "hun_dev.tsv": "a77a59974f54d218e8c8cf2d38c5db5ee33fac4767e842d3cc0b9bad42cf7032",
    "hun_test.tsv": "314ebe4289c3aad2161e6bf93a684219541365d59771c98fb6fa81192482c6ce",
    "ice_train.tsv": "d3729c6306c6b20b873b1b8e94bc1fa3b70dce7f8c2e0179ad3a434c8803f2ef",
    "ice_dev.tsv": "5054f1051521f83acf137e918445052cc8702937131a7f7dac7b2b7dad6f78e4",
    "ice_test.tsv": "1da20f2fd807b797a6c5b6388e34253d8f874fa359435566632c3a058c80f56c",
    "jpn_train.tsv": "5a8adf93f79799b89ba1af4805caa482383dbd62365cca18d5ef5dd993b0c3ac",
    "jpn_dev.tsv": "ae61d965b012ae24cbf05d5bb7bf2c2fc721b9428c57828082e9d089a5020d79",
    "jpn_test.tsv": "78a5997238663d18267acbffa5a0fe8bcb245e7497b30c663e896a4b28e9a84f",
    "kor_train.tsv": "c0e509d5c604df2bb0d899fec7825985e2d48f6cbb7238b1cde5ab408716071f",
    "kor_dev.tsv": "0bf3b0676254dde2f087283f39f4a2f0ef2377000d0317be9c4b6cc8ef9ea23e",
    "kor_test.tsv": "65792f869e6426358b143aac664d14af6967f088513d1c34eff3ecbc6555024e",
    "lit_train.tsv": "0b2a516fd0832654ae8fba3037635a66cc3ad864e61139323bad009a2de4cb14",
    "lit_dev.tsv": "0dba9ff447458eb6a5e5275d44f33cb98218cb59c5f86984e1c9c86744eb334c",
    "lit_test.tsv": "a3daf8074296edcf6895828234e459e31a3f7cb654dd5354ba272dec74ef6332",
    "rum_train.tsv": "aac7c0bebd664e9f313bd444e6c4be56fb002b45d3054a75f0c1900dcb8f64f7",
    "rum_dev.tsv": "3169f34527ae54fe1bf4f0aaf3ac5dde71ba0eee31e40d4ff15e4e64a58675a9",
    "rum_test.tsv": "6327880174d182d997cd47cd810b8a7e428c2a6349195c5e12c0b628ac6abb20",
    "vie_train.tsv": "541f4b51c14305580a5766158a76e299836646eafcbfb2ed9b5e7e50ae3fa7e6",
    "vie_dev.tsv": "6d9f94f8f8229876bd029b4db9b42654d31f834bb096279108547a98319cb510",
    "vie_test.tsv": "b53eb1e6e7320395e8722b789d5f0bafdaa17c2484a61f5e952259c8f96c111a",
}
LANGUAGES = tuple(sorted({name.partition("_")[0] for name in DIGESTS}))
PARTS = {"train": "train", "validation": "dev", "test": "test"}  # of a run, and of the task
RATES = {"WER": "sequence_error_rate", "PER": "symbol_error_rate"}
Form = Literal["NFC", "NFD"]  # of Unicode
FIRST_TAG = 0xE000  # code points for private use: the tags of languages
# One model has more words to learn from, so it needs less dropout, and more steps.
TOGETHER = ["--config.model.dropout=0.2", "--config.train.eval_every=1000"]
Rates = dict[str, dict[int, dict[str, float]]]  # by language, by seed, by name


def pairs_of(text: str, *, form: Form = "NFC") -> list[tuple[str, str]]:
    """Returns the word, in a Unicode form, and the phones of each line 'word<TAB>phones'."""
    parted = (line.partition("\t") for line in text.splitlines())
    return [(unicodedata.normalize(form, word), phones) for word, _, phones in parted]


def parts_of(texts: Mapping[str, str], language: str, form: Form) -> dict[str, list[Pair]]:
    """Returns the pairs of 'train', 'validation' and 'test' of a language."""
    return {
        part: pairs_of(texts[f"{language}_{name}.tsv"], form=form) for part, name in PARTS.items()
    }


def tagged(pairs: Pairs, language: str) -> list[Pair]:
    """Returns the pairs with the tag of their language in front of each word."""
    tag = chr(FIRST_TAG + LANGUAGES.index(language))
    return [(tag + word, phones) for word, phones in pairs]


def rates_of(scores: Mapping[str, float], part: str) -> dict[str, float]:
    """Returns WER and PER of a part of a run, in percent."""
    return {name: scores[f"{part} {metric}"] for name, metric in RATES.items()}


def rates_by_language(
    workdirs: Sequence[Path], parts: Mapping[str, Pairs]
) -> dict[str, dict[str, float]]:
    """Returns WER and PER of each language's pairs, by greedy decoding of a run or an ensemble."""
    first, *others = workdirs
    translator = translate.load(first, ensemble=others, method="greedy")
    found = {}
    for language, pairs in parts.items():
        words, phones = map(list, zip(*pairs, strict=True))
        scores = scoring.score(translator(words), [phones], tokenized=True, symbols=True)
        found[language] = {name: scores.values[metric] for name, metric in RATES.items()}
    return found


def with_mean(rates: Rates) -> Rates:
    """Returns the rates of each language and, as 'mean', their mean of each seed.

    A seed without a run of each language has no mean.
    """
    shared = set.intersection(*({*seeds} for seeds in rates.values()))
    mean = {
        seed: {
            name: statistics.fmean(seeds[seed][name] for seeds in rates.values()) for name in RATES
        }
        for seed in sorted(shared)
    }
    return rates | {"mean": mean}


def each_alone(
    parts: Mapping[str, Mapping[str, Pairs]], options: argparse.Namespace, more: Sequence[str]
) -> dict[str, Rates]:
    """Trains a model for each language and seed, and returns the rates of 'alone'.

    With `--ensemble` also those of 'ensemble', as if of seed 0.
    """
    part = "test" if options.part == "test" else "validation"
    alone: Rates = {}
    ensemble: Rates = {}
    for language, of_language in parts.items():
        folder = options.output / f"{language}-{options.form}-{options.steps}"
        flags = public_data.write_parts(options.output / "data" / folder.name, of_language)
        workdirs = []
        for seed in options.seeds:
            seeded = [f"--config.data.seed={seed}", *flags]
            seeded += [f"--config.train.num_steps={options.steps}", *more]
            workdirs.append(train_config.train("benchmarks/g2p", seed, folder, seeded))
            scores = rates_of(train_config.scores_of(workdirs[-1]), part)
            alone.setdefault(language, {})[seed] = scores
            print(f"{language}, seed {seed}: {scores}", flush=True)
        if options.ensemble:
            pairs = {language: of_language[part]}
            ensemble[language] = {0: rates_by_language(workdirs, pairs)[language]}
            print(f"{language}, ensemble: {ensemble[language][0]}", flush=True)
    return {"alone": alone} | ({"ensemble": ensemble} if ensemble else {})


def all_together(
    parts: Mapping[str, Mapping[str, Pairs]], options: argparse.Namespace, more: Sequence[str]
) -> dict[str, Rates]:
    """Trains one model on all languages for each seed, and returns the rates of 'together'.

    With `--ensemble` also those of 'together, ensemble', as if of seed 0.
    """
    part = "test" if options.part == "test" else "validation"
    folder = options.output / f"together-{'-'.join(parts)}-{options.form}-{options.steps}"
    tagged_parts = {
        language: {name: tagged(pairs, language) for name, pairs in of_language.items()}
        for language, of_language in parts.items()
    }
    flags = public_data.write_parts(
        options.output / "data" / folder.name,
        {name: [pair for each in tagged_parts.values() for pair in each[name]] for name in PARTS},
    )
    scored = {language: of_language[part] for language, of_language in tagged_parts.items()}
    rates: Rates = {language: {} for language in parts}
    workdirs = []
    for seed in options.seeds:
        seeded = [f"--config.data.seed={seed}", *flags]
        seeded += [f"--config.train.num_steps={options.steps}", *TOGETHER, *more]
        workdirs.append(train_config.train("benchmarks/g2p", seed, folder, seeded))
        for language, of_language in rates_by_language([workdirs[-1]], scored).items():
            rates[language][seed] = of_language
        print(f"together, seed {seed}: {with_mean(rates)['mean'][seed]}", flush=True)
    found: dict[str, Rates] = {"together": rates}
    if options.ensemble:
        ensemble = rates_by_language(workdirs, scored)
        found["together, ensemble"] = {language: {0: each} for language, each in ensemble.items()}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains missing runs, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    public_data.add_flag(parser, "g2p")
    parser.add_argument("--languages", nargs="+", choices=LANGUAGES, default=LANGUAGES)
    parser.add_argument("--part", choices=("dev", "test"), default="test", help="of the figures")
    parser.add_argument("--form", choices=get_args(Form), default="NFD", help="of the words")
    parser.add_argument("--together", action="store_true", help="one model for all languages")
    parser.add_argument("--ensemble", action="store_true", help="also score the seeds as one")
    groups.add_flags(parser, "g2p", steps=2800)
    options, more = parser.parse_known_args(arguments)
    if options.ensemble and len(options.seeds) < 2:
        parser.error("--ensemble: expected 2 seeds or more; add them to --seeds.")
    try:
        texts = public_data.read(options.data, DIGESTS, source=SOURCE)
    except InputError as error:
        parser.error(str(error))
    parts = {language: parts_of(texts, language, options.form) for language in options.languages}
    measure = all_together if options.together else each_alone
    named: Rates = {}
    for kind, rates in measure(parts, options, more).items():
        suffix = "" if kind == "alone" else f" {kind}"
        named |= {f"{name}{suffix}": seeds for name, seeds in with_mean(rates).items()}
    print(groups.table(named, digits=2))
    figures.write(options.json, groups.figures_of(named))


if __name__ == "__main__":
    main()
