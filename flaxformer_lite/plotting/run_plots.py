"""Plots a run: computes its arrays, and writes the figures of `plots`."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from flaxformer_lite import trained
from flaxformer_lite.decoding import cross_attention
from flaxformer_lite.fields import BOS, EOS, ModelConfig
from flaxformer_lite.model import positions as schemes
from flaxformer_lite.model import transformer
from flaxformer_lite.model.parameters import Params
from flaxformer_lite.plotting import attention_page, fonts, plots
from flaxformer_lite.runs import metrics_log
from flaxformer_lite.runs import workdir as workdir_lib
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import write_whole
from flaxformer_lite.training import schedules

POSITIONS = 64  # plotted for each scheme


def attention_maps(run: trained.Trained, text: str) -> list[attention_page.AttentionMap]:
    """Returns the attention weights of the model for `text`, and for its translation, if any.

    The queries of a decoder are labelled with the tokens that it predicts, and the keys with its
    input tokens.

    Raises:
      InputError: the text has no token, or more than the model takes.
    """
    (ids,) = run.encode([text])
    if not len(ids):
        raise InputError("--text: expected a text with at least one token, got none.")
    architecture = run.config.model.architecture
    source = [*([BOS] if architecture == "encoder_classifier" else []), *ids, EOS]
    aligned: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    encoded = source
    if architecture == "encoder_decoder":
        decoder = trained.make_decoder(run.model, run.config, run.mesh, run.tokenizer)
        (target,) = decoder(run.params, [ids])
        longest = run.config.model.max_length  # such a translation has no end symbol
        predicted = [*target, EOS][:longest]
        aligned = {"cross-attention": (_words(run, predicted, "target"), _words(run, source))}
        inputs = [source, [BOS, *target][:longest]]
        if run.config.model.decoder == "masked":  # reads its own output; LENGTH precedes the source
            inputs, encoded = [source, predicted], [transformer.LENGTH, *source]
    else:
        inputs = [source if architecture == "encoder_classifier" else [BOS, *ids]]
        predicted = source
    arrays = [jnp.array([row], jnp.int32) for row in inputs]
    weights = cross_attention.attention_weights(run.config.model, run.params, *arrays)
    read, predicted = (run.tokenizer.pieces(row, side="target") for row in (inputs[-1], predicted))
    source, encoded = (run.tokenizer.pieces(row) for row in (source, encoded))
    tokens = {
        "encoder self-attention": (encoded, encoded),
        "decoder self-attention": (predicted, read),
        "cross-attention": (predicted, source),
    }
    stacked = {name: np.stack([each[0] for each in layers]) for name, layers in weights.items()}
    return [
        attention_page.AttentionMap(name, *tokens[name], weights_NHTS, aligned.get(name))
        for name, weights_NHTS in stacked.items()
    ]


def _words(run: trained.Trained, ids: Sequence[int], side: str = "source") -> np.ndarray:
    """Returns for each id whether alignments count it: no end symbol, and no white space."""
    pieces = run.tokenizer.pieces(ids, side=side)
    return np.array(
        [i != EOS and piece.strip() != "" for i, piece in zip(ids, pieces, strict=True)]
    )


def attention(workdir: Path, text: str, output: Path) -> list[Path]:
    """Writes figures of all layers and heads, and a page to explore them; returns the paths."""
    maps = attention_maps(trained.load(workdir), text)
    figures = {
        each.name.replace(" ", "_"): plots.attention_grid(
            each.weights_NHTS, each.query_tokens, each.key_tokens, title=each.name
        )
        for each in maps
    }
    paths, page = _save(figures, output), output / "attention.html"
    with _output_errors(output):
        write_whole(page, attention_page.html_page(maps, title=text))
    return [*paths, page]


def position_codes(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """Returns the vectors (L, width) of each scheme that has one a position, by its name.

    'relative' has one an offset.
    """
    at_L = jnp.arange(POSITIONS)
    d_head = _even(config.d_head or config.d_model // config.num_heads)
    ones_1L1K = jnp.ones((1, POSITIONS, 1, d_head))
    rotated_1L1K = schemes.rotary(ones_1L1K, at_L[None], base=config.rope_base)
    learned = schemes.LearnedPositions(POSITIONS, config.d_model)
    relative = schemes.RelativeVectors(config)
    return {
        "sinusoidal": np.asarray(schemes.sinusoidal(at_L, _even(config.d_model))),
        **_tables(learned, "learned", "embedding", params, at_L[None]),
        "rotary (of a vector of ones)": np.asarray(rotated_1L1K[0, :, 0]),
        **_tables(relative, "relative", "key", params, method="score_bias"),
    }


def _even(width: int) -> int:
    """Returns a width for the schemes that pair dimensions."""
    return width + width % 2


def position_curves(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """Returns the biases of each scheme that adds to the scores, by its name: (H, L).

    The offsets L are -POSITIONS to POSITIONS.
    """
    query_11, key_1L = jnp.zeros((1, 1), jnp.int32), jnp.arange(-POSITIONS, POSITIONS + 1)[None]
    alibi = schemes.alibi(query_11, key_1L, num_heads=config.num_heads)
    curves = {"alibi": np.asarray(alibi[0, :, 0])}
    t5 = schemes.PositionBias(dataclasses.replace(config, position="t5_bias"), bidirectional=True)
    for name, table_RH in _tables(t5, "position_bias", "embedding", params).items():
        bidirectional = "decoder" not in name or config.decoder == "masked"
        bias = schemes.t5_bias(jnp.asarray(table_RH), query_11, key_1L, bidirectional=bidirectional)
        curves[name.replace("position_bias", "t5_bias")] = np.asarray(bias[0, :, 0])
    return curves


def _tables(
    module: nn.Module, scope: str, leaf: str, params: Params, *inputs: Any, **options: Any
) -> dict[str, np.ndarray]:
    """Returns the trained tables of `params` under `scope`, or else the initial one of `module`."""
    flat = traverse_util.flatten_dict(params, sep="/")
    found = {path: table for path, table in flat.items() if path.endswith(f"{scope}/{leaf}")}
    if found:
        return {path.removesuffix(f"/{leaf}"): np.asarray(table) for path, table in found.items()}
    initial = module.init(jax.random.key(0), *inputs, **options)["params"]
    return {f"{scope} (untrained)": initial[leaf]}


def positions(workdir: Path, output: Path) -> list[Path]:
    """Writes figures of all schemes, the run's own with its trained tables; returns the paths."""
    run = trained.load(workdir)
    codes = position_codes(run.config.model, run.params)
    curves = position_curves(run.config.model, run.params)
    figures = {
        "positions": plots.positions({name: np.asarray(code) for name, code in codes.items()}),
        "position_scores": plots.position_scores(np.arange(-POSITIONS, POSITIONS + 1), curves),
        "positions_that_fail": plots.codes_that_fail(np.asarray(codes["sinusoidal"])),
    }
    return _save(figures, output)


