"""A tokenizer for each side: its file, its ids, its training texts, and copies of other files."""

import dataclasses
import io
import pickle
import zipfile

import numpy as np
import phones
import pytest

from flaxformer_lite.checks.vocabularies import expected_vocabularies, vocabulary_sizes
from flaxformer_lite.config import default_config, resolve
from flaxformer_lite.data.batches.loader import Tokens
from flaxformer_lite.data.pipeline import Split
from flaxformer_lite.data.sources.examples import Examples
from flaxformer_lite.data.tokens import given_tokenizer, store, subwords, tokenizer
from flaxformer_lite.data.tokens.ragged import Ragged
from flaxformer_lite.data.tokens.subwords import SubwordSampler
from flaxformer_lite.data.tokens.two_vocabularies import TwoVocabularies, sizes
from flaxformer_lite.exchange import tokenizer_code
from flaxformer_lite.fields import EOS, UNK
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import run_report

WORDS = phones.words(211)
PHONES = [phones.phones_of(word) for word in WORDS]
# The symbols of each side, with 4 special tokens: 19 letters; 8 phones and SH.
LETTERS, SYMBOLS = 23, 13


@dataclasses.dataclass
class Corpus:
    """A reader of texts in memory."""

    folder: object = None
    source: list = dataclasses.field(default_factory=lambda: WORDS)
    target: list = dataclasses.field(default_factory=lambda: PHONES)
    columns = {"source": ("", "word"), "target": ("", "phones")}
    files = (("train", 0, 92, 7919, 1),)
    part = None  # of whole files
    name, split = "texts/word-phones", "train"

    def __len__(self):
        return len(self.source)

    def __call__(self, numbers):
        return Examples([self.source[i] for i in numbers], [self.target[i] for i in numbers])


def config_of(**data):
    config = default_config()
    config.data.update(dict(tokenizer="char", vocab_size=None, target_tokenizer="spaces") | data)
    return resolve(config)


def provided(path, config, given=None):
    subwords.provide_tokenizer(config, Corpus(), path, given=given)
    return tokenizer.load(path)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("pair") / "tokenizer.model"
    provided(path, config_of())
    return path


@pytest.fixture(scope="module")
def pair(file):
    return tokenizer.load(file)


def test_each_tokenizer_has_the_symbols_of_its_own_side(pair):
    assert isinstance(pair, TwoVocabularies) and sizes(pair) == (LETTERS, SYMBOLS)
    assert set(pair.vocabulary_of("source")[4:]) == set(phones.LETTERS)
    assert set(pair.vocabulary_of("target")[4:]) == {*phones.PHONES.values()}


def test_texts_of_each_side_are_encoded_by_its_tokenizer_and_outputs_are_of_the_target(pair):
    source, target = ([row.tolist() for row in pair.encode(texts, side=side)]
                      for side, texts in (("source", WORDS), ("target", PHONES)))  # fmt: skip
    assert source == [row.tolist() for row in pair.source.encode(WORDS)]
    assert target == [row.tolist() for row in pair.target.encode(PHONES)]
    assert pair.decode(np.array([*row, EOS, 5]) for row in target) == PHONES
    assert pair.pieces(source[0]) == list(WORDS[0])
    assert pair.pieces(target[0], side="target") == PHONES[0].split()
    assert pair.encode(PHONES[:1])[0].tolist().count(UNK) > 0


def test_a_file_has_the_bytes_of_both_and_they_depend_on_nothing_else(file, pair, tmp_path):
    again = provided(tmp_path / "again", config_of())
    assert (tmp_path / "again").read_bytes() == file.read_bytes() == pair.content
    assert again.fingerprint == pair.fingerprint
    other = TwoVocabularies(pair.target, pair.source)
    assert other.fingerprint != pair.fingerprint and other.content != pair.content
    restored = pickle.loads(pickle.dumps(pair))
    assert restored.encode(WORDS[:1], side="source")[0].tolist() == pair.encode(WORDS)[0].tolist()


