"""The layout holds: floors, doors, what each folder may import, and the sizes of files.

Every check is a function from a tree to a list of violations, so that the last tests can show, on a small
tree of their own, that each of them is able to fail.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "flaxformer_lite"

# A module imports only modules of a lower floor, and takes the lowest floor above its imports.
FLOORS = {
    "fields": 0,
    "places": 0,
    "config": 1,
    "workdir": 2,
    "agreement": 2,
    "runtime": 0,
    "plots": 1,
    "scoring": 0,
    "command_line": 2,
    "line_job": 2,
    "commands": 3,
    "model.masks": 0,
    "model.dropout": 0,
    "model.dense": 2,
    "model.positions": 2,
    "model.embeddings": 3,
    "model.devices": 0,
    "model.backends": 3,
    "model.attention": 4,
    "model.layers": 5,
    "model.transformer": 6,
    "model.ensemble": 7,
    "decoding.topk": 0,
    "decoding.sampling": 1,
    "decoding.beam": 1,
    "decoding.mask_predict": 0,
    "decoding.generate": 2,
    "decoding.decoder": 3,
    "data.tokenizer": 1,
    "data.ragged": 0,
    "data.examples": 0,
    "data.packing": 0,
    "data.segments": 0,
    "data.line_windows": 1,
    "data.batching": 1,
    "data.store": 2,
    "data.segmentation": 1,
    "data.subwords": 2,
    "data.cldr": 0,
    "data.languages": 1,
    "data.text_files": 0,
    "data.own_text": 1,
    "data.builders": 2,
    "data.loader": 2,
    "data.datasets": 3,
    "data.batch_shapes": 2,
    "data.pipeline": 4,
    "training.losses": 0,
    "training.masking": 1,
    "training.metrics": 0,
    "training.writers": 0,
    "training.meter": 0,
    "training.memory": 0,
    "training.programs": 9,
    "training.accelerators": 0,
    "training.profile": 0,
    "training.hlo": 0,
    "training.topology": 1,
    "training.plan": 9,
    "training.sharding": 6,
    "training.parallel": 7,
    "training.checkpoint": 3,
    "training.interrupt": 8,
    "training.flops": 2,
    "training.optim": 2,
    "training.step": 8,
    "training.report": 5,
    "training.loop": 11,
    "trained": 9,
    "translate": 10,
    "classify": 10,
    "generate": 10,
    "pictures": 10,
    "evaluate": 10,
    "__main__": 14,
    "sweep.space": 3,
    "sweep.requests": 3,
    "sweep.study": 1,
    "sweep.process": 0,
    "sweep.leashed": 15,
    "sweep.check": 9,
    "sweep.results": 4,
    "sweep.board": 2,
    "sweep.worker": 10,
    "sweep.cluster": 4,
    "sweep.pictures": 2,
    "sweep.report": 10,
    "sweep.command": 11,
    "model_flags": 2,
    "exchange.marian": 2,
    "exchange.ctranslate2_spec": 6,
    "exchange.from_marian": 4,
    "exchange.folder": 10,
    "exchange.to_ctranslate2": 11,
    "exchange.to_huggingface": 11,
    "exchange.to_safetensors": 11,
    "exchange.card": 10,
    "exchange.exports": 12,
    "exchange.requests": 3,
    "exchange.command": 13,
}
MAY_SIT_HIGHER = {"__main__"}  # these need not take the lowest floor above their imports

# A heavy library is imported by these modules only.
DOORS = {
    "absl": {"command_line", "commands", "model_flags", "sweep.requests", "exchange.requests"},
    "babel": {"data.cldr", "data.languages", "data.builders"},
    "ctranslate2": {"exchange.ctranslate2_spec"},
    "grain": {"data.loader"},
    "matplotlib": {"plots", "sweep.pictures"},
    "ml_collections.config_flags": {"command_line"},
    "optuna": {"sweep.study"},
    "orbax": {"training.checkpoint"},
    "sacrebleu": {"scoring"},
    "safetensors": {"exchange.from_marian", "exchange.folder"},
    "sentencepiece": {"data.tokenizer"},
    "submitit": {"sweep.cluster"},
    "tensorflow_datasets": {"data.builders", "data.datasets", "data.examples"},
}
# model/ may import these, the standard library, flaxformer_lite.config and its own folder.
MODEL_MAY_IMPORT = {"jax", "flax", "numpy"}
DYNAMIC_IMPORTS = {"importlib.import_module", "import_module", "__import__"}
NOT_LIFTED = "the folder could no longer be lifted out"
FORBIDDEN_NAMES = {"utils.py", "helpers.py", "types.py", "constants.py", "registry.py"}


def module_files(root: Path) -> dict[str, Path]:
    """`{'model.attention': path, ...}`: every module of the package, without the `__init__` files."""
    package = root / PACKAGE
    paths = (path for path in sorted(package.rglob("*.py")) if path.name != "__init__.py")
    return {".".join(path.relative_to(package).with_suffix("").parts): path for path in paths}


def imported_names(path: Path, package: str = "") -> set[str]:
    """Dotted names that a file imports anywhere: `from a.b import c` gives `a.b` and `a.b.c`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            names.update([module, *(f"{module}.{alias.name}" for alias in node.names)])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in DYNAMIC_IMPORTS:
            names.update(arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))
    return names


