# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Arguments of the `ds_affine` command. Each subcommand imports what it needs only when it runs."""

import argparse


def main(arguments=None):
    """Run the command line `arguments` (those of the process by default) and return its exit code."""
    options = build_parser().parse_args(arguments)
    return options.run(options)


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
    from ds_affine.demo.command import run_demo
    return run_demo(timeout=options.timeout)
