"""The counts of `benchmarks/layer_cost.py` against closed forms; its timings are not tested."""

import dataclasses
import importlib.util
import itertools
import math
import sys
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.model.attention import dot_product_attention
from flaxformer_lite.model.masks import AttentionMask, TokenPositions

pytestmark = pytest.mark.slow  # tests of a benchmark
FILE = Path(__file__).parent.parent.parent / "benchmarks" / "layer_cost.py"


@pytest.fixture(scope="module")
def layer_cost():
    """Returns the module of the benchmark, which is not in the package."""
    spec = importlib.util.spec_from_file_location("layer_cost", FILE)
    module = sys.modules["layer_cost"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["layer_cost"]


def jaxpr(function, *shapes):
    return jax.make_jaxpr(function)(
        *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    ).jaxpr


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def named(layer_cost, name):
    (layer,) = (layer for layer in layer_cost.LAYERS if layer.name.startswith(name))
    return layer


WINDOW, D, L = 32, 6, 70


@pytest.mark.parametrize(
    ("name", "forward", "more"),
    [
        ("self-attention", 2 * 2 * L**2 * D, 0),
        ("restricted", 2 * 2 * (3 * WINDOW) * (3 * WINDOW) * D, 0),  # 70 tokens are 3 blocks of 32
        ("LSTM", 2 * L * 8 * D**2, 0),  # 4 gates, of the input and of the state
        ("GRU", 2 * L * 6 * D**2, 0),
        # gradients include k - 1 tokens of padding
        ("convolution", 2 * L * 3 * D**2, 2 * 2 * 3 * D**2),
    ],
)
def test_flops_equal_the_closed_form_and_gradients_add_2_times_as_many(
    layer_cost, name, forward, more
):
    layer = named(layer_cost, name)
    assert layer_cost.flops(layer_cost.jaxpr_of(layer, L, D, False)) == forward
    assert layer_cost.flops(layer_cost.jaxpr_of(layer, L, D, True)) == 3 * forward + more


def test_flops_of_a_product_in_loops_count_for_each_iteration(layer_cost):
    def power(x, y):
        step = lambda y, _: (x @ y, None)  # noqa: E731
        return jax.lax.scan(lambda y, _: jax.lax.scan(step, y, length=5), y, length=3)[0]

    assert layer_cost.flops(jaxpr(power, (7, 7), (7, 11))) == 3 * 5 * 2 * 7 * 7 * 11


def test_flops_of_a_cond_are_those_of_its_most_expensive_branch(layer_cost):
    def either(x, y):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ y, lambda: x @ (x @ y))

    assert layer_cost.flops(jaxpr(either, (7, 7), (7, 11))) == 2 * 2 * 7 * 7 * 11


def test_products_in_a_while_loop_of_unknown_length_are_refused(layer_cost):
    def grow(x, of):
        return jax.lax.while_loop(lambda x: x.sum() < 3, of, x)

    with pytest.raises(ValueError, match="while loop"):
        layer_cost.flops(jaxpr(partial(grow, of=lambda x: x @ x), (7, 7)))
    assert layer_cost.flops(jaxpr(partial(grow, of=lambda x: x + 1), (7, 7))) == 0


def test_flops_of_a_grouped_convolution_are_those_of_its_groups(layer_cost):
    def convolve(x, kernel):
        numbers = ("NWC", "WIO", "NWC")
        return jax.lax.conv_general_dilated(
            x, kernel, (1,), "VALID", dimension_numbers=numbers, feature_group_count=2
        )

    assert layer_cost.flops(jaxpr(convolve, (1, 13, 10), (3, 5, 14))) == 2 * 11 * 14 * 3 * 5


@pytest.mark.parametrize("name", ["self-attention", "restricted", "LSTM", "GRU", "convolution"])
def test_the_exponents_of_flops_are_the_papers(layer_cost, name):
    layer = named(layer_cost, name)
    found = layer_cost.flops_exponents(layer, [64, 128, 512], [64, 128, 256])
    assert found == pytest.approx(layer.exponents, abs=0.05)


def test_a_slope_is_the_exponent_of_a_power_law(layer_cost):
    sizes = np.array([3.0, 7.0, 31.0])
    assert layer_cost.slope(sizes, 5 * sizes**1.75) == pytest.approx(1.75)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("self-attention", 0), ("restricted", 0), ("LSTM", L), ("GRU", L), ("convolution", 0)],
)
def test_only_recurrence_is_sequential_over_tokens_and_its_gradients_once_more(
    layer_cost, name, expected
):
    layer = named(layer_cost, name)
    assert layer_cost.sequential_operations(layer_cost.jaxpr_of(layer, L, D, False)) == expected
    assert layer_cost.sequential_operations(layer_cost.jaxpr_of(layer, L, D, True)) == 2 * expected


