# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which parameters of a checkpoint `--include` and `--exclude` leave."""

from fnmatch import fnmatchcase


def chosen(parameters, include, exclude):
    """Of `{name: HeldParameter}` those whose name fits a pattern of `include`, where there are any, and none of
    `exclude`; each tied parameter under its first name alone."""
    return {name: held for name, held in parameters.items() if not held.tied_to and is_chosen(name, include, exclude)}


def is_chosen(name, include, exclude):
    """Whether the patterns leave this name."""
    included = not include or any(fnmatchcase(name, pattern) for pattern in include)
    return included and not any(fnmatchcase(name, pattern) for pattern in exclude)
