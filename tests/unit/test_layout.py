"""The layout: the order of imports, doors, the imports of each folder, and the sizes of files.

Every check is a function from a tree to a list of violations. The last tests show on a small tree
that each of them can fail.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "flaxformer_lite"

# Folders and top-level modules, from the top: a module imports from its own folder and from lower
# lines. Modules of the same line may import each other in one direction only.
ORDER = (
    ("cli", "__main__"),
    ("sweep", "exchange"),
    ("plotting", "train"),
    ("evaluate", "evaluator", "translate", "classify", "generate", "rescore"),
    ("alignments",),
    ("trained",),
    ("training", "decoding", "lines"),
    ("data",),
    ("model", "runs"),
    ("config_files", "config", "checks"),
    ("field_rules", "fields", "scores", "scoring", "system"),
)

# Only these modules import a heavy library.
DOORS = {
    "absl": {
        "config_files",
        "cli.parser",
        "cli.rerank_command",
        "cli.run_flags",
        "cli.score_flags",
        "cli.train_flags",
        "cli.shared_flags",
        "cli.sweep_flags",
        "cli.exchange_flags",
        "cli.init_flags",
        "cli.rescore_flags",
    },
    "babel": {
        "data.cldr.date_families",
        "data.cldr.family",
        "data.cldr.languages",
        "data.cldr.name_families",
        "data.cldr.number_families",
        "data.cldr.phrase_alignments",
        "data.cldr.phrase_families",
    },
    "ctranslate2": {"exchange.ctranslate2_spec"},
    "grain": {"data.batches.loader"},
    "matplotlib": {"plotting.fonts", "plotting.plots", "sweep.sweep_plots"},
    "ml_collections.config_flags": {"config_files"},
    "optuna": {"sweep.attempts", "sweep.importance", "sweep.study", "sweep.study_storage"},
    "orbax": {"training.checkpoint"},
    "sacrebleu": {"scores.resampling", "scores.utilities", "scoring"},
    "safetensors": {"exchange.marian_folder", "exchange.folder", "training.parent"},
    "sentencepiece": {"data.tokens.sentencepiece_tokenizer"},
    "submitit": {"sweep.cluster"},
    "tokenizers": {"data.tokens.huggingface_tokenizer"},
    "tensorflow_datasets": {
        "data.sources.algorithms",
        "data.sources.builders",
        "data.sources.datasets",
        "data.sources.examples",
        "data.sources.generated",
        "data.sources.listops",
        "data.sources.modular_addition",
        "data.sources.preparation",
    },
}
# model/ may import these, the standard library, its own folder, the settings and the error.
MODEL_MAY_IMPORT = {"jax", "flax", "numpy"}
MODEL_MAY_IMPORT_OF_PACKAGE = (
    "checks.model_checks",
    "config",
    "field_rules",
    "fields",
    "system.errors",
    "model",
)
# The configs may import the settings, and another config by its name.
CONFIGS_MAY_IMPORT = ("config", "config_files")
DYNAMIC_IMPORTS = {"importlib.import_module", "import_module", "__import__"}
NOT_LIFTED = "the folder could no longer be lifted out"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 90
FORBIDDEN_NAMES = {"utils.py", "helpers.py", "types.py", "constants.py", "registry.py"}


def module_files(root: Path) -> dict[str, Path]:
    """Returns `{'model.attention': path, ...}` for every module but the `__init__` files."""
    package = root / PACKAGE
    paths = (path for path in sorted(package.rglob("*.py")) if path.name != "__init__.py")
    return {".".join(path.relative_to(package).with_suffix("").parts): path for path in paths}


def imported_names(path: Path, package: str = "") -> set[str]:
    """Returns the dotted names of all imports: `from a.b import c` gives `a.b` and `a.b.c`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            module = ".".join([*above, *([node.module] if node.module else [])])
            names.update([module, *(f"{module}.{alias.name}" for alias in node.names)])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in DYNAMIC_IMPORTS:
            names.update(arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))
    return names


def own_imports(root: Path, module: str) -> set[str]:
    """Returns the modules of the package that `module` imports."""
    files = module_files(root)
    package = ".".join([PACKAGE, *module.split(".")[:-1]])
    names = imported_names(files[module], package)
    return {name for name in files if f"{PACKAGE}.{name}" in names} - {module}


def import_graph(root: Path) -> dict[str, set[str]]:
    """Returns module to its imported modules, from anywhere in its file."""
    return {module: own_imports(root, module) for module in module_files(root)}


