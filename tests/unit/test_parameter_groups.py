"""Rules for parameters: groups with another rate or decay, and frozen parameters."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from flaxformer_lite.checks.training_checks import Group, parse_group
from flaxformer_lite.config import Config, ModelConfig, OptimConfig, TrainConfig, resolve
from flaxformer_lite.model import parameters, transformer
from flaxformer_lite.sweep import check
from flaxformer_lite.sweep.space import Settings
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import meshes, metrics, plan, run_report
from flaxformer_lite.training import parameter_groups as groups
from flaxformer_lite.training import step as step_lib
from flaxformer_lite.training.sharding import name_of

pytestmark = pytest.mark.usefixtures("quickly_compiled")
MODEL = ModelConfig(
    vocab_size=41,
    d_model=10,
    num_heads=2,
    d_ff=17,
    num_encoder_layers=2,
    num_decoder_layers=1,
    max_length=13,
    dropout=0.0,
    position="learned",
    tie_embeddings=False,
)
ENCODER = "encoder/.*"
# For updates: compiled quickly; rows and columns of its kernels differ.
SMALL = dataclasses.replace(MODEL, architecture="decoder_lm")
PART = "feed_forward/.*"


@functools.cache
def shapes(**changes: object) -> dict:
    return parameters.shapes(transformer.build_model(dataclasses.replace(MODEL, **changes)))


def named(tree: dict) -> dict:
    """Returns {'encoder/layers_0/.../kernel': array}."""
    return {name_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    target = rng.integers(4, 41, (4, 11)).astype(np.int32)
    return {"target": target, "row": np.arange(4, dtype=np.int32)}


@functools.cache
def trained(optim: OptimConfig, steps: int = 2) -> tuple:
    """Returns the initial state, the state after `steps` updates, and the last metrics."""
    train = TrainConfig(num_steps=steps, ema_decay=0.5)
    run, initial = step_lib.of_config(Config(model=SMALL, optim=optim, train=train))
    state, run = jax.jit(initial)(), jax.jit(run)
    start = state
    for _ in range(steps):
        state, sums = run(state, batch())
    return start, state, metrics.divide(jax.device_get(sums))


SGD = OptimConfig(optimizer="sgd", momentum=0.0, schedule="constant", warmup_steps=1)


# Names.


def test_the_kernels_of_dense_layers_decay_and_muon_updates_those_within_layers():
    config = OptimConfig(optimizer="muon", weight_decay=0.1)
    names = {*named(shapes(activation="swiglu")), *named(shapes(decoder="masked"))}
    decayed = {name for name in names if groups.decays(name, config)}
    assert {name.rpartition("/")[2] for name in decayed} == {"kernel"}
    assert {name.rpartition("/")[2] for name in names - decayed} == {"bias", "scale", "embedding"}
    hidden = {name for name in names if groups.is_hidden_matrix(name)}
    assert decayed - hidden == {"output/kernel", "length/kernel"}
    assert {name.split("/")[-2] for name in hidden} == {
        "query", "key", "value", "out", "inner", "gate", "outer"
    }  # fmt: skip
    assert not any(groups.decays(name, OptimConfig()) for name in names)


def test_tables_of_positions_do_not_decay():
    names = {
        *named(shapes(position="relative", relative_values=True)),
        *named(shapes(position="t5_bias")),
    }
    tables = {name for name in names if "relative/" in name or "position_bias" in name}
    assert len(tables) >= 4
    assert not any(groups.decays(name, OptimConfig(weight_decay=0.1)) for name in tables)


@pytest.mark.parametrize(
    ("name", "ndim", "axes"),
    [
        ("a/query/kernel", 3, ((0,), (1, 2))),
        ("a/out/kernel", 3, ((0, 1), (2,))),
        ("a/inner/kernel", 2, ((0,), (1,))),
        ("a/outer/kernel", 2, ((0,), (1,))),
    ],
)
def test_a_kernel_is_a_matrix_from_inputs_to_outputs(name, ndim, axes):
    assert groups.matrix_axes(name, ndim) == axes


# The rules.


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("encoder/.*: rate=0.1", Group("encoder/.*", 0.1)),
        ("bias:decay=True", Group("bias", decay=True)),
        ("(?:a|b)/x: rate=2 decay=False", Group("(?:a|b)/x", 2.0, False)),
    ],
)
def test_the_text_of_a_group_is_a_rule_and_its_settings(text, group):
    assert parse_group(text) == group


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("encoder/.*", "expected 'RULE: rate=0.1 decay=False', with one of"),
        (": rate=0.1", "expected 'RULE: rate=0.1 decay=False'"),
        ("encoder/.*: speed=0.1", "expected 'RULE: rate=0.1 decay=False'"),
        ("encoder/.*: rate=0.1 rate=0.2", "sets an option 2 times"),
        ("encoder/.*: rate=slow", "expected a number for rate, got 'slow'"),
        ("encoder/.*: decay=no", "expected True or False for decay, got 'no'"),
        ("encoder/.*: rate=0", "expected a positive finite rate; .* use optim.freeze"),
        ("encoder/.*: rate=inf", "expected a positive finite rate"),
        ("encoder/.*: rate=nan", "expected a positive finite rate"),
        ("(encoder: rate=1", r"'\(encoder' is no regular expression"),
        ("encoder/.*: decay=False", "has no effect with optim.weight_decay=0.0"),
    ],
)
def test_the_error_for_a_group_names_the_field_and_the_text(text, message):
    with pytest.raises(InputError, match=rf"^config\.optim\.groups: .*{message}"):
        resolve({"optim": {"groups": (text,)}})


def test_the_error_for_a_frozen_rule_that_is_no_regular_expression_names_it():
    with pytest.raises(InputError, match=r"^config\.optim\.freeze: '\*' is no regular expression"):
        resolve({"optim": {"freeze": ("*",)}})


WRONG = [
    ({"freeze": ("encodr/.*",)}, r"freeze: 'encodr/\.\*' matches no parameter"),
    ({"groups": ("ias: rate=0.1",)}, "groups: 'ias' matches no parameter"),
    (
        {"freeze": (ENCODER,), "groups": ("layers_1/.*/bias: rate=0.1",)},
        r"groups: the parameter encoder/layers_1/\S+ matches 'layers_1/\.\*/bias', and "
        r"'encoder/\.\*' of optim.freeze",
    ),
    (
        {"groups": ("bias: rate=0.1", "inner/bias: rate=0.2")},
        "groups: the parameter .*inner/bias matches 'inner/bias', and 'bias' of optim.groups",
    ),
    ({"freeze": (".*",)}, "freeze: the rules match every parameter"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_rules_that_do_not_fit_the_model_are_refused_by_name_before_training(changes, message):
    with pytest.raises(InputError, match=rf"^config\.optim\.{message}"):
        step_lib.of_config(Config(model=MODEL, optim=OptimConfig(**changes)))


def test_a_plan_and_a_sweep_refuse_rules_that_do_not_fit_the_model_too():
    small = dataclasses.asdict(dataclasses.replace(MODEL, vocab_size=None))
    data = {"vocab_size": 41, "buckets": (13,), "tokens_per_batch": 104}
    wrong, right = (
        resolve({"model": small, "data": data, "optim": {"freeze": (rule,)}})
        for rule in ("encoder/layers_7/.*", "encoder/layers_1/.*")
    )
    target = plan.target(wrong, "h100", 1)
    with pytest.raises(InputError, match=r"freeze: 'encoder/layers_7/\.\*' matches no parameter"):
        plan.plan(wrong, target)
    settings = Settings(objective="loss")
    assert "layers_7" in check.config_error(wrong, settings)
    assert check.config_error(right, settings) is None  # though its step is traced for 1 layer


# Updates.


def test_a_group_has_its_own_rate_and_weight_decay_and_all_others_the_common_ones():
    config = dataclasses.replace(SGD, weight_decay=0.5, learning_rate=0.25)
    table = "embedding/embedding"
    rules = ("output/kernel: decay=False", f"{PART}: rate=0.5", f"{table}: decay=True")
    plain, grouped = (
        trained(each, 1) for each in (config, dataclasses.replace(config, groups=rules))
    )
    start, common, other = (named(s.params) for s in (plain[0], plain[1], grouped[1]))
    (table,) = (name for name in start if name.endswith(table))
    for name, x in start.items():
        expected = common[name] - x
        if "feed_forward/" in name:
            expected *= 0.5
        elif name == table:
            expected -= 0.25 * 0.5 * x
        elif name == "output/kernel":
            expected += 0.25 * 0.5 * x
        np.testing.assert_allclose(other[name] - x, expected, atol=1e-6, err_msg=name)
    moved = {name for name in start if np.abs(other[name] - common[name]).max() > 1e-4}
    assert {"output/kernel", table} <= moved
    assert len(moved - {"output/kernel", table}) == 4


@pytest.mark.parametrize(
    "optimizer", [pytest.param("muon", marks=pytest.mark.slow), "schedule_free"]
)
def test_a_frozen_parameter_and_its_average_stay_as_they_are_and_cost_no_moments(optimizer):
    config = OptimConfig(
        optimizer=optimizer,
        schedule="constant",
        learning_rate=0.1,
        warmup_steps=1,
        freeze=(PART, "self_attention_residual/norm/scale"),
    )
    start, frozen, _ = trained(config)
    kept = {
        name
        for name in named(start.params)
        if re.search("feed_forward/|attention_residual/norm/scale", name)
    }
    assert kept and named(start.params).keys() - kept
    for tree in (frozen.params, frozen.ema):
        for name, x in named(tree).items():
            same = (np.asarray(x) == named(start.params)[name]).all()
            assert same == (name in kept), name
    with_state = {
        name
        for name in named(start.params)
        for moment in named(frozen.opt_state)
        if moment.endswith(f"/{name}")
    }
    assert with_state == named(start.params).keys() - kept


@pytest.mark.slow
def test_the_trained_parameters_are_updated_as_if_nothing_were_frozen():
    (_, whole, norms), (start, part, part_norms) = (
        trained(dataclasses.replace(SGD, freeze=freeze), 1) for freeze in ((), (PART,))
    )
    squares = 0.0
    for name, x in named(start.params).items():
        if "feed_forward/" not in name:
            moved = named(part.params)[name] - x
            np.testing.assert_allclose(
                moved, named(whole.params)[name] - x, atol=1e-6, err_msg=name
            )
            squares += float((moved**2).sum())
    # the rate is 1, so an update is the gradient: the norm is that of the trained ones
    assert part_norms["grad_norm"] == pytest.approx(squares**0.5, rel=1e-4)
    assert norms["grad_norm"] > 1.01 * part_norms["grad_norm"]
    assert norms["loss"] == pytest.approx(part_norms["loss"], rel=1e-6)


# Reports.


def test_a_run_reports_its_groups_if_parameters_are_not_all_treated_alike():
    assert run_report.groups(Config(), shapes()) == ""
    optim = OptimConfig(
        optimizer="muon",
        weight_decay=0.1,
        freeze=(ENCODER,),
        groups=("norm/(scale|bias): rate=0.1 decay=True",),
    )
    head, *rows = run_report.groups(Config(optim=optim), shapes()).splitlines()
    assert head.split() == ["group", "parameters", "optimizer", "rate", "weight", "decay"]
    cells = [row.replace("(no rule)", "none").replace("x ", "x").split() for row in rows]
    assert [[cell[0], *cell[2:]] for cell in cells] == [
        ["none", "adamw", "x1", "0.1"],  # the output's kernel
        ["none", "adamw", "x1", "none"],
        ["none", "muon", "x1", "0.1"],
        ["encoder/.*", "frozen", "-", "-"],
        ["norm/(scale|bias)", "adamw", "x0.1", "0.1"],
    ]
    total = sum(int(cell[1].replace(",", "")) for cell in cells)
    assert total == sum(x.size for x in jax.tree.leaves(shapes()))


@pytest.mark.slow
def test_a_frozen_encoder_saves_the_memory_of_its_moments_and_its_gradients():
    data = {"vocab_size": 48, "buckets": (8,), "tokens_per_batch": 64}
    model = {"d_model": 96, "num_heads": 2, "d_ff": 768, "num_encoder_layers": 1,
             "num_decoder_layers": 1, "max_length": 8, "tie_embeddings": False}  # fmt: skip
    target = plan.Target("h100", plan.ACCELERATORS["h100"], meshes.make_mesh(1), compiler=None)
    configs = [
        resolve({"model": model, "data": data, "optim": {"freeze": rules}})
        for rules in ((), (ENCODER, "source_embedding/embedding"))
    ]
    (whole,), (part,) = (plan.plan(config, target) for config in configs)
    sized = dataclasses.replace(configs[0].model, vocab_size=48)
    tree = named(parameters.shapes(transformer.build_model(sized)))
    frozen = sum(x.size for name, x in tree.items() if name.startswith(("encoder/", "source")))
    assert frozen > 0.4 * sum(x.size for x in tree.values())
    # 2 moments; the rounding is that of alignment
    assert whole.memory.state - part.memory.state == pytest.approx(2 * 4 * frozen, rel=1e-3)
    assert whole.memory.temporary - part.memory.temporary > 4 * frozen