def test_stored_ids_of_a_side_are_those_of_every_run_with_its_tokenizer(pair, tmp_path):
    (tmp_path / "tokens").mkdir()
    reader = Corpus(folder=tmp_path)

    def folders():
        return {path.name for path in (tmp_path / "tokens").iterdir() if path.is_dir()}

    alone = store.tokenised(reader, pair.source, processes=1, show=False)
    before = folders()
    both = store.tokenised(reader, pair, processes=1, show=False)
    assert len(before) == 2 and len(folders() - before) == 1
    assert both["source"].values.tobytes() == alone["source"].values.tobytes()
    assert [ids.tolist() for ids in both["target"]] == [
        ids.tolist() for ids in pair.encode(PHONES, side="target")
    ]


def test_only_sources_are_normalised(file):
    nfkc = tokenizer.load(file, "nfkc")
    assert nfkc.encode(["ﬁ"])[0].tolist() == nfkc.encode(["fi"])[0].tolist()
    assert nfkc.made_by("source") != tokenizer.load(file).made_by("source")
    assert nfkc.made_by("target") == tokenizer.load(file).made_by("target")


def zipped(**files):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in files.items():
            archive.writestr(name.replace("__", "/"), data)
    return content.getvalue()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"source__tokenizer.model": b"{}"}, "expected the tokenizers of source and target"),
        ({"special.json": b"{}"}, "expected the tokenizer of a Marian model"),
        (
            {"source__tokenizer.model": b"x", "target__tokenizer.model": b"x"},
            "expected a SentencePiece model",
        ),
    ],
)
def test_a_damaged_archive_is_refused_with_its_path(files, message, tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(zipped(**files))
    with pytest.raises(InputError, match=f"^{path}: {message}"):
        tokenizer.load(path)


# Subwords of both sides.


def test_two_subword_tokenizers_of_one_kind_are_sampled_each_with_its_own_pieces(tmp_path):
    config = config_of(
        tokenizer="unigram",
        target_tokenizer="unigram",
        vocab_size=283,
        target_vocab_size=274,  # the most that these texts have
        subword_sampling=0.1,
    )
    tokens = provided(tmp_path / "tokenizer.model", config)
    assert sizes(tokens) == (283, 274)
    sampler = SubwordSampler(Corpus(), tokens, kind="unigram", strength=0.1, seed=5)
    sampled = sampler(np.arange(len(WORDS)), 0)
    assert tokens.source.decode(sampled["source"]) == WORDS
    assert tokens.decode(sampled["target"]) == PHONES
    usual = Ragged.of(tokens.encode(WORDS))
    assert sampled["source"].lengths().sum() > usual.lengths().sum()


# Copies of files.


def test_a_side_is_copied_from_a_file_and_the_other_one_is_trained(file, pair, tmp_path):
    alone = tmp_path / "target.model"
    alone.write_bytes(pair.target.content)
    config = config_of(target_tokenizer_file=str(alone), tokenizer="byte")
    made = provided(tmp_path / "made", config, given_tokenizer.of_files(config))
    assert made.target.fingerprint == pair.target.fingerprint and made.source.kind == "byte"


def test_a_workdir_with_two_vocabularies_gives_each_side_its_own(file, pair, tmp_path):
    for kept, field in (("source", "tokenizer_file"), ("target", "target_tokenizer_file")):
        config = config_of(**{field: str(file.parent)})
        given = given_tokenizer.of_files(config)
        assert getattr(given, kept).fingerprint == getattr(pair, kept).fingerprint
        assert {given.source, given.target} & {None}
    config = config_of(tokenizer_file=str(file), target_tokenizer_file=str(file))
    made = provided(tmp_path / "made", config, given_tokenizer.of_files(config))
    assert made.fingerprint == pair.fingerprint


def test_a_file_of_another_kind_or_size_is_refused_by_the_field_of_its_side(file, pair, tmp_path):
    alone = tmp_path / "source.model"
    alone.write_bytes(pair.source.content)
    for data, message in (
        ({"target_tokenizer_file": str(alone)}, r"config\.data\.target_tokenizer: .* is 'char'"),
        ({"target_tokenizer_file": "none"}, r"config\.data\.target_tokenizer_file: expected"),
        (
            {"target_tokenizer_file": str(file), "target_vocab_size": 11},
            rf"config\.data\.target_vocab_size: .* has {SYMBOLS} pieces, got 11; set "
            rf"data\.target_vocab_size={SYMBOLS}",
        ),
        ({"tokenizer_file": str(file), "tokenizer": "word"}, r"config\.data\.tokenizer: .* 'char'"),
    ):
        with pytest.raises(InputError, match=rf"^{message}"):
            given_tokenizer.of_files(config_of(**data))
    shared = config_of(target_tokenizer=None)
    with pytest.raises(InputError, match=r"^config\.data\.target_tokenizer: .* got None"):
        given_tokenizer.check(pair, shared, source="the run")
    with pytest.raises(InputError, match=r"^config\.data\.target_tokenizer: .* got None"):
        given_tokenizer.of_files(config_of(target_tokenizer=None, tokenizer_file=str(file)))
    given_tokenizer.check(pair, config_of(), source="the run")


def test_a_run_takes_both_tokenizers_of_its_parent_or_the_shared_one_for_each_side(pair, tmp_path):
    given = given_tokenizer.of_parent(pair, config_of())
    assert provided(tmp_path / "same", config_of(), given).fingerprint == pair.fingerprint
    config = config_of(target_tokenizer="char")
    given_tokenizer.check(pair.source, config, source="the run")
    given = given_tokenizer.of_parent(pair.source, config)
    made = provided(tmp_path / "shared", config, given)
    assert made.source.fingerprint == made.target.fingerprint == pair.source.fingerprint


# Settings.


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"tokenizer": "marian", "vocab_size": 97}, "target_tokenizer: an imported tokenizer"),
        ({"target_tokenizer": "bpe"}, "target_vocab_size: expected a number of pieces for "
         r"data\.target_tokenizer='bpe', got None"),
        ({"target_tokenizer": "byte", "target_vocab_size": 97},
         r"target_vocab_size: data\.target_tokenizer='byte' has its own size"),
        ({"target_tokenizer": "huggingface"}, "target_tokenizer_file: required by "
         r"data\.target_tokenizer='huggingface'"),
        ({"subword_sampling": 0.1}, "subword_sampling: requires 2 tokenizers of one kind"),
        ({"tokenizer": "bpe", "vocab_size": 97, "target_tokenizer": "unigram",
          "target_vocab_size": 97, "subword_sampling": 0.1}, "subword_sampling: requires 2"),
        ({"target_tokenizer_file": " "}, "target_tokenizer_file: expected a path"),
        ({"vocab_limit": "soft"}, "vocab_limit: has no effect with data.tokenizer='char'"),
        ({"tokenizer_file": "a", "target_tokenizer_file": "b", "tokenizer": "bpe",
          "vocab_size": 97, "vocabulary_sample": 7}, "vocabulary_sample: is for training"),
    ],
)  # fmt: skip
def test_settings_that_contradict_two_vocabularies_are_refused_by_name(data, message):
    with pytest.raises(InputError, match=rf"^config\.data\.{message}"):
        config_of(**data)


