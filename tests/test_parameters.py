"""Parameters as decoding on a CPU reads them: the same numbers, each shard once in memory."""

import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from flaxformer_lite.decoding.parameters import ALIGNED, laid_out
from flaxformer_lite.training import parallel

RNG = np.random.default_rng(5)


def places(x):
    """Where in memory each device has its shard of `x`."""
    return [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]


def tree(sharding=None):
    arrays = {"table": RNG.normal(size=(12, 7)), "layers": [{"scale": RNG.normal(size=(4,))}]}
    arrays = jax.tree.map(jnp.float32, arrays) | {"half": jnp.bfloat16(RNG.normal(size=(2, 3, 5)))}
    return jax.tree.map(lambda x: jax.device_put(x, sharding), arrays)


@pytest.mark.parametrize(
    ("axes", "spec", "copies"),
    [
        (None, None, 1),
        ({"tensor": 1}, PartitionSpec(), 1),
        ({"tensor": 2}, PartitionSpec(), 1),
        ({"tensor": 2}, PartitionSpec("tensor"), 2),
        ({"fsdp": 2, "tensor": 2}, PartitionSpec("tensor"), 2),
    ],
)
def test_what_is_laid_out_is_the_same_arrays_elsewhere_with_one_copy_of_each_shard(axes, spec, copies):
    sharding = axes and NamedSharding(parallel.make_mesh(1, **axes), spec)
    given = tree(sharding)
    laid = laid_out(given)
    assert jax.tree.structure(laid) == jax.tree.structure(given)
    for x, other in zip(jax.tree.leaves(laid), jax.tree.leaves(given), strict=True):
        np.testing.assert_array_equal(x, other)
        assert (x.dtype, x.sharding) == (other.dtype, other.sharding)
        assert len(set(places(x))) == copies and len(places(x)) == len(places(other))
        assert not set(places(x)) & set(places(other))
        assert all(place % ALIGNED == 0 for place in places(x))


def test_what_is_laid_out_lies_in_one_block_and_nothing_in_it_overlaps():
    given = tree()
    laid = jax.tree.leaves(laid_out(given))
    spans = sorted((places(x)[0], places(x)[0] + x.nbytes) for x in laid)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] - spans[0][0] <= sum(x.nbytes + ALIGNED for x in laid)


def test_a_tree_without_arrays_is_laid_out_too():
    assert laid_out({"layers": {}}) == {"layers": {}}


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="a system without huge pages"
)
def test_what_is_laid_out_lies_where_huge_pages_may_be():
    place = places(laid_out([jnp.ones((1 << 10, 1 << 12))])[0])[0]  # 16 MiB
    for entry in re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text()):
        start, end = (int(address, 16) for address in entry.split(" ", 1)[0].split("-"))
        if start <= place < end:
            assert re.search(r"THPeligible:\s+1", entry), entry
            return
    raise AssertionError(f"no mapping holds {place:x}")
