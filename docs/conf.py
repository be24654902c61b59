"""Sphinx's settings: `python -m sphinx -W --keep-going -b html docs docs/_build/html`.

The build needs no network. It executes the notebooks in docs/tutorials/ on a CPU.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from flaxformer_lite import __version__  # noqa: E402

project = "flaxformer_lite"
author = "the flaxformer_lite authors"
project_copyright = author
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "docs_extension",
]
exclude_patterns = ["_build", "**/runs", "**/.ipynb_checkpoints"]
source_suffix = {".md": "myst-nb"}
root_doc = "index"
language = "en"
highlight_language = "text"
nitpicky = True  # an unknown name in a cross-reference is an error
nitpick_ignore_regex = [
    (r"py:.*", r"(?!flaxformer_lite\.).*"),  # names of other libraries
    (r"py:class", r"flaxformer_lite\.decoding\.beam\.Length"),  # a type variable
]

# Markdown
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
myst_dmath_allow_digits = False  # "$5 to $10" is text
myst_update_mathjax = False
html_math_renderer = "mathml"
suppress_warnings: list[str] = []  # a link without a target is an error, as are all warnings

# Notebooks
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_execution_timeout = 300  # seconds, of one cell
nb_execution_show_tb = True
nb_merge_streams = True
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "flaxformer_lite" / "compiled")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
)
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

# Docstrings are plain text, in which single backticks are code.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True

# HTML
html_theme = "sphinx_book_theme"
html_title = "flaxformer_lite"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "navbar_persistent": [],  # the search field is in the sidebar
    "show_toc_level": 2,
    "use_download_button": False,
}