def test_only_loops_that_depend_on_each_other_add_up(layer_cost):
    def decay(x, length):
        return jax.lax.scan(lambda x, _: (x / 2, None), x, length=length)[0]

    def nested(x):
        return jax.lax.scan(lambda x, _: (decay(decay(x, 3), 2), None), x, length=7)[0]

    count = lambda function: layer_cost.sequential_operations(jaxpr(function, (5,)))  # noqa: E731
    assert count(lambda x: decay(jnp.sin(decay(x, 3)), 7)) == 3 + 7
    assert count(lambda x: decay(x, 3) + decay(x, 7)) == 7
    assert count(jax.jit(lambda x: decay(jnp.sin(x), 3))) == 3
    assert count(nested) == 7 * (3 + 2)


def test_the_path_is_the_number_of_layers_from_the_first_token_to_the_last(layer_cost):
    x_BLD = normal(1, 11, D)

    def layers(layer):
        params = layer_cost.params_of(layer, D)
        return itertools.repeat(partial(layer.apply, params))

    count = layer_cost.path_layers
    assert count(layers(named(layer_cost, "self-attention")), x_BLD) == 1
    assert count(layers(layer_cost.restricted(3)), x_BLD) == math.ceil(10 / 3)
    assert count(layers(named(layer_cost, "LSTM")), x_BLD) == 1
    assert count(layers(layer_cost.convolution(5)), x_BLD) == math.ceil(10 / 4)
    dilated = (next(layers(layer_cost.convolution(3, 3**i))) for i in itertools.count())
    assert count(dilated, x_BLD) == math.ceil(math.log(11, 3))


def test_the_path_of_a_recurrence_is_its_steps(layer_cost, monkeypatch):
    monkeypatch.setattr(layer_cost, "PATH_LENGTHS", (5, 7))
    lstm = named(layer_cost, "LSTM")
    assert layer_cost.path_lengths(lstm, lambda i: lstm) == [5, 7]


def test_layers_that_do_not_connect_tokens_have_no_path(layer_cost):
    for stack in (itertools.repeat(lambda x_BLD: x_BLD), [jnp.sin]):
        with pytest.raises(ValueError, match="does not reach"):
            layer_cost.path_layers(stack, normal(1, 5, D))


@pytest.mark.parametrize(("length", "window"), [(3, 5), (10, 5), (11, 5)])
def test_banded_attention_equals_attention_with_a_mask_of_that_window(layer_cost, length, window):
    query, key, value = normal(3, 2, length, 3, 7)
    positions = TokenPositions.at(jnp.arange(length))
    mask = AttentionMask(positions, positions, window=window).array()

    def of(attend):
        return jax.jit(
            jax.value_and_grad(lambda *qkv: jnp.sin(attend(*qkv)).sum(), argnums=(0, 1, 2))
        )

    masked = of(lambda *qkv: dot_product_attention(*qkv, mask)[0])(query, key, value)
    banded = of(partial(layer_cost.banded_attention, window=window))(query, key, value)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), banded, masked
    )


def test_a_point_with_gradients_returns_the_value_too(layer_cost):
    layer = named(layer_cost, "GRU")
    params, x_BLD, cotangent_BLD = layer_cost.arrays(layer, 7, D)
    value_and_gradients = layer_cost.compile_point(layer, 7, D, True).run()

    @jax.jit
    def expected(params, x_BLD):
        apply = lambda params, x_BLD: nn.RNN(nn.GRUCell(D)).apply({"params": params}, x_BLD)  # noqa: E731
        gradients = jax.grad(
            lambda *inputs: jnp.sum(apply(*inputs) * cotangent_BLD), argnums=(0, 1)
        )
        return apply(params, x_BLD), gradients(params, x_BLD)

    same = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4)  # noqa: E731
    jax.tree.map(same, value_and_gradients, expected(params, x_BLD))


def test_a_run_prints_its_tables_and_writes_the_figure(layer_cost, tmp_path, monkeypatch, capsys):
    layer = dataclasses.replace(named(layer_cost, "convolution"), fit_length=16)
    for name, value in {"LAYERS": [layer], "SLICE": 0, "PATH_LENGTHS": (5, 7)}.items():
        monkeypatch.setattr(layer_cost, name, value)
    output = tmp_path / "new" / "plot.png"
    sizes = ["--lengths", "32", "16", "--widths", "512", "64", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", ["layer_cost.py", *sizes, f"--output={output}"])
    layer_cost.main()
    printed = capsys.readouterr().out
    for row in (
        "| convolution, k = 3 | n^1.00 d^2.00 k^1.00 (k n d^2) |",
        "| 1 (1) | 2, 3 (n / k); 2, 2 (log_k n, dilated) |",
        "| 64 | 16 |",
        "| 512 | 32 |",
    ):
        assert row in printed
    assert output.read_bytes().startswith(b"\x89PNG") and list(output.parent.iterdir()) == [output]
