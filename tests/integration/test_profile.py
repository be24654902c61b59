"""The costliest operations of a real trace, by their paths in the model."""

import re
from concurrent.futures import Future

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import runs

from flaxformer_lite.training import profile
from flaxformer_lite.training.profile import Operation


class Layered(nn.Module):
    """2 wide layers and a narrow one."""

    def setup(self):
        self.layers = [nn.Dense(512), nn.Dense(512)]
        self.narrow = nn.Dense(1)

    def __call__(self, x_BD):
        for layer in self.layers:
            x_BD = nn.relu(layer(x_BD))
        return self.narrow(x_BD)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "jit(train_step)/jvp(M.features)/M.f/M._d/decoder/layers_11/norm/mul",
            "decoder/layers_*/norm/mul",
        ),
        (
            "jit(train_step)/transpose(jvp(M.features))/M.f/encoder/layers_0/feed_forward/inner/dot_general",
            "encoder/layers_*/feed_forward/inner/dot_general (backward)",
        ),
        (
            "jit(f)/jvp(M)/decoder/a._attend/BTHK,BSHK->BHTS/transpose",
            "decoder/BTHK,BSHK->BHTS/transpose",
        ),
        (
            "jit(f)/transpose(jvp(M))/rematted_computation/layers_3/inner/add",
            "layers_*/inner/add (again)",
        ),
        ("jit(train_step)/optimizer/mul;jit(train_step)/jvp()/add", "optimizer/mul"),
        ("jit(f)/transpose(jvp(loss))/while/body/dot_general", "loss/dot_general (backward)"),
        ("fusion.3", "fusion"),  # the compiler's own
        ("jit(f)", "jit(f)"),
    ],
)
def test_the_path_of_an_operation_is_the_same_in_all_layers(name, expected):
    assert profile.place(name) == expected


def test_the_time_of_an_event_excludes_nested_events():
    """a from 0 to 10 contains b from 1 to 3 and c from 4 to 9; c contains d from 5 to 6; then e."""
    events = [(0, -10, "a"), (1, -2, "b"), (4, -5, "c"), (5, -1, "d"), (12, -3, "e")]
    assert {what[0]: own for what, own in profile.own_times(events)} == {
        "a": 3,
        "b": 2,
        "c": 4,
        "d": 1,
        "e": 3,
    }


def test_the_table_has_the_costliest_operations_and_the_sum_of_the_others():
    found = [Operation(f"place {number}", (13 - number) * 1e-3, 4) for number in range(13)]
    lines = profile.table(found, steps=2).splitlines()
    assert len(lines) == 1 + profile.SHOWN + 1
    assert lines[1].split() == [f"{13 / 91:.1%}", "6.50", "2", "place", "0"]
    assert lines[-1].split() == [f"{(3 + 2 + 1) / 91:.1%}", "3.00", "3", "others"]


def test_a_trace_has_the_costliest_operations_of_the_steps_after_the_last_compilation(tmp_path):
    """The 2 wide layers are 1 line."""
    model, x = Layered(), jnp.ones((256, 512))
    params = model.init(jax.random.key(0), x)
    compiled = (
        jax.jit(jax.grad(lambda params, x: model.apply(params, x).sum())).lower(params, x).compile()
    )
    late, shown, out = Future(), [], None

    def wait():
        jax.block_until_ready(out)

    made, first_traced = 0, None
    options = {"programs": lambda: [late], "wait": wait, "show": shown.append}
    for made, _ in enumerate(profile.traced(range(40), tmp_path, **options), start=1):
        if made == 9:
            late.set_result(compiled)
        if (tmp_path / "plugins").exists() and first_traced is None:
            first_traced = made
        out = compiled(params, x)
    assert made == 40
    assert first_traced == 9 + profile.TRACED + 1  # the trace is written when it ends
    (text,) = shown
    assert f"traced {profile.TRACED} steps" in text
    found = profile.operations(tmp_path, [compiled.as_text()])
    assert found == sorted(found, key=lambda each: -each.seconds)
    layers = [each for each in found if "layers_*" in each.place]
    assert layers and not any(
        "layers_0" in each.place or "layers_1" in each.place for each in found
    )
    assert layers[0].runs % profile.TRACED == 0


def test_a_run_that_ends_before_the_last_compilation_reports_that_nothing_was_traced(tmp_path):
    shown = []
    options = {"programs": lambda: [Future()], "wait": lambda: None, "show": shown.append}
    assert list(profile.traced(range(20), tmp_path, **options)) == list(range(20))
    assert "no step was traced" in shown[0] and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_with_profiling_shows_the_table_and_writes_the_trace(tmp_path, capfd):
    assert (
        runs.fit(tmp_path / "run", {**runs.TINY, "train.profile": True, "train.num_steps": 24}) == 0
    )
    err = capfd.readouterr().err
    assert f"traced {profile.TRACED} steps into {tmp_path / 'run' / 'profile'}" in err
    *rows, others = re.findall(r"^ +[0-9.]+% +[0-9.]+ +[0-9]+ +(\S+)", err, flags=re.MULTILINE)
    assert others == "others" and len(rows) == 10
    # Which of the tiny operations cost most is random.
    places = ("encoder/", "decoder/", "embedding", "loss/", "optimizer/")
    assert any(row.startswith(places) for row in rows)
    assert list((tmp_path / "run" / "profile").glob("plugins/profile/*/*.xplane.pb"))