def test_a_setting_that_one_of_the_tokenizers_reads_is_accepted():
    bpe = {"target_tokenizer": "bpe", "target_vocab_size": 97}
    config = config_of(**bpe, vocab_limit="soft", vocabulary_sample=7, character_coverage=0.99)
    assert config.data.vocab_limit == "soft"
    assert config_of(**bpe, tokenizer_file="a", vocabulary_sample=7).data.vocabulary_sample == 7


@pytest.mark.parametrize(
    ("field", "init", "message"),
    [
        ("vocabulary", {"vocabulary": "extend"}, r"init\.vocabulary: 'extend' requires one"),
        ("file", {}, r"data\.target_tokenizer_file: the tokenizers are those of init\.run"),
    ],
)
def test_a_start_from_another_run_keeps_both_vocabularies(field, init, message):
    config = default_config()
    config.data.update(tokenizer="bpe", vocab_size=97, target_tokenizer="bpe", target_vocab_size=97)
    config.init.update(run="A", **init)
    if field == "file":
        config.data.target_tokenizer_file = "a"
    with pytest.raises(InputError, match=rf"^config\.{message}"):
        resolve(config)


def test_a_source_may_have_the_mask_symbol_of_a_masked_decoder_and_a_target_may_not():
    def resolved(**data):
        config = default_config()
        config.model.decoder, config.decode.method = "masked", "mask_predict"
        config.data.update(tokenizer="word", target_tokenizer="word", **data)
        return resolve(config)

    assert resolved(vocab_size=97).data.vocab_size == 97
    with pytest.raises(InputError, match=r"data\.target_tokenizer='word' may contain it; use "
                                         r"all .* \(data\.target_vocab_size=None"):  # fmt: skip
        resolved(vocab_size=97, target_vocab_size=89)


