# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Arguments of the `ds_affine` command. Each subcommand imports what it needs only when it runs."""

import argparse
import contextlib
import importlib
import importlib.util
import os
import pathlib
import re
import sys

HIDDEN = (
    "ds_affine: deepspeed-affine's packages cannot be imported, because Python takes `deepspeed` from {found}: a "
    "DeepSpeed in another directory, or an editable or source install, hides them. Install the wheels of both "
    "into one site directory.")
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
DTYPES = ("float32", "bfloat16", "float16", "float64")


def main(arguments=None):
    """Run the command line `arguments` (those of the process by default) and return its exit code: 0 when all is
    well, 1 when the answer is no, 2 when the question cannot be answered, as a shell counts it when interrupted."""
    with contextlib.ExitStack() as closing:
        _have_streams(closing)
        options = build_parser().parse_args(arguments)
        try:
            code = _run(options)
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            # Who reads the output has seen enough, as `head` does.
            code = 141
        except KeyboardInterrupt:
            code = 130
        except (ValueError, OSError) as error:
            code = _refuse(options, error)
        except MemoryError:
            code = _refuse(options, "it takes more memory than there is")
        _forget_output()
        return code


def _have_streams(closing):
    """Services may have closed standard output and errors, and terminals may know few characters."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, closing.enter_context(open(os.devnull, "w")))
            closing.callback(setattr, sys, name, None)
        elif hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors="backslashreplace")


def _run(options):
    if options.needs_library and (found := hiding_deepspeed()) is not None:
        print(HIDDEN.format(found=found), file=sys.stderr)
        return 2
    # DeepSpeed says things on the standard output of whoever imports it, which is for answers here.
    with contextlib.redirect_stdout(sys.stderr):
        module = importlib.import_module(options.module)
    return module.run(options)


def _refuse(options, why):
    print(f"ds_affine {options.command}: {why}", file=sys.stderr)
    return 2


def _forget_output():
    """Have nothing more written that could not be: Python would try again when it ends, and say so again."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
    for add in (_add_demo, _add_reshard, _add_inspect, _add_verify, _add_plan, _add_explain, _add_lint, _add_doctor,
                _add_completion):
        add(subcommands)
    return parser


