# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How the documentation is built: `nox -s docs`."""

project = 'deepspeed-affine'
author = 'DeepSpeed Team'
extensions = ['myst_parser', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon']
myst_enable_extensions = ['dollarmath']
myst_heading_anchors = 3
# Sessions in the documents are examples of Python that the tests run.
highlight_language = 'python'
html_theme = 'alabaster'
html_theme_options = {'description': 'Sharded parameters, from any layout to any other', 'page_width': '1100px'}
autodoc_member_order = 'groupwise'
autodoc_typehints = 'none'
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# The license header of every file is no part of what it says.
exclude_patterns = ['_build', 'tables']
