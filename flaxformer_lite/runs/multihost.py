"""Checks between the processes of a run; an error names the process that differs, and its host."""

import json
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

import flaxformer_lite
from flaxformer_lite import config as config_lib
from flaxformer_lite.fields import Config
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import place

Result = TypeVar("Result")


class Refused(InputError):
    """An error of 1 process, raised in all of them."""


def gather(value: Any) -> list[Any]:
    """Returns the JSON-serializable `value` of every process, in order; all must call it."""
    if jax.process_count() == 1:
        return [value]
    mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size_P = multihost_utils.process_allgather(np.int32(len(mine)))
    padded = np.zeros(int(size_P.max()), np.uint8)
    padded[: len(mine)] = mine
    texts = multihost_utils.process_allgather(padded)
    return [
        json.loads(bytes(text[:size]).decode()) for text, size in zip(texts, size_P, strict=True)
    ]


def barrier(name: str) -> None:
    """Waits until every process has called this with the same `name`."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def together(function: Callable[[], Result]) -> Result:
    """Calls `function` in every process and returns the result.

    Raises:
      Refused: in all processes, if it raised ValueError or OSError in one of them. A process with a
        ValueError that is no InputError, a bug, raises that, with its traceback.
    """
    if jax.process_count() == 1:
        return function()
    result: Any = None
    problem, bug = None, None
    try:
        result = function()
    except Refused:  # already raised in all, within `function`
        raise
    except (ValueError, OSError) as error:
        problem = str(error)
        bug = None if isinstance(error, InputError | OSError) else error
    problems = gather([socket.gethostname(), problem])
    if bug is not None:
        raise bug
    for process, (host, message) in enumerate(problems):
        if message is not None:
            raise Refused(f"process {process} on {host}: {message}")
    return result


def by_process_0(function: Callable[[], Any]) -> None:
    """Calls `function` in process 0 while the others wait; raises `Refused`, see `together`."""
    together(lambda: function() if jax.process_index() == 0 else None)


def check_config(config: Config) -> None:
    """Raises InputError unless every process has the config and the versions of process 0."""
    versions = {"flaxformer_lite": flaxformer_lite.__version__, "jax": jax.__version__}
    configs = {
        f"config.{section}.{name}": value
        for section, values in config_lib.to_dict(config).items()
        for name, value in values.items()
    }
    check_same(versions | configs, "start all with the same config, flags and versions")


def check_same(values: Mapping[str, Any], advice: str) -> None:
    """Raises InputError unless every process has the `values` of process 0."""
    known = gather([socket.gethostname(), dict(values)])
    host, first = known[0]
    for process, (other_host, others) in enumerate(known):
        for name in [*first, *(others.keys() - first.keys())]:
            if others.get(name) != first.get(name):
                raise InputError(
                    f"{name}: process 0 on {host} has {first.get(name)!r}, process {process} on "
                    f"{other_host} has {others.get(name)!r}; {advice}."
                )


def check_workdir(path: Path, *, seconds: float = 30.0) -> None:
    """Raises InputError unless all processes see a file of process 0 in `path` within `seconds`."""
    if jax.process_count() == 1:
        return
    seal = place(path) / f".seen-by-all-{gather(uuid.uuid4().hex)[0]}"
    if jax.process_index() == 0:
        seal.touch()
    barrier("the seal exists")
    end = time.monotonic() + seconds
    while not seal.exists() and time.monotonic() < end:
        time.sleep(0.1)
    sees = gather([socket.gethostname(), seal.exists()])
    if jax.process_index() == 0:
        seal.unlink()
    for process, (host, seen) in enumerate(sees):
        if not seen:
            raise InputError(
                f"--workdir={path}: process {process} on {host} does not see what process 0 on "
                f"{sees[0][0]} writes there; name a folder that all of them share."
            )