def _add(subcommands, name, help, description, examples="", needs_library=True):
    parser = subcommands.add_parser(name,
                                    help=help,
                                    description=description,
                                    epilog=examples and f"examples:\n{examples}",
                                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(command=name, module=f"ds_affine.{name}_command", needs_library=needs_library)
    return parser


def _add_demo(subcommands):
    parser = _add(
        subcommands, "demo", "move a small model from ZeRO-3 to TP-2 shards",
        "Start 2 trainers and 2 rollouts on this machine, make one optimizer step on a small model held in\n"
        "ZeRO-3 partitions, move every parameter into tensor-parallel shards and compare each shard bit for bit.")
    parser.add_argument("--timeout",
                        type=_seconds,
                        default=300.0,
                        metavar="SECONDS",
                        help="give up when the processes have not finished by then (default: %(default)s)")


def _add_reshard(subcommands):
    parser = _add(
        subcommands, "reshard", "write a checkpoint in another layout",
        "Read a checkpoint (of a DeepSpeed engine with ZeRO-1, 2, 3 or none, with AutoTP, AutoEP or neither;\n"
        "universal; safetensors) and write it as one Hugging Face safetensors folder, or as tensor-parallel\n"
        "shards. Tensors go from mapped file to mapped file, so memory does not grow with the model. DST gets its\n"
        "name when all of it is on disk.", "  ds_affine reshard checkpoints hf_model --to hf --dtype bfloat16\n"
        "  ds_affine reshard checkpoints shards --to tp-4 --config Llama-3-8B/config.json --fused\n"
        "  ds_affine reshard checkpoints shards --to tp-2 --split '_proj_in=0' --split '_proj_out=1'")
    parser.add_argument("source", metavar="SRC", help="folder of the checkpoint")
    parser.add_argument("destination", metavar="DST", help="folder to write; it must not be there")
    parser.add_argument("--to",
                        required=True,
                        type=_form,
                        metavar="hf|tp-N",
                        help="whole parameters in files as Hugging Face names them, or the shards of N ranks")
    parser.add_argument("--config",
                        metavar="FILE",
                        help="tp-N: config.json of a Llama or Qwen model, which says how its heads are cut "
                        "(default: that in SRC, if there is one)")
    parser.add_argument("--fused",
                        action="store_true",
                        help="tp-N: q, k, v and gate, up fused and the vocabulary padded, as servers have them")
    parser.add_argument("--split",
                        action="append",
                        default=[],
                        type=_split,
                        metavar="REGEX=AXIS",
                        help="tp-N, instead of a configuration: cut parameters whose name the expression is found in "
                        "along this axis, all others are whole on every rank; may be given again")
    parser.add_argument("--dtype", choices=DTYPES, help="store floating-point parameters in this one")
    parser.add_argument("--file-size",
                        type=_bytes,
                        metavar="SIZE",
                        help="hf: most bytes of tensors in a file (default: 5GB)")
    _add_filters(parser)
    parser.add_argument("--workers",
                        type=_positive,
                        default=2,
                        metavar="N",
                        help="parameters that are copied at one time (default: %(default)s)")
    parser.add_argument(
        "--memory",
        type=_bytes,
        metavar="SIZE",
        help="about how many bytes of the files may be in this process' memory, besides the parameters "
        "being copied; of SRC only where you own its files or may write them (default: as the kernel "
        "sees fit, which takes them back when it needs memory)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be written, and write nothing")
    parser.add_argument("--quiet", action="store_true", help="say nothing but errors")


def _add_inspect(subcommands):
    parser = _add(subcommands, "inspect", "show what is in a checkpoint, and in which layout",
                  "List the parameters and buffers of a checkpoint with their shapes, dtypes and layouts.",
                  "  ds_affine inspect checkpoints\n  ds_affine inspect checkpoints --json --include '*.norm.*'")
    parser.add_argument("path", metavar="PATH", help="folder of the checkpoint")
    parser.add_argument("--json", action="store_true", help="print JSON, with every map in full")
    _add_filters(parser)


def _add_verify(subcommands):
    parser = _add(
        subcommands, "verify", "compare two checkpoints in different layouts",
        "Say whether two checkpoints hold the same parameters, bit for bit.\n"
        "Exit code 0: they do, 1: they do not, 2: one cannot be read.",
        "  ds_affine verify checkpoints hf_model\n  ds_affine verify checkpoints hf_model --dtype bfloat16")
    parser.add_argument("first", metavar="A", help="folder of a checkpoint")
    parser.add_argument("second", metavar="B", help="folder of another one")
    parser.add_argument("--dtype", choices=DTYPES, help="compare floating-point parameters as stored in this one")
    _add_filters(parser)


LAYOUTS = (
    "SOURCE and TARGET are each a folder of a checkpoint, a JSON file of maps, or one of the words zero3-N, whole-N,\n"
    "rows-N and columns-N for N ranks, which take the parameters of the other side, or of a table of shapes,\n"
    "{\"parameters\": {name: shape}}, given after a colon.")


def _add_plan(subcommands):
    parser = _add(
        subcommands, "plan", "say what a move between two layouts would send",
        f"Plan the move of a model and say how many bytes go between which processes.\n\n{LAYOUTS}",
        "  ds_affine plan zero3-64:llama-3-8b.json rows-8\n"
        "  ds_affine plan checkpoints columns-4 --bandwidth 25GB\n"
        "  ds_affine plan old_maps.json new_maps.json --same-processes --json")
    _add_sides(parser)
    parser.add_argument("--bandwidth",
                        type=_bytes,
                        metavar="BYTES",
                        help="say how long the busiest process needs at so many bytes per second, such as 25GB")
    parser.add_argument("--json", action="store_true", help="print JSON, with every link")


def _add_explain(subcommands):
    parser = _add(
        subcommands, "explain", "say why a parameter goes where it goes",
        "Show the pieces of one parameter on both sides, the copies, and which of several holders was chosen.\n\n"
        f"{LAYOUTS}", "  ds_affine explain lm_head.weight checkpoints rows-4\n"
        "  ds_affine explain lm_head.weight checkpoints rows-4 --html page.html --figure figure.svg")
    parser.add_argument("name", metavar="NAME", help="of the parameter")
    _add_sides(parser)
    parser.add_argument("--html", metavar="FILE", help="write a page with pictures instead, which needs no other file")
    parser.add_argument("--figure",
                        metavar="FILE",
                        help="write the pictures instead, for papers, as .svg, .png or .pdf (needs matplotlib)")


def _add_sides(parser):
    parser.add_argument("source", metavar="SOURCE", help="layout to move from")
    parser.add_argument("target", metavar="TARGET", help="layout to move to")
    parser.add_argument("--same-processes",
                        action="store_true",
                        help="location l of the target is on the same process as location l of the source; else the "
                        "target has processes of its own")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the elements (default: %(default)s)")


def _add_lint(subcommands):
    parser = _add(
        subcommands, "lint", "check files of affine maps",
        "Say of every map in a JSON file whether it is valid, complete and canonical, and where it is not.\n"
        "Exit code 0: all are, 1: some are not, 2: a file cannot be read.", "  ds_affine lint affine_maps.json")
    parser.add_argument("files", nargs="+", metavar="FILE", help='{"version": 1, "params": {name: map}}, or one map')


def _add_doctor(subcommands):
    _add(subcommands,
         "doctor",
         "say what is installed and which affine module is in use",
         "Look at versions, at whether DeepSpeed uses this library's maps, and at what is missing.",
         needs_library=False)


def _add_completion(subcommands):
    parser = _add(subcommands,
                  "completion",
                  "print a script that completes arguments in a shell",
                  "Print a script for a shell, which then completes this command's arguments.",
                  '  eval "$(ds_affine completion bash)"\n'
                  '  ds_affine completion zsh > ~/.zsh/completions/_ds_affine',
                  needs_library=False)
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell")


def _add_filters(parser):
    for name, what in (("include", "only parameters whose name fits"), ("exclude", "no parameters whose name fits")):
        parser.add_argument(f"--{name}",
                            action="append",
                            default=[],
                            metavar="GLOB",
                            help=f"{what}; may be given again")


def _seconds(text):
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return seconds


def _positive(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _form(text):
    match = re.fullmatch(r"hf|tp-([1-9]\d{0,4})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither hf nor tp-N with a number of ranks, such as tp-4")
    return match[1] and int(match[1])


def _bytes(text):
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    if match is None or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size, such as 5GB or 500MB")
    return int(match[1]) * UNITS[match[2]]


def _split(text):
    pattern, _, axis = text.rpartition("=")
    try:
        return re.compile(pattern), int(axis)
    except (re.error, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no REGEX=AXIS, such as q_proj=0: {error}")
