"""Runs with random parameters and a tokenizer of characters, to score texts with."""

import dataclasses
import functools

import jax
import runs

from flaxformer_lite import rescore, trained, translate
from flaxformer_lite.cli.rescore_flags import parse_rescore
from flaxformer_lite.cli.rescore_lines import LineRescorer
from flaxformer_lite.config import Config, DataConfig, DecodeConfig, ModelConfig
from flaxformer_lite.data.tokens.symbol_tokenizer import SymbolTokenizer, counted
from flaxformer_lite.fields import EOS
from flaxformer_lite.lines.line_windows import Window
from flaxformer_lite.training import meshes

LETTERS = "abcdefg hijkl"
TOKENIZER = SymbolTokenizer(counted([LETTERS], kind="char"))
LONGEST = 16  # tokens with the end symbol: all texts have one padded length
MODEL = ModelConfig(
    vocab_size=TOKENIZER.vocab_size,
    d_model=14,
    num_heads=7,
    d_ff=11,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_length=LONGEST,
)
PAIRS = [("abc", "cab d"), ("ba", ""), ("a b", "b"), ("kl", "lk ah")]


@functools.cache
def run_of(architecture="encoder_decoder", *, data=(), d_ff=11, **decode):
    config = dataclasses.replace(MODEL, architecture=architecture, d_ff=d_ff)
    model, params = runs.varied_model(config)

    def with_ends(path, leaf):
        """Makes the end symbol more probable, so that some outputs have it and others are cut."""
        return leaf.at[EOS].multiply(-3) if "embedding" in jax.tree_util.keystr(path) else leaf

    params = jax.tree_util.tree_map_with_path(with_ends, params)
    whole = Config(
        model=config,
        data=DataConfig(
            **{
                "vocab_size": config.vocab_size,
                "dataset": "x",
                "tokens_per_batch": 8 * LONGEST,
                **dict(data),
            }
        ),
        decode=DecodeConfig(**{"max_extra_length": 5, **decode}),
    )
    mesh = meshes.make_mesh(1)
    return trained.Trained(whole, TOKENIZER, model, jax.device_put(params), mesh, None)


def with_data(**data):
    return tuple(data.items())


@functools.cache
def rescorer_of(architecture="encoder_decoder", *, data=(), d_ff=11, **options):
    return rescore.Rescorer(run_of(architecture, data=data, d_ff=d_ff), **options)


@functools.cache
def translator_of(**decode):
    return translate.Translator(run_of(**decode))


def request_of(*flags):
    return parse_rescore(["--workdir=w", *flags])


def lines_of(rescorer, lines, *flags):
    """The output of the command for lines of a file."""
    return LineRescorer(rescorer, request_of(*flags))(Window(lines, 0, "in.tsv, line"))


def as_lines(pairs=PAIRS):
    return ["\t".join(pair) for pair in pairs]
