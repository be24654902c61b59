"""Points are traced before training: errors are reported; backends of other machines may pass."""

import jax
import pytest

from flaxformer_lite.config import default_config, resolve
from flaxformer_lite.model.transformer import build_model
from flaxformer_lite.sweep import check
from flaxformer_lite.sweep.space import Point, Settings
from flaxformer_lite.training import step


def point(**changes):
    config = default_config()
    config.model.update(
        d_model=22, num_heads=2, d_ff=13, num_encoder_layers=3, num_decoder_layers=2, max_length=37
    )
    config.data.update(buckets=(19, 37), tokens_per_batch=600, vocab_size=101)
    for name, value in changes.items():
        section, field = name.split("__")
        config[section][field] = value
    return Point(changes, resolve(config), str(changes))


@pytest.mark.slow
def test_valid_steps_pass_for_the_backends_of_any_machine():
    backends = [point(model__backend=name) for name in ("auto", "xla", "cudnn", "flash")]
    check.check_all(
        [*backends, point(train__r_drop=2.0), point(data__packing=True)], Settings(), "a.py"
    )
    averaged = point(
        train__average="last:2",
        train__keep_newest=2,
        train__ema_decay=0.9,
        optim__schedule="linear",
    )
    check.check_all([averaged], Settings(objective="bleu"), "a.py")
    classifier = point(model__architecture="encoder_classifier", data__dataset="cldr_language")
    check.check_all([classifier], Settings(objective="accuracy"), "a.py")


def test_an_objective_that_a_point_does_not_compute_is_reported():
    classifier = point(model__architecture="encoder_classifier", data__dataset="cldr_language")
    for objective, why in {
        "bleu": "'bleu' needs translations",
        "perplexity": "'perplexity' is not computed",
        "bits_per_byte": "'bits_per_byte' is not computed",
    }.items():
        with pytest.raises(ValueError, match=rf"a.py: nothing was trained.\npoint [01] .*{why}"):
            check.check_all([point(), classifier], Settings(objective=objective), "a.py")


@pytest.fixture(autouse=True)
def empty_cache():
    check.step_error.cache_clear()


def test_a_step_that_cannot_be_traced_is_reported_with_the_reason(monkeypatch):
    # Shapes without a matrix product.
    monkeypatch.setattr(
        check.step_lib, "of_config", lambda config, **_: (jax.numpy.dot, lambda: jax.numpy.ones(3))
    )
    with pytest.raises(ValueError, match=r"point 0 .*: "):
        check.check_all([point()], Settings(), "a.py")


def test_points_that_differ_only_in_numbers_are_traced_once(monkeypatch):
    traced = []
    of_config = step.of_config
    monkeypatch.setattr(
        check.step_lib, "of_config", lambda config: traced.append(config) or of_config(config)
    )
    same = [
        point(),
        point(optim__learning_rate=0.3),
        point(model__dropout=0.3),
        point(model__num_encoder_layers=5),
    ]
    check.check_all([*same, point(model__d_ff=17), point(model__dropout=0.0)], Settings(), "a.py")
    assert len(traced) == 3


def test_the_parameter_count_includes_all_layers():
    config = point(model__vocab_size=101).config
    model = build_model(config.model)
    ids_1L = jax.numpy.ones((1, 5), int)
    params = jax.eval_shape(model.init, jax.random.key(0), ids_1L, ids_1L)["params"]
    assert check.parameter_count(config) == sum(leaf.size for leaf in jax.tree.leaves(params))
