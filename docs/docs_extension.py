"""Executes notebooks two at a time, writes formulas as MathML, and prepares docstrings for autodoc.

MyST-NB executes one notebook after another while it reads the pages. Here the notebooks run before
that, and MyST-NB takes their outputs from a cache of this build.
"""

import concurrent.futures
import re
import shutil
import tempfile
from pathlib import Path

import nbformat
from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from jupyter_cache.executors.utils import single_nb_execution
from myst_nb.core.read import create_nb_reader
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError
from sphinx.util import logging

NOTEBOOKS_AT_A_TIME = 2
logger = logging.getLogger(__name__)


def execute_notebooks(app: Sphinx, env: BuildEnvironment, docnames: list[str]) -> None:
    """Executes the notebooks among the pages to read, and keeps their outputs in a new cache.

    Raises:
      ExtensionError: a cell of a notebook failed.
    """
    if env.mystnb_config.execution_mode == "off":  # -D nb_execution_mode=off, to try a page
        return
    folder = Path(app.doctreedir) / "notebooks"
    shutil.rmtree(folder, ignore_errors=True)
    env.mystnb_config = env.mystnb_config.copy(
        execution_mode="cache", execution_cache_path=str(folder)
    )
    notebooks = {name: read_notebook(env, name) for name in sorted(docnames)}
    notebooks = {name: notebook for name, notebook in notebooks.items() if notebook}
    with concurrent.futures.ThreadPoolExecutor(NOTEBOOKS_AT_A_TIME) as pool:
        timeout = env.mystnb_config.execution_timeout
        futures = {
            name: pool.submit(execute, notebook, timeout) for name, notebook in notebooks.items()
        }
    failures = []
    for name, future in futures.items():
        result = future.result()
        if result.err is not None:
            failures.append(f"{env.doc2path(name)}:\n{result.exc_string}")
            continue
        logger.info("%s: executed in %.1f s", name, result.time)
        data = {"execution_seconds": result.time}
        bundle = CacheBundleIn(notebooks[name], str(env.doc2path(name)), data=data)
        get_cache(folder).cache_notebook_bundle(bundle, check_validity=False, overwrite=True)
    if failures:
        raise ExtensionError("notebooks failed\n" + "\n".join(failures))


def read_notebook(env: BuildEnvironment, name: str) -> nbformat.NotebookNode | None:
    """Returns the notebook of a page; None if the page is not one."""
    path = env.doc2path(name)
    text = Path(path).read_text(encoding="utf-8")
    reader = create_nb_reader(path, env.myst_config, env.mystnb_config, text)
    notebook = None if reader is None else reader.read(text)
    has_code = notebook and any(cell.cell_type == "code" for cell in notebook.cells)
    return notebook if has_code else None


def execute(notebook: nbformat.NotebookNode, timeout: int):
    """Executes a notebook in place, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
        return single_nb_execution(notebook, cwd=folder, timeout=timeout, allow_errors=False)


def escape_docstring(
    app: Sphinx, what: str, name: str, item: object, options: object, lines: list[str]
) -> None:
    """Escapes in docstrings, which are plain text, what reStructuredText would take for markup."""
    lines[:] = map(escape_line, lines)


def escape_line(line: str) -> str:
    """Returns a line with `*`, `|` and a final `_` of words escaped outside code."""
    parts = re.split(r"(`[^`]*`|:\w+[^:]*:)", line)
    parts[::2] = [re.sub(r"[*|\\]|(?<=\w)_(?!\w)", r"\\\g<0>", part) for part in parts[::2]]
    return "".join(parts)


def write_formula(translator, node: nodes.math) -> None:
    """Writes an inline formula as MathML, which browsers show without a script."""
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def write_block(translator, node: nodes.math_block) -> None:
    """Writes a formula in a paragraph of its own as MathML."""
    translator.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, object]:
    """Connects the functions of this file to Sphinx's events."""
    app.add_html_math_renderer("mathml", (write_formula, None), (write_block, None))
    app.connect("env-before-read-docs", execute_notebooks)
    app.connect("autodoc-process-docstring", escape_docstring, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
