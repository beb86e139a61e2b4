# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""`python -m ds_affine`, the same as the `ds_affine` command."""

import sys

from ds_affine.cli import main

if __name__ == "__main__":
    sys.exit(main())
