"""The pictures of a run: its arrays, computed and handed to `plots`. Each function returns the files it wrote."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from flaxformer_lite import trained
from flaxformer_lite.config import ModelConfig
from flaxformer_lite.fields import BOS, EOS
from flaxformer_lite.model import positions as schemes
from flaxformer_lite.model import transformer
from flaxformer_lite.plotting import plots
from flaxformer_lite.runs import metrics_log
from flaxformer_lite.runs import workdir as workdir_lib
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import write_whole
from flaxformer_lite.training import optim

POSITIONS = 64  # drawn of each scheme


def attention_maps(run: trained.Trained, text: str) -> list[plots.AttentionMap]:
    """Every weight that the model gives while it reads `text`, and writes its translation if it has a decoder.

    A row of a decoder's map is the token that is being written; its columns are the tokens that were read for it.

    Raises:
      InputError: the text has no token, or more than the model takes.
    """
    (ids,) = run.encode([text])
    if not len(ids):
        raise InputError("--text: expected a text with at least one token, got none.")
    # Only the reference makes weights; what it computes is the same.
    model = transformer.build_model(dataclasses.replace(run.config.model, backend="reference"))
    architecture = run.config.model.architecture
    source = [*([BOS] if architecture == "encoder_classifier" else []), *ids, EOS]
    encoded = source
    if architecture == "encoder_decoder":
        (target,) = trained.make_decoder(run.model, run.config, run.mesh)(run.params, [ids])
        longest = run.config.model.max_length  # where a translation may have ended without its end symbol
        written = [*target, EOS][:longest]
        inputs = [source, [BOS, *target][:longest]]
        if run.config.model.decoder == "masked":  # it reads what it writes, after the symbol that tells the length
            inputs, encoded = [source, written], [transformer.LENGTH, *source]
    else:
        written, inputs = source, [source if architecture == "encoder_classifier" else [BOS, *ids]]
    arrays = [jnp.array([row], jnp.int32) for row in inputs]
    _, kept = model.apply({"params": run.params}, *arrays, mutable=["intermediates"])
    read, written = (run.tokenizer.pieces(row, side="target") for row in (inputs[-1], written))
    source, encoded = (run.tokenizer.pieces(row) for row in (source, encoded))
    kinds = {
        "encoder self-attention": (r"encoder.*self_attention", encoded, encoded),
        "decoder self-attention": (r"decoder.*self_attention", written, read),
        "cross-attention": (r"decoder.*cross_attention", written, source),
    }
    weights = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(kept)}
    maps = []
    for name, (pattern, queries, keys) in kinds.items():
        layers = [weights[path][0] for path in sorted(weights, key=_layer) if re.search(pattern, path)]
        if layers:
            maps.append(plots.AttentionMap(name, queries, keys, np.stack(layers)))
    return maps


def _layer(path: str) -> int:
    return int(re.search(r"layers_(\d+)", path)[1])


def attention(workdir: Path, text: str, output: Path) -> list[Path]:
    """Static pictures of every layer and head, and one page to explore them on."""
    maps = attention_maps(trained.load(workdir), text)
    grid = lambda each: (each.weights_NHTS, each.query_tokens, each.key_tokens)  # noqa: E731
    figures = {each.name.replace(" ", "_"): plots.attention_grid(*grid(each), title=each.name) for each in maps}
    written, page = _save(figures, output), output / "attention.html"
    with _named(output):
        write_whole(page, plots.attention_page(maps, title=text))
    return [*written, page]


def position_codes(config: ModelConfig, params: dict) -> dict[str, np.ndarray]:
    """Each scheme that is a vector a position (or, for 'relative', an offset), by its name: (L, width)."""
    at_L = jnp.arange(POSITIONS)
    even = lambda width: width + width % 2  # noqa: E731  (for the schemes that pair dimensions)
    ones_1L1K = jnp.ones((1, POSITIONS, 1, even(config.d_head or config.d_model // config.num_heads)))
    return {
        "sinusoidal": schemes.sinusoidal(at_L, even(config.d_model)),
        **_tables(schemes.LearnedPositions(POSITIONS, config.d_model), "learned", "embedding", params, at_L[None]),
        "rotary (of a vector of ones)": schemes.rotary(ones_1L1K, at_L[None], base=config.rope_base)[0, :, 0],
        **_tables(schemes.RelativeVectors(config), "relative", "key", params, method="score_bias"),
    }


def position_curves(config: ModelConfig, params: dict) -> dict[str, np.ndarray]:
    """Each scheme that adds to the scores, by its name: (H, offset from -POSITIONS to POSITIONS)."""
    query_11, key_1L = jnp.zeros((1, 1), jnp.int32), jnp.arange(-POSITIONS, POSITIONS + 1)[None]
    curves = {"alibi": schemes.alibi(query_11, key_1L, num_heads=config.num_heads)[0, :, 0]}
    t5 = schemes.PositionBias(dataclasses.replace(config, position="t5_bias"), bidirectional=True)
    for name, table_RH in _tables(t5, "position_bias", "embedding", params).items():
        sides = {"bidirectional": "decoder" not in name or config.decoder == "masked"}
        curves[name.replace("position_bias", "t5_bias")] = schemes.t5_bias(table_RH, query_11, key_1L, **sides)[0, :, 0]
    return curves


def _tables(module: nn.Module, place: str, leaf: str, params: dict, *inputs, **options) -> dict[str, np.ndarray]:
    """The tables that training made in `params` under `place`; without any, the one that `module` begins with."""
    flat = traverse_util.flatten_dict(params, sep="/")
    found = {path: table for path, table in flat.items() if path.endswith(f"{place}/{leaf}")}
    if found:
        return {path.removesuffix(f"/{leaf}"): np.asarray(table) for path, table in found.items()}
    return {f"{place} (untrained)": module.init(jax.random.key(0), *inputs, **options)["params"][leaf]}


def positions(workdir: Path, output: Path) -> list[Path]:
    """What each scheme does: the run's own with what it has learned, the others as they begin."""
    run = trained.load(workdir)
    codes, curves = position_codes(run.config.model, run.params), position_curves(run.config.model, run.params)
    figures = {
        "positions": plots.positions({name: np.asarray(code) for name, code in codes.items()}),
        "position_scores": plots.position_scores(np.arange(-POSITIONS, POSITIONS + 1), curves),
        "positions_that_fail": plots.codes_that_fail(np.asarray(codes["sinusoidal"])),
    }
    return _save(figures, output)


