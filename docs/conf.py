"""Configuration of the documentation: `sphinx-build -W docs build/docs`."""

import os
import sys
import tomllib
from pathlib import Path

from jaxmem._version import __version__

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))
# Stories type commands: `jaxmem` is that of this Python's environment.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

project = "jaxmem"
author = "the jaxmem authors"
version = release = __version__
pyproject = Path(__file__).parents[1] / "pyproject.toml"
SOURCE = tomllib.loads(pyproject.read_text("utf-8"))["project"]["urls"]["Source"]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_argparse_cli",
    "sphinx_copybutton",
    "docstrings",
    "gin_keys",
    "whole_outputs",
]
exclude_patterns = ["_extensions"]

# Pages
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_in_temp = True  # stories write their files there
nb_execution_raise_on_error = True
nb_execution_timeout = 300

# Docstrings: single backticks are links where there is something to link to.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_typehints_description_target = "documented"
napoleon_custom_sections = [("Memory", "Memory"), ("Communication", "Communication")]
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
copybutton_prompt_text = ">>> |\\.\\.\\. |\\$ "
copybutton_prompt_is_regexp = True

# Theme: that of jax, flax and optax.
html_theme = "sphinx_book_theme"
html_title = "jaxmem"
html_logo = "_static/logo.svg"
html_favicon = "_static/icon.svg"
html_static_path = ["_static"]
html_css_files = ["jaxmem.css"]
html_js_files = ["search.js"]
html_context = {"default_mode": "auto"}
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": False,
    "repository_url": SOURCE,
    "repository_branch": "main",
    "path_to_docs": "docs",
    "use_repository_button": True,
    "use_edit_page_button": True,
    "logo": {"text": f"version {version}", "alt_text": "jaxmem"},
}