def own_imports(root: Path, module: str) -> set[str]:
    """The modules of the package that a module of the package imports, as named in FLOORS."""
    files = module_files(root)
    package = ".".join([PACKAGE, *module.split(".")[:-1]])
    names = imported_names(files[module], package)
    return {name for name in files if f"{PACKAGE}.{name}" in names} - {module}


def floor_violations(root: Path, floors: dict[str, int], may_sit_higher: set[str]) -> list[str]:
    """Modules without a floor, floors without a module, imports up or sideways, floors that are too high."""
    files = module_files(root)
    found = [f"{module} has no entry in FLOORS" for module in files.keys() - floors.keys()]
    found += [f"FLOORS has {module}, the package has not" for module in floors.keys() - files.keys()]
    for module in files.keys() & floors.keys():
        imports = {name: floors[name] for name in own_imports(root, module) if name in floors}
        for name, floor in imports.items():
            if floor >= floors[module]:
                found.append(f"{module} [{floors[module]}] imports {name} [{floor}]")
        lowest = max(imports.values(), default=-1) + 1
        if floors[module] > lowest and module not in may_sit_higher:
            found.append(f"{module} is on floor {floors[module]}, the lowest above its imports is {lowest}")
    return sorted(found)


def door_violations(root: Path, doors: dict[str, set[str]]) -> list[str]:
    """A heavy library imported elsewhere than at its door; train.py and the configs are nobody's door."""
    files = module_files(root) | {str(path.relative_to(root)): path for path in entry_files(root)}
    found = []
    for module, path in files.items():
        names = list(imported_names(path))
        for library, modules in doors.items():
            if module not in modules and any(is_within(name, library) for name in names):
                found.append(f"{module} imports {library}: its door is {', '.join(sorted(modules))}")
    return sorted(found)


def entry_files(root: Path) -> Iterator[Path]:
    """train.py and the config files."""
    yield from root.glob("train.py")
    yield from sorted((root / "configs").rglob("*.py"))


def is_within(name: str, library: str) -> bool:
    """Is `name` the library or something in it?"""
    return name == library or name.startswith(f"{library}.")


def folder_violations(root: Path) -> list[str]:
    """model/ can be lifted out; model/, data/ and decoding/ know no training; configs know only config."""
    found = []
    for module, path in module_files(root).items():
        folder = module.split(".")[0]
        for name in imported_names(path, ".".join([PACKAGE, *module.split(".")[:-1]])):
            if folder in ("model", "data", "decoding") and is_within(name, f"{PACKAGE}.training"):
                found.append(f"{module} imports {name}")
            if folder == "model" and not model_may_import(name):
                found.append(f"{module} imports {name}: {NOT_LIFTED}")
    for path in sorted((root / "configs").rglob("*.py")):
        for name in imported_names(path):
            if name != PACKAGE and not is_within(name, f"{PACKAGE}.config"):
                found.append(f"{path.relative_to(root)} imports {name}")
    return sorted(found)


def model_may_import(name: str) -> bool:
    """Is this one of the few things that model/ needs?"""
    top = name.split(".")[0]
    own = name == PACKAGE or any(is_within(name, f"{PACKAGE}.{part}") for part in ("config", "model"))
    return own if top == PACKAGE else top in MODEL_MAY_IMPORT or top in sys.stdlib_module_names


def init_violations(root: Path) -> list[str]:
    """The package's own __init__ imports nothing; those of its folders hold a docstring at most."""
    found = []
    for path in sorted((root / PACKAGE).rglob("__init__.py")):
        name, body = str(path.relative_to(root)), ast.parse(path.read_text(encoding="utf-8")).body
        if imported_names(path):
            found.append(f"{name} imports something")
        elif path.parent != root / PACKAGE and len(body) > (ast.get_docstring(ast.Module(body, [])) is not None):
            found.append(f"{name} holds more than a docstring")
    return found


