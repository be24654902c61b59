"""The first parameters of a run from those of another: names, rules, sizes, and the table."""

import dataclasses

import numpy as np
import pytest

from flaxformer_lite.config import Config, InitConfig, ModelConfig
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import warm_start

D, V, L = 5, 11, 7
SHAPES = {
    "decoder/layers_0/out/kernel": (D, 3),
    "decoder/layers_1/out/kernel": (D, 3),
    "encoder/layers_0/out/kernel": (D, 3),
    "encoder/layers_1/out/kernel": (D, 3),
    "encoder/layers_10/out/kernel": (D, 3),
    "source_inputs/position_vectors/learned/embedding": (L, D),
    "target_embedding/embedding": (V, D),
}


def config_of(model=None, **init):
    """Returns a config that starts from the run A."""
    return Config(model=ModelConfig(**(model or {})), init=InitConfig(run="A", **init))


def arrays_of(shapes, seed=0):
    """Returns different arrays of these shapes."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def matched(new, old=SHAPES, *, model=None, other=None, **init):
    """Returns the result of `match`."""
    return warm_start.match(new, old, config_of(model, **init), config_of(other))


def refusal(*arguments, **options):
    """Returns the message of the InputError of `match`."""
    with pytest.raises(InputError) as caught:
        matched(*arguments, **options)
    return str(caught.value)


def test_parameters_of_the_same_name_and_shape_are_loaded_bit_for_bit():
    found, old = matched(SHAPES), arrays_of(SHAPES)
    assert {name: each.old for name, each in found.items()} == {name: name for name in SHAPES}
    result = warm_start.merged(found, old, arrays_of(SHAPES, seed=1))
    assert result.keys() == SHAPES.keys()
    assert all(result[name].tobytes() == old[name].tobytes() for name in SHAPES)


def test_a_rule_repeats_a_layer_by_a_regular_expression_of_whole_words():
    new = {f"encoder/layers_{i}/out/kernel": (D, 3) for i in (0, 1, 2, 10, 12)}
    found = matched(new, map=("encoder/layers_(2|12)=encoder/layers_1",))
    sources = {name.split("/")[1]: each.old.split("/")[1] for name, each in found.items()}
    assert sources == {
        "layers_0": "layers_0",
        "layers_1": "layers_1",
        "layers_2": "layers_1",
        "layers_10": "layers_10",  # which starts with layers_1, but is another word
        "layers_12": "layers_1",
    }


def test_a_rule_may_use_the_groups_of_its_expression_and_the_first_match_counts():
    new = {f"decoder/layers_{i}/out/kernel": (D, 3) for i in (0, 1, 2, 3)}
    rules = ("decoder/layers_3=encoder/layers_10", r"(?:decoder)/layers_([12])=encoder/layers_\1")
    old = {**SHAPES, "encoder/layers_2/out/kernel": (D, 3)}
    found = matched(new, old, map=(*rules, "decoder/layers_[01]=decoder/layers_0"))
    assert [each.old.removesuffix("/out/kernel") for each in found.values()] == [
        "decoder/layers_0",
        "encoder/layers_1",
        "encoder/layers_2",
        "encoder/layers_10",
    ]


def test_a_rule_without_an_old_name_leaves_parameters_as_initialised():
    found, fresh = matched(SHAPES, map=("decoder=",)), arrays_of(SHAPES, seed=1)
    result = warm_start.merged(found, arrays_of(SHAPES), fresh)
    for name in SHAPES:
        is_fresh = np.array_equal(result[name], fresh[name])
        assert is_fresh == name.startswith("decoder/")


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (("coder/layers_0=encoder",), "matches no parameter of this model; their names start with"),
        (("encoder/layers=encoder/layers_1",), "'encoder/layers=encoder/layers_1' matches no"),
        (("encoder=coder",), "'encoder=coder' leads to no parameter of A; their names start with"),
        (("decoder=encoder", "decoder/layers_0=decoder"), "'decoder/layers_0=decoder' matches no"),
        (("encoder",), "'encoder' is no rule: expected NEW=OLD; write NEW=OLD, such as"),
        (("=encoder",), "'=encoder' is no rule"),
        (("enc(oder=encoder",), "'enc(oder=encoder' is no rule: missing ), unterminated"),
        ((r"(en)coder=\2",), "is no rule: invalid group reference 2"),
    ],
)
def test_a_rule_that_matches_nothing_or_is_none_is_refused_by_name(rules, words):
    message = refusal(SHAPES, map=rules)
    assert message.startswith("config.init.map: ") and words in message


def test_missing_parameters_are_refused_with_the_first_names_the_fields_and_the_flag():
    model, other = dict(num_encoder_layers=11), dict(num_encoder_layers=3)
    new = SHAPES | {f"encoder/layers_{i}/out/kernel": (D, 3) for i in (2, 3, 4, 5, 6)}
    assert refusal(new, model=model, other=other) == (
        "config.init.missing: A lacks encoder/layers_2/out/kernel, encoder/layers_3/out/kernel, "
        "encoder/layers_4/out/kernel and 2 more parameters; in that run model.num_encoder_layers "
        "is 3, not 11; initialise them as in any other run by init.missing='random', or take them "
        "from others by init.map."
    )
    found = matched(new, missing="random")
    kinds = {name for name, each in found.items() if each.kind == warm_start.NEW}
    assert kinds == new.keys() - SHAPES.keys()


@pytest.mark.parametrize(
    ("new", "old", "init", "start"),
    [
        (
            {"encoder/out/kernel": (D, 3)},
            {"encoder/out/kernel": (2, 3)},
            {},
            "config.model.d_model: encoder/out/kernel has shape (5, 3) here, and "
            "encoder/out/kernel in A has (2, 3); in that run model.d_model is 2, not 5; use",
        ),
        (
            {"encoder/out/kernel": (D, 3)},
            {"decoder/out/kernel": (2, 3)},
            {"map": ("encoder=decoder",)},
            "config.init.map: encoder/out/kernel has shape (5, 3) here, and decoder/out/kernel",
        ),
        (
            {"classes/kernel": (D, 3)},
            {"classes/kernel": (D, 2)},
            {},
            "config.model.num_classes: classes/kernel has shape (5, 3) here, and classes/kernel in "
            "A has (5, 2); for other classes, initialise the last layer as in any other run by "
            "init.map='classes='.",
        ),
        (
            {"target_embedding/embedding": (V, D)},
            {"target_embedding/embedding": (V, 2)},
            {"vocabulary": "extend"},
            "config.model.d_model: target_embedding/embedding has shape (11, 5) here",
        ),
        (
            {"target_embedding/embedding": (V, D)},
            {"target_embedding/embedding": (7, D)},
            {},
            "config.data.vocab_size: target_embedding/embedding has shape (11, 5) here, and "
            "target_embedding/embedding in A has (7, 5); use data.vocab_size=7, or "
            "init.vocabulary='extend'.",
        ),
        (
            {"target_inputs/position_vectors/learned/embedding": (L + 1, D)},
            {"target_inputs/position_vectors/learned/embedding": (L, D)},
            {},
            "config.model.max_length: target_inputs/position_vectors/learned/embedding has",
        ),
    ],
)
@pytest.mark.parametrize("missing", ["refuse", "random"])
def test_another_shape_is_refused_with_the_field(new, old, init, start, missing):
    models = {"model": dict(d_model=D), "other": dict(d_model=2)}
    if start.startswith("config.model.max_length") and missing == "random":
        assert [each.kind for each in matched(new, old, missing=missing).values()] == ["resized"]
        return
    assert refusal(new, old, **init, **models, missing=missing).startswith(start)


def test_position_tables_keep_their_first_rows():
    name = "source_inputs/position_vectors/learned/embedding"
    old = arrays_of({name: (L, D)})
    for length in (3, 13):
        fresh = arrays_of({name: (length, D)}, seed=1)
        found = matched({name: (length, D)}, {name: (L, D)}, missing="random")
        result = warm_start.merged(found, old, fresh)[name]
        assert result.shape == (length, D)
        np.testing.assert_array_equal(result[:L], old[name][:length])
        np.testing.assert_array_equal(result[L:], fresh[name][L:])
    shorter = matched({name: (3, D)}, {name: (L, D)}, missing="refuse")
    assert shorter[name].kind == warm_start.RESIZED


def test_the_last_layer_of_predicted_lengths_keeps_its_first_columns():
    old_shapes, new_shapes = {"length/kernel": (D, L)}, {"length/kernel": (D, 3)}
    old, fresh = arrays_of(old_shapes), arrays_of(new_shapes, seed=1)
    result = warm_start.merged(matched(new_shapes, old_shapes), old, fresh)
    np.testing.assert_array_equal(result["length/kernel"], old["length/kernel"][:, :3])


OF_VOCABULARY = {
    "source_embedding/embedding": (V, D),
    "output/kernel": (V, D),
    "output/bias": (V,),
}


def test_new_pieces_get_the_mean_of_the_pieces_that_spell_them():
    old, spellings = arrays_of(OF_VOCABULARY), [np.array([4, 9, 9]), np.array([10])]
    bigger = {name: (V + 2, *shape[1:]) for name, shape in OF_VOCABULARY.items()}
    found = matched(bigger, OF_VOCABULARY, vocabulary="extend")
    result = warm_start.merged(found, old, arrays_of(bigger, seed=1), spellings=spellings)
    for name, rows in result.items():
        assert rows.dtype == np.float32 and rows.shape == bigger[name]
        assert rows[:V].tobytes() == old[name].tobytes()
        np.testing.assert_allclose(rows[V], (old[name][4] + 2 * old[name][9]) / 3, rtol=1e-6)
        np.testing.assert_array_equal(rows[V + 1], old[name][10])


def test_new_pieces_may_be_random_and_their_biases_lowered():
    old, fresh_seed = arrays_of(OF_VOCABULARY), 1
    bigger = {name: (V + 2, *shape[1:]) for name, shape in OF_VOCABULARY.items()}
    fresh = arrays_of(bigger, seed=fresh_seed)
    found = matched(bigger, OF_VOCABULARY, vocabulary="extend")
    result = warm_start.merged(
        found,
        old,
        fresh,
        spellings=[np.array([4]), np.array([9])],
        new_embeddings="random",
        new_bias=-7.0,
    )
    for name, rows in result.items():
        assert rows[:V].tobytes() == old[name].tobytes()
        expected = fresh[name][V:] - (7 if name == "output/bias" else 0)
        np.testing.assert_array_equal(rows[V:], expected)


def test_the_table_has_a_line_for_each_parameter_and_for_each_left_out():
    new = {
        "decoder/layers_0/out/kernel": (D, 3),
        "encoder/layers_0/out/kernel": (D, 3),
        "source_inputs/position_vectors/learned/embedding": (3, D),
        "classes/bias": (2,),
    }
    old = {name: SHAPES[name] for name in [*list(new)[:1], "target_embedding/embedding"]}
    old["source_inputs/position_vectors/learned/embedding"] = (L, D)
    config = config_of(dict(activation="gelu"), map=("encoder=decoder",), missing="random")
    found = warm_start.match(new, old, config, config_of())
    lines = warm_start.table(found, new, old, config, config_of()).splitlines()
    assert lines == [
        "note: in that run model.activation is 'relu', not 'gelu'",
        "loaded    decoder/layers_0/out/kernel (5, 3)",
        "loaded    encoder/layers_0/out/kernel (5, 3) from decoder/layers_0/out/kernel",
        "resized   source_inputs/position_vectors/learned/embedding (3, 5) of shape (7, 5)",
        "new       classes/bias (2,)",
        "left out  target_embedding/embedding (11, 5)",
    ]


def test_fields_that_no_parameter_depends_on_are_not_named():
    same = dataclasses.asdict(ModelConfig(dropout=0.3, backend="reference", dtype="bfloat16"))
    assert "in that run" not in refusal({"classes/bias": (2,)}, {}, model=same)
