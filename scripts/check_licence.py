# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Fail when a Python file does not open with the licence header."""

import pathlib
import sys

HEADER = "# SPDX-License-Identifier: Apache-2.0\n\n# DeepSpeed Team\n"


def lacks_header(path):
    text = path.read_text(encoding="utf-8")
    if text.startswith("#!"):
        text = text.partition("\n")[2]
    return not text.startswith(HEADER)


def main(arguments):
    offenders = [argument for argument in arguments if lacks_header(pathlib.Path(argument))]
    for offender in offenders:
        print(f"{offender}: no licence header; the file must begin with\n{HEADER}")
    return 1 if offenders else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