def size_violations(root: Path) -> list[str]:
    """Files and functions that outgrew their limit, and names that become drawers for everything."""
    limits = {root / "train.py": 40, root / "CONTRIBUTING.md": 40}
    limits |= dict.fromkeys(sorted((root / PACKAGE).rglob("*.py")), 400)
    found = []
    for path, limit in limits.items():
        lines = len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0
        if lines > limit:
            found.append(f"{path.relative_to(root)} has {lines} lines, the limit is {limit}")
        if path.name in FORBIDDEN_NAMES:
            found.append(f"{path.relative_to(root)}: no file of this name")
    loop = root / PACKAGE / "training" / "loop.py"
    for node in ast.walk(ast.parse(loop.read_text(encoding="utf-8") if loop.exists() else "")):
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno + 1 > 150:
            found.append(f"training/loop.py: {node.name} has {node.end_lineno - node.lineno + 1} lines, 150 at most")
    return found


def file_map(readme: str) -> dict[str, int]:
    """The floors in the README's file map: lines `name.py [n]` indented under the package and its folders."""
    for block in re.findall(r"^```[^\n]*\n(.*?)^```", readme, flags=re.MULTILINE | re.DOTALL):
        floors, folders = {}, []
        for line in block.splitlines():
            match = re.match(r"( *)([\w./-]+)(?:\s+\[(\d+)\])?", line)
            if not match:
                continue
            indent, name, floor = len(match[1]), match[2], match[3]
            folders = [(depth, folder) for depth, folder in folders if depth < indent]
            if name.endswith("/"):
                folders.append((indent, name.strip("/")))
            elif name.endswith(".py") and floor and folders[:1] and folders[0][1] == PACKAGE:
                floors[".".join([*(folder for _, folder in folders[1:]), name.removesuffix(".py")])] = int(floor)
        if floors:
            return floors
    return {}


def map_violations(root: Path, floors: dict[str, int]) -> list[str]:
    """Where the README's file map and FLOORS differ; nothing where there is no README yet."""
    readme = root / "README.md"
    shown = file_map(readme.read_text(encoding="utf-8")) if readme.exists() else floors
    return [
        f"{module}: the README says {shown.get(module)}, FLOORS says {floors.get(module)}"
        for module in sorted(shown.keys() | floors.keys())
        if shown.get(module) != floors.get(module)
    ]


def test_every_module_imports_only_lower_floors_and_takes_the_lowest_it_can(repo_root):
    assert floor_violations(repo_root, FLOORS, MAY_SIT_HIGHER) == []


def test_every_heavy_library_has_one_door(repo_root):
    assert door_violations(repo_root, DOORS) == []


def test_folders_import_only_what_they_may(repo_root):
    assert folder_violations(repo_root) == []


def test_init_files_import_nothing(repo_root):
    assert init_violations(repo_root) == []


def test_no_file_is_too_long_or_a_drawer_for_everything(repo_root):
    assert size_violations(repo_root) == []


def test_the_file_map_of_the_readme_shows_the_same_floors(repo_root):
    assert map_violations(repo_root, FLOORS) == []


# The checks themselves, on a tree that holds all the rules and then breaks one at a time.

