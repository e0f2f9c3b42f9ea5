"""How Sphinx builds these pages: ``sphinx-build -W -n -q docs build/docs``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from fp8tune import __version__

project = "fp8tune"
author = "the fp8tune authors"
copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx_copybutton", "sphinx.ext.autodoc", "fp8tune_reference"]
extensions += ["fp8tune_report"]
exclude_patterns = ["examples", "_ext"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
copybutton_prompt_text = "$ "

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
add_module_names = False
smartquotes = False  # -- begins an option
nitpick_ignore_regex = [("py:.*", r".*")]  # types of Python and of the libraries: no network, no inventory of theirs


html_theme = "furo"
html_title = f"fp8tune {release}"
html_static_path = ["_static"]
html_css_files = ["fp8tune.css"]
html_show_sphinx = False
html_copy_source = False
