# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Entry point for tools that still call setup.py; everything is declared in pyproject.toml."""

from setuptools import setup

setup()