def schedule(workdir: Path, output: Path) -> list[Path]:
    """The learning rate of every step of a run."""
    config = workdir_lib.read_config(workdir)
    step_N = np.arange(1, config.train.num_steps + 1)
    sizes = {"d_model": config.model.d_model, "num_steps": config.train.num_steps}
    rates = {config.optim.schedule: np.asarray(optim.learning_rate(step_N, config.optim, **sizes))}
    return _save({"schedule": plots.schedule(rates)}, output)


def metrics(workdirs: Sequence[Path], output: Path) -> list[Path]:
    """The curves of several runs, one panel a metric: over steps, and over time if all lines tell it.

    Raises:
      InputError: a folder is no run, or has logged nothing yet.
    """
    runs = {}
    for folder in workdirs:
        workdir_lib.read_config(folder)
        runs[str(folder)] = metrics_log.read_metrics(workdir_lib.Workdir(folder).metrics)
        if not runs[str(folder)]:
            raise InputError(f"{folder}: there is nothing in metrics.jsonl yet; train this run first.")
    figures = {"metrics": plots.metrics(runs)}
    if all("seconds" in record for run in runs.values() for record in run):
        figures["metrics_over_time"] = plots.metrics(runs, over="minutes")
    return _save(figures, output)


def _save(figures: Mapping[str, plots.Figure], output: Path) -> list[Path]:
    with _named(output):
        return [path for name, figure in figures.items() for path in plots.save(figure, output, name)]


@contextlib.contextmanager
def _named(output: Path) -> Iterator[None]:
    """Says of what cannot be written that it is `output`."""
    try:
        yield
    except OSError as error:
        raise InputError(f"--output={output}: cannot be written to: {error.strerror or error}.") from error