def order_violations(root: Path, order: tuple[tuple[str, ...], ...]) -> list[str]:
    """Returns folders that ORDER lacks, lines without a folder, and imports of a higher line."""
    line = {name: number for number, names in enumerate(order) for name in names}
    graph = import_graph(root)
    found = {
        f"{top_of(module)} has no line in ORDER" for module in graph if top_of(module) not in line
    }
    found |= {
        f"ORDER has {name}, the package has not"
        for name in line.keys() - {top_of(module) for module in graph}
    }
    for module, imported in graph.items():
        for name in imported:
            if line.get(top_of(name), 0) < line.get(top_of(module), 0):
                found.add(f"{module} imports {name}, which is above it")
    return sorted(found)


def top_of(module: str) -> str:
    """Returns 'model' for 'model.masks', 'config' for 'config'."""
    return module.split(".")[0]


def cycle_violations(root: Path) -> list[str]:
    """Returns files and folders that import each other, directly or through others."""
    graph = import_graph(root)
    folder = lambda module: ".".join(module.split(".")[:-1]) or module  # noqa: E731
    folders: dict[str, set[str]] = {}
    for module, imported in graph.items():
        for name in imported:
            here, there = folder(module), folder(name)
            if (
                here != there
                and not here.startswith(f"{there}.")
                and not there.startswith(f"{here}.")
            ):
                folders.setdefault(here, set()).add(there)
    return [
        f"{' -> '.join(cycle)}: a cycle" for each in (graph, folders) if (cycle := find_cycle(each))
    ]


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Returns the first cycle of a graph, its first node at both ends; empty if there is none."""
    finished: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in finished:
            return []
        for following in sorted(graph.get(node, ())):
            if cycle := visit(following, [*path, node]):
                return cycle
        finished.add(node)
        return []

    return next((cycle for node in sorted(graph) if (cycle := visit(node, []))), [])


def door_violations(root: Path, doors: dict[str, set[str]]) -> list[str]:
    """Returns imports of heavy libraries outside their doors, also of train.py and the configs."""
    files = module_files(root) | {str(path.relative_to(root)): path for path in entry_files(root)}
    found = []
    for module, path in files.items():
        names = list(imported_names(path))
        for library, modules in doors.items():
            if module not in modules and any(is_within(name, library) for name in names):
                found.append(
                    f"{module} imports {library}: its door is {', '.join(sorted(modules))}"
                )
    return sorted(found)


def entry_files(root: Path) -> Iterator[Path]:
    """Yields train.py and the config files."""
    yield from root.glob("train.py")
    yield from sorted((root / "configs").rglob("*.py"))


def is_within(name: str, library: str) -> bool:
    """Whether `name` is the library or part of it."""
    return name == library or name.startswith(f"{library}.")


def folder_violations(root: Path) -> list[str]:
    """Returns forbidden imports of model/, system/, decoding/ and the configs."""
    found = []
    for module, path in module_files(root).items():
        folder = module.split(".")[0]
        for name in imported_names(path, ".".join([PACKAGE, *module.split(".")[:-1]])):
            if folder == "decoding" and is_within(name, f"{PACKAGE}.training"):
                found.append(f"{module} imports {name}")
            if (
                folder == "system"
                and is_within(name, f"{PACKAGE}")
                and not is_within(name, f"{PACKAGE}.system")
            ):
                found.append(f"{module} imports {name}") if name != PACKAGE else None
            if folder == "model" and not model_may_import(name):
                found.append(f"{module} imports {name}: {NOT_LIFTED}")
    for path in sorted((root / "configs").rglob("*.py")):
        for name in imported_names(path):
            if name != PACKAGE and not any(
                is_within(name, f"{PACKAGE}.{part}") for part in CONFIGS_MAY_IMPORT
            ):
                found.append(f"{path.relative_to(root)} imports {name}")
    return sorted(found)


def model_may_import(name: str) -> bool:
    """Whether model/ may import `name`."""
    top = name.split(".")[0]
    own = name in (PACKAGE, f"{PACKAGE}.system") or any(
        is_within(name, f"{PACKAGE}.{part}") for part in MODEL_MAY_IMPORT_OF_PACKAGE
    )
    return own if top == PACKAGE else top in MODEL_MAY_IMPORT or top in sys.stdlib_module_names


def init_violations(root: Path) -> list[str]:
    """Returns `__init__` files that import, or that contain more than a docstring."""
    found = []
    for path in sorted((root / PACKAGE).rglob("__init__.py")):
        name, body = str(path.relative_to(root)), ast.parse(path.read_text(encoding="utf-8")).body
        if imported_names(path):
            found.append(f"{name} imports something")
        elif path.parent != root / PACKAGE and len(body) > (
            ast.get_docstring(ast.Module(body, [])) is not None
        ):
            found.append(f"{name} holds more than a docstring")
    return found


def size_violations(root: Path) -> list[str]:
    """Returns files and functions over their limit, and files with forbidden names."""
    modules = sorted((root / PACKAGE).rglob("*.py"))
    limits = {root / "train.py": 40, root / "CONTRIBUTING.md": 100}
    limits |= dict.fromkeys(modules, MAX_FILE_LINES)
    found = []
    for path, limit in limits.items():
        lines = len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0
        if lines > limit:
            found.append(f"{path.relative_to(root)} has {lines} lines, the limit is {limit}")
        if path.name in FORBIDDEN_NAMES:
            found.append(f"{path.relative_to(root)}: no file of this name")
    return found + [
        f"{path.relative_to(root)}: {name} has {lines} lines, the limit is {MAX_FUNCTION_LINES}"
        for path in modules
        for name, lines in function_lines(path)
        if lines > MAX_FUNCTION_LINES
    ]


def function_lines(path: Path) -> Iterator[tuple[str, int]]:
    """Yields the name and the number of lines of every function of a file, methods included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.end_lineno - node.lineno + 1