def schedule(workdir: Path, output: Path) -> list[Path]:
    """Writes the figure of the learning rate of every step of a run; returns the paths."""
    config = workdir_lib.read_config(workdir)
    step_N = np.arange(1, config.train.num_steps + 1)
    d_model, num_steps = config.model.d_model, config.train.num_steps
    rate_N = schedules.learning_rate(step_N, config.optim, d_model=d_model, num_steps=num_steps)
    rates = {config.optim.schedule: np.asarray(rate_N)}
    return _save({"schedule": plots.schedule(rates)}, output)


def metrics(workdirs: Sequence[Path], output: Path) -> list[Path]:
    """Writes figures of the metrics of runs over steps, and over time if logged; returns the paths.

    Raises:
      InputError: a folder is not a run, or has no metrics yet.
    """
    runs = {}
    for folder in workdirs:
        workdir_lib.read_config(folder)
        runs[str(folder)] = metrics_log.read_metrics(workdir_lib.Workdir(folder).metrics)
        if not runs[str(folder)]:
            raise InputError(
                f"{folder}: there is nothing in metrics.jsonl yet; train this run first."
            )
    figures = {"metrics": plots.metrics(runs)}
    if all("seconds" in record for run in runs.values() for record in run):
        figures["metrics_over_time"] = plots.metrics(runs, over="minutes")
    return _save(figures, output)


def _save(figures: plots.Figures, output: Path) -> list[Path]:
    fonts.choose(figures.values())
    with _output_errors(output):
        return [
            path for name, figure in figures.items() for path in plots.save(figure, output, name)
        ]


@contextlib.contextmanager
def _output_errors(output: Path) -> Iterator[None]:
    """Converts an OSError in the block to an InputError that names `output`."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"--output={output}: cannot be written to: {error.strerror or error}."
        ) from error