def test_a_model_that_contradicts_the_size_of_a_side_is_refused_by_its_field():
    config = default_config()
    config.data.update(tokenizer="char", target_tokenizer="bpe", target_vocab_size=97)
    config.model.target_vocab_size = 89
    message = r"^config\.model\.target_vocab_size: 89 contradicts data\.target_vocab_size = 97"
    with pytest.raises(InputError, match=message):
        resolve(config)


def test_the_sizes_of_the_model_follow_from_the_tokenizers_or_from_the_config(pair):
    assert vocabulary_sizes(config_of(), sizes(pair)) == (LETTERS, SYMBOLS)
    subwords_too = config_of(target_tokenizer="bpe", target_vocab_size=97)
    assert vocabulary_sizes(subwords_too, (LETTERS, 97)) == (LETTERS, 97)
    assert expected_vocabularies(subwords_too, default=260) == (260, 97)
    with pytest.raises(InputError, match=r"^config\.model\.vocab_size: required by a plan"):
        expected_vocabularies(subwords_too)
    target_message = r"^config\.model\.target_vocab_size: required by a plan.*data\.target_vocab"
    with pytest.raises(InputError, match=target_message):
        expected_vocabularies(config_of(vocab_size=31))
    for config, found in (
        (config_of(), (LETTERS, None)),
        (config_of(target_tokenizer=None), (5, 7)),
    ):
        with pytest.raises(InputError, match=r"^config\.data\.target_tokenizer: the tokenizer of"):
            vocabulary_sizes(config, found)


# Reports, and code for cards.


def test_unknown_tokens_are_reported_by_side(pair, capsys):
    rows = {
        side: Ragged.of(pair.encode(texts, side=side))
        for side, texts in (("source", ["maX", "mo"]), ("target", ["P0 Q", "P1 P2"]))
    }
    split = Split(None, Tokens(rows["source"], rows["target"]), None)
    run_report.say_unknown({"train": split}, pair)
    assert capsys.readouterr().err.splitlines() == [
        "unknown characters of the sources: 1 of 5 in train (20.00%)",
        "unknown symbols of the targets: 1 of 4 in train (25.00%)",
    ]


def test_a_vocabulary_below_its_soft_limit_is_reported_by_its_field():
    config = config_of(target_tokenizer="bpe", target_vocab_size=997, vocab_limit="soft")
    (line,) = run_report.smaller_vocabularies(config, (LETTERS, 283))
    assert "283 pieces, fewer than data.target_vocab_size = 997" in line
    assert not list(run_report.smaller_vocabularies(config, (LETTERS, 997)))


def test_the_code_of_a_card_takes_pieces_of_the_source_and_joins_those_of_the_target(pair):
    code = tokenizer_code.of(pair)
    (source, *_), (target, *_) = WORDS, PHONES
    assert list(eval(code.pieces, {"text": source})) == list(source)
    assert eval(code.text.replace("{}", "found"), {"found": target.split()}) == target
    assert (code.packages, code.imports, code.setup) == ("", "", ())
    assert pair.models.keys() == {"source.tokenizer.model", "target.tokenizer.model"}
