# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The command `ds_affine completion`: a script with which a shell completes the command's arguments."""

import sys

from ds_affine.cli import build_parser

# What is on disk, by what the help calls it.
ON_DISK = ("A", "B", "DST", "FILE", "PATH", "SOURCE", "SRC", "TARGET")


def run(options):
    """Return 0, or 2 where the package that writes the script is missing."""
    try:
        import shtab
    except ImportError:
        print("ds_affine completion: it takes the package shtab; pip install shtab", file=sys.stderr)
        return 2
    parser = build_parser()
    (subcommands, ) = parser._subparsers._group_actions
    for command in subcommands.choices.values():
        for action in command._actions:
            if action.metavar in ON_DISK:
                action.complete = shtab.FILE
    print(shtab.complete(parser, shell=options.shell))
    return 0