def name_violations(root: Path) -> list[str]:
    """Returns names of several files of the package."""
    named: dict[str, list[str]] = {}
    for module in module_files(root):
        named.setdefault(module.split(".")[-1], []).append(f"{module.replace('.', '/')}.py")
    return [
        f"{', '.join(sorted(paths))}: one name for two files"
        for paths in named.values()
        if len(paths) > 1
    ]


def test_imports_run_downwards_between_folders(repo_root):
    assert order_violations(repo_root, ORDER) == []


def test_neither_files_nor_folders_import_each_other_in_a_cycle(repo_root):
    assert cycle_violations(repo_root) == []


def test_a_file_name_is_used_once(repo_root):
    assert name_violations(repo_root) == []


def test_every_heavy_library_has_one_door(repo_root):
    assert door_violations(repo_root, DOORS) == []


def test_folders_import_only_what_they_may(repo_root):
    assert folder_violations(repo_root) == []


def test_init_files_import_nothing(repo_root):
    assert init_violations(repo_root) == []


def test_no_file_or_function_is_too_long(repo_root):
    assert size_violations(repo_root) == []


def walks(root: Path) -> dict[str, list[str]]:
    """Title to the files of each walk through the code, in its order."""
    text = (root / "docs/design/reading-the-code.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (One [^\n]*)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    files = r"^\d+\. (.*?): "
    return {
        title: [
            file
            for line in re.findall(files, body, re.MULTILINE)
            for file in re.findall(r"`([\w/]+\.py)`", line)
        ]
        for title, body in sections
    }


def test_the_walks_through_the_code_name_each_file_once_and_are_short(repo_root):
    batch, sentence = walks(repo_root).values()
    assert 15 < len(batch) <= 25 and 10 < len(sentence) <= 15
    for files in (batch, sentence):
        assert len(set(files)) == len(files)
        assert all((repo_root / file).is_file() for file in files)


# The checks themselves, on a tree that keeps all the rules and then breaks one at a time.

SMALL_ORDER = (("__main__",), ("train",), ("data",), ("model",), ("config",))
SMALL_TREE = {
    "CONTRIBUTING.md": "short\n",
    "train.py": "from flaxformer_lite import train\n",
    "configs/a.py": "from flaxformer_lite import config\n",
    "flaxformer_lite/__init__.py": '"""Key."""\n__version__ = "1"\n',
    "flaxformer_lite/config.py": "import dataclasses\n",
    "flaxformer_lite/model/__init__.py": '"""Models."""\n',
    "flaxformer_lite/model/masks.py": "import jax.numpy as jnp\n",
    "flaxformer_lite/model/attention.py": "import flax.linen as nn\nfrom . import masks\n",
    "flaxformer_lite/data/tokens/ids.py": "import numpy\n",
    "flaxformer_lite/data/batches/plan.py": "from ..tokens import ids\n",
    "flaxformer_lite/train.py": "import flaxformer_lite.model.attention\ndef fit(): pass\n",
    "flaxformer_lite/__main__.py": "def main():\n    from flaxformer_lite.train import fit\n",
}
CONFIG, MASKS, TRAIN = (f"flaxformer_lite/{name}.py" for name in ("config", "model/masks", "train"))
IDS = "flaxformer_lite/data/tokens/ids.py"
# (file, its new text, the expected violation)
BREAKS = [
    (
        CONFIG,
        "from flaxformer_lite.train import fit\n",
        "config imports train, which is above it",
    ),
    (
        CONFIG,
        "import_module('flaxformer_lite.model.attention')\n",
        "config imports model.attention, which is above it",
    ),
    (
        MASKS,
        "from ..model import attention\n",
        "model.attention -> model.masks -> model.attention: a cycle",
    ),
    (
        MASKS,
        "def f():\n    from ..data.tokens import ids\n",
        "model.masks imports data.tokens.ids, which is above it",
    ),
    (
        "flaxformer_lite/data/a.py",
        "from ..train import fit\n",
        "data.a imports train, which is above it",
    ),
    (IDS, "from ..batches import other\n", "data.batches -> data.tokens -> data.batches: a cycle"),
    ("flaxformer_lite/extra.py", "", "extra has no line in ORDER"),
    ("flaxformer_lite/data/masks.py", "", "data/masks.py, model/masks.py: one name for two files"),
    (
        CONFIG,
        "import grain.python as pygrain\n",
        "config imports grain: its door is data.batches.loader",
    ),
    (
        TRAIN,
        "from ml_collections import config_flags\n",
        "train imports ml_collections.config_flags: its door is config_files",
    ),
    (
        "train.py",
        "from orbax import checkpoint\n",
        "train.py imports orbax: its door is training.checkpoint",
    ),
    (MASKS, "import optax\n", f"model.masks imports optax: {NOT_LIFTED}"),
    (
        MASKS,
        "import flaxformer_lite.data\n",
        f"model.masks imports flaxformer_lite.data: {NOT_LIFTED}",
    ),
    (
        "flaxformer_lite/decoding/a.py",
        "from ..training import step\n",
        "decoding.a imports flaxformer_lite.training",
    ),
    (
        "flaxformer_lite/system/a.py",
        "from flaxformer_lite import config\n",
        "system.a imports flaxformer_lite.config",
    ),
    (
        "configs/a.py",
        "from flaxformer_lite.model import masks\n",
        "configs/a.py imports flaxformer_lite.model",
    ),
    ("configs/sweeps/a.py", "import jax\n", "configs/sweeps/a.py imports jax"),
    (
        "flaxformer_lite/__init__.py",
        "import jax\n",
        "flaxformer_lite/__init__.py imports something",
    ),
    (
        "flaxformer_lite/a/__init__.py",
        "NAME = 1\n",
        "flaxformer_lite/a/__init__.py holds more than a docstring",
    ),
    (CONFIG, "\n" * 401, "flaxformer_lite/config.py has 401 lines, the limit is 400"),
    ("train.py", "\n" * 41, "train.py has 41 lines, the limit is 40"),
    ("CONTRIBUTING.md", "\n" * 101, "CONTRIBUTING.md has 101 lines, the limit is 100"),
    (
        TRAIN,
        "def fit():\n" + "    pass\n" * 90,
        "flaxformer_lite/train.py: fit has 91 lines, the limit is 90",
    ),
    (
        MASKS,
        "class A:\n    async def f(self):\n" + "        pass\n" * 90,
        "flaxformer_lite/model/masks.py: f has 91 lines, the limit is 90",
    ),
    ("flaxformer_lite/a/utils.py", "", "flaxformer_lite/a/utils.py: no file of this name"),
]


def all_violations(root: Path) -> list[str]:
    """Returns the violations of all checks in a tree with SMALL_ORDER."""
    return [
        *order_violations(root, SMALL_ORDER),
        *cycle_violations(root),
        *name_violations(root),
        *door_violations(root, DOORS),
        *folder_violations(root),
        *init_violations(root),
        *size_violations(root),
    ]


@pytest.fixture
def small_tree(tmp_path) -> Path:
    for name, text in SMALL_TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_tree_that_keeps_the_rules_has_no_violations(small_tree):
    assert all_violations(small_tree) == []


@pytest.mark.parametrize(
    "name, text, violation", BREAKS, ids=[violation for *_, violation in BREAKS]
)
def test_a_broken_rule_is_found(small_tree, name, text, violation):
    (small_tree / "flaxformer_lite/data/batches/other.py").write_text("from ..tokens import ids\n")
    assert violation not in all_violations(small_tree)
    (small_tree / name).parent.mkdir(parents=True, exist_ok=True)
    (small_tree / name).write_text(text)
    assert violation in all_violations(small_tree)


def test_a_missing_folder_is_found(small_tree):
    (small_tree / "flaxformer_lite" / "config.py").unlink()
    assert "ORDER has config, the package has not" in all_violations(small_tree)
