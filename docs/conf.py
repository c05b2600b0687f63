"""The configuration of Sphinx for the documentation site; `make docs` builds it into
docs/_build/html.
"""

import os
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]
# Notebooks call the commands of this environment.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])

from myst_nb.core import render  # noqa: E402

from dantinox import __version__  # noqa: E402

project = "DantinoX"
author = "the authors of DantinoX"
version = release = __version__

extensions = [
    "myst_nb",  # loads myst_parser: Markdown, and notebooks that the build executes
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "plots", "**/.ipynb_checkpoints"]
nitpicky = True
# Types of other packages have no page here, and annotations name many classes that users never
# write.
nitpick_ignore_regex = [("py:.*", ".*")]

# Markdown as GitHub renders it: anchors of headings, HTML images, no further syntax to learn.
myst_enable_extensions = ["colon_fence", "deflist", "html_image"]
myst_heading_anchors = 4
smartquotes = False  # it changes the two dashes of a flag to one

# NOTEBOOKS="first_model serving" executes only these notebooks; the others have no outputs.
NOTEBOOKS = os.environ.get("NOTEBOOKS", "").split()
nb_execution_mode = "force"
nb_execution_excludepatterns = [
    f"tutorials/{path.name}"
    for path in DOCS.glob("tutorials/*.ipynb")
    if NOTEBOOKS and path.stem not in NOTEBOOKS
]
nb_execution_raise_on_error = True
nb_execution_timeout = 300  # seconds of one cell
nb_execution_in_temp = True  # notebooks write their runs there
nb_merge_streams = True

toc_object_entries = False  # headings name the same things
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "inherited-members": False}
napoleon_numpy_docstring = False

html_theme = "sphinx_book_theme"
html_title = "DantinoX"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "show_toc_level": 2,
    "navbar_persistent": [],  # the search is in the sidebar
    "show_navbar_depth": 1,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navigation_with_keys": False,
}
copybutton_exclude = ".linenos, .gp, .go"


def join_streams(outputs):
    """Joins the pieces of a cell's output. myst-nb's own function ends a line after each piece."""
    joined = []
    for output in outputs:
        if (
            joined
            and output["output_type"] == "stream"
            and joined[-1].get("name") == output["name"]
        ):
            joined[-1]["text"] = re.sub(
                r".*\r(?!\n)", "", joined[-1]["text"] + output["text"]
            )  # a progress bar's last state
        else:
            joined.append(output)
    return joined


def setup(app):
    assert callable(
        render.coalesce_streams
    )  # fails if another version of myst-nb has no such function
    render.coalesce_streams = join_streams

    import llms
    import reference

    app.connect("builder-inited", lambda app: reference.write(DOCS / "reference"), priority=1)
    app.connect("build-finished", llms.write)