SMALL_FLOORS = {"config": 0, "model.masks": 0, "model.attention": 1, "training.loop": 2, "__main__": 4}
SMALL_MAP = """
```
none
```
```
train.py             flags
flaxformer_lite/
  __init__.py        key
  config.py     [0]  fields
  model/
    masks.py    [0]
    attention.py [1]
  training/
    loop.py     [2]  fit
  __main__.py   [4]
```
"""
SMALL_TREE = {
    "README.md": SMALL_MAP,
    "CONTRIBUTING.md": "short\n",
    "train.py": "from flaxformer_lite.training import loop\n",
    "configs/a.py": "from flaxformer_lite import config\n",
    "flaxformer_lite/__init__.py": '"""Key."""\n__version__ = "1"\n',
    "flaxformer_lite/config.py": "import dataclasses\n",
    "flaxformer_lite/model/__init__.py": '"""Models."""\n',
    "flaxformer_lite/model/masks.py": "import jax.numpy as jnp\n",
    "flaxformer_lite/model/attention.py": "import flax.linen as nn\nfrom . import masks\n",
    "flaxformer_lite/training/loop.py": "import flaxformer_lite.model.attention\ndef fit(): pass\n",
    "flaxformer_lite/__main__.py": "def main():\n    from flaxformer_lite.training.loop import fit\n",
}
CONFIG, MASKS, LOOP = (f"flaxformer_lite/{name}.py" for name in ("config", "model/masks", "training/loop"))
# (file, what it becomes, the violation that must be found)
BREAKS = [
    (CONFIG, "from flaxformer_lite.training.loop import fit\n", "config [0] imports training.loop [2]"),
    (CONFIG, "import_module('flaxformer_lite.model.attention')\n", "config [0] imports model.attention [1]"),
    (MASKS, "from ..model import attention\n", "model.masks [0] imports model.attention [1]"),
    (MASKS, "def f():\n    from flaxformer_lite import config\n", "model.masks [0] imports config [0]"),
    (LOOP, "import jax\n", "training.loop is on floor 2, the lowest above its imports is 0"),
    ("flaxformer_lite/model/extra.py", "", "model.extra has no entry in FLOORS"),
    (CONFIG, "import grain.python as pygrain\n", "config imports grain: its door is data.loader"),
    (
        LOOP,
        "from ml_collections import config_flags\n",
        "training.loop imports ml_collections.config_flags: its door is command_line",
    ),
    (
        "train.py",
        "from absl import app\n",
        "train.py imports absl: its door is command_line, commands, exchange.requests, model_flags, sweep.requests",
    ),
    (MASKS, "import optax\n", f"model.masks imports optax: {NOT_LIFTED}"),
    (MASKS, "import flaxformer_lite.data\n", f"model.masks imports flaxformer_lite.data: {NOT_LIFTED}"),
    ("flaxformer_lite/data/a.py", "from ..training import loop\n", "data.a imports flaxformer_lite.training"),
    (
        "configs/a.py",
        "from flaxformer_lite.model import masks\n",
        "configs/a.py imports flaxformer_lite.model",
    ),
    ("configs/sweeps/a.py", "import jax\n", "configs/sweeps/a.py imports jax"),
    ("flaxformer_lite/__init__.py", "import jax\n", "flaxformer_lite/__init__.py imports something"),
    (
        "flaxformer_lite/a/__init__.py",
        "NAME = 1\n",
        "flaxformer_lite/a/__init__.py holds more than a docstring",
    ),
    (CONFIG, "\n" * 401, "flaxformer_lite/config.py has 401 lines, the limit is 400"),
    ("train.py", "\n" * 41, "train.py has 41 lines, the limit is 40"),
    ("CONTRIBUTING.md", "\n" * 41, "CONTRIBUTING.md has 41 lines, the limit is 40"),
    (LOOP, "def fit():\n" + "    pass\n" * 150, "training/loop.py: fit has 151 lines, 150 at most"),
    ("flaxformer_lite/a/utils.py", "", "flaxformer_lite/a/utils.py: no file of this name"),
    ("README.md", SMALL_MAP.replace("[2]", "[3]"), "training.loop: the README says 3, FLOORS says 2"),
    ("README.md", SMALL_MAP.replace("masks.py", "m.py"), "model.masks: the README says None, FLOORS says 0"),
]


def all_violations(root: Path) -> list[str]:
    """What every check finds in a tree laid out by SMALL_FLOORS."""
    return [
        *floor_violations(root, SMALL_FLOORS, {"__main__"}),
        *door_violations(root, DOORS),
        *folder_violations(root),
        *init_violations(root),
        *size_violations(root),
        *map_violations(root, SMALL_FLOORS),
    ]


@pytest.fixture
def small_tree(tmp_path) -> Path:
    for name, text in SMALL_TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_tree_that_holds_the_rules_has_no_violations(small_tree):
    assert all_violations(small_tree) == []
    assert file_map(SMALL_MAP) == SMALL_FLOORS


@pytest.mark.parametrize("name, text, violation", BREAKS, ids=[violation for *_, violation in BREAKS])
def test_a_tree_that_breaks_a_rule_is_found_out(small_tree, name, text, violation):
    assert violation not in all_violations(small_tree)
    (small_tree / name).parent.mkdir(parents=True, exist_ok=True)
    (small_tree / name).write_text(text)
    assert violation in all_violations(small_tree)


def test_a_module_that_is_gone_is_found_out(small_tree):
    (small_tree / "flaxformer_lite" / "config.py").unlink()
    assert "FLOORS has config, the package has not" in all_violations(small_tree)
