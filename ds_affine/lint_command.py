# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The command `ds_affine lint`: are stored maps valid, complete and canonical?"""

from pathlib import Path

from deepspeed.checkpoint.affine.envelope import load_affine_maps
from deepspeed.checkpoint.affine.param_map import ParamAffineMap
from deepspeed.checkpoint.affine.union import union_affine_maps
from deepspeed.checkpoint.affine_adapters.safetensors_files import envelope_of, read_json
from ds_affine.tables import plain


def run(options):
    """Return 0 when nothing was found, 1 when something was."""
    checked = found = 0
    for file in options.files:
        try:
            entries = maps_in(read_json(Path(file)))
        except ValueError as error:
            raise ValueError(f"{'' if file in str(error) else f'{file}: '}{error}") from error
        for name, entry in entries.items():
            checked += 1
            for finding in findings(entry):
                found += 1
                print(f"{file}:{plain(name)}: {finding}")
    print(f"{checked} maps checked, {found} findings")
    return 1 if found else 0


def maps_in(content):
    """`{name: stored map}` of an envelope, or of one map, whose name is empty.

    Raises:
        ValueError: another version, or something else.
    """
    if "logical_shape" in content:
        return {"": content}
    content = envelope_of(content)
    # Reads the version and refuses what is no envelope; maps are looked at one by one, so that all findings are told.
    load_affine_maps({**content, "params": {}} if isinstance(content.get("params"), dict) else content)
    return content["params"]


def findings(entry):
    """What is wrong with a stored map, in words: invalid, incomplete or not canonical."""
    try:
        layout = ParamAffineMap.from_dict(entry)
        layout.validate()
    except (ValueError, TypeError, IndexError) as error:
        return [f"invalid: {error}"]
    try:
        layout.validate_coverage()
    except (AssertionError, ValueError) as error:
        return [f"incomplete: {error}"]
    try:
        canonical = union_affine_maps([layout])
    except ValueError as error:
        return [f"cannot be planned: {error}"]
    stored, least = (sum(map(len, one.pieces_by_rank.values())) for one in (layout, canonical))
    if stored != least:
        return [f"not canonical: {stored} pieces, where {least} say the same"]
    return []
