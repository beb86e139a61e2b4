# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Arguments of the `ds_affine` command. Each subcommand imports what it needs only when it runs."""

import argparse
import importlib.util
import pathlib
import sys

HIDDEN = (
    "ds_affine: deepspeed-affine's packages cannot be imported, because Python takes `deepspeed` from {found}: a "
    "DeepSpeed in another directory, or an editable or source install, hides them. Install the wheels of both "
    "into one site directory.")


def main(arguments=None):
    """Run the command line `arguments` (those of the process by default) and return its exit code."""
    options = build_parser().parse_args(arguments)
    return options.run(options)


def hiding_deepspeed():
    """The folder of a DeepSpeed that keeps Python from looking into ours, or None. Nothing is imported."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    # DeepSpeed has no package of this name.
    if any((pathlib.Path(folder) / "checkpoint" / "affine_geometry").is_dir() for folder in folders):
        return None
    return folders[0] if folders else spec.origin


def build_parser():
    parser = argparse.ArgumentParser(prog="ds_affine", description="Move sharded parameters between layouts.")
    subcommands = parser.add_subparsers(title="subcommands", metavar="COMMAND", required=True)
    _add_demo(subcommands)
    return parser


def _add_demo(subcommands):
    text = ("Start 2 trainers and 2 rollouts on this machine, make one optimizer step on a small model held in "
            "ZeRO-3 partitions, move every parameter into tensor-parallel shards and compare each shard bit for bit.")
    parser = subcommands.add_parser("demo", help="move a small model from ZeRO-3 to TP-2 shards", description=text)
    parser.add_argument("--timeout",
                        type=_positive_seconds,
                        default=300.0,
                        metavar="SECONDS",
                        help="give up when the processes have not finished by then (default: %(default)s)")
    parser.set_defaults(run=_run_demo)


def _positive_seconds(text):
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return seconds


def _run_demo(options):
    found = hiding_deepspeed()
    if found is not None:
        print(HIDDEN.format(found=found), file=sys.stderr)
        return 1
    from ds_affine.demo.command import run_demo
    return run_demo(timeout=options.timeout)
