# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The command `ds_affine plan`: what a move from one layout to another would send, and between whom."""

import json

import torch

from ds_affine.facts import facts_of
from ds_affine.sides import read_sides
from ds_affine.tables import plain, show, size

LINKS = 10
NAMED = 5


def run(options):
    """Return 0."""
    sides = read_sides(options.source, options.target, getattr(torch, options.dtype))
    facts = facts_of(sides.plan(options.same_processes), options.bandwidth)
    facts |= {"only_in_source": sides.only_in_source, "only_in_target": sides.only_in_target}
    if options.json:
        print(json.dumps(facts, indent=1))
        return 0
    print(f"{options.source} to {options.target}: {facts['parameters']:,} parameters, {facts['segments']:,} copies, "
          f"{size(facts['sent_bytes'])} between processes, {size(facts['local_bytes'])} within them")
    for side, names in ((options.source, sides.only_in_source), (options.target, sides.only_in_target)):
        if names:
            more = ", ..." if len(names) > NAMED else ""
            print(f"left out: {len(names):,} only in {side}: {', '.join(map(plain, names[:NAMED]))}{more}")
    for what in ("sender", "receiver"):
        if facts[f"busiest_{what}"] is not None:
            process, numbytes = facts[f"busiest_{what}"]
            print(f"busiest {what}: process {process}, {size(numbytes)}")
    if facts["seconds"] is not None:
        print(f"at {options.bandwidth:,} bytes per second and process: at least {facts['seconds']:.3g} s")
    links = facts["links"]
    show(f"heaviest of {len(links):,} links", ("from", "to", "size"),
         [(str(one), str(other), size(numbytes)) for one, other, numbytes in links[:LINKS]],
         right=1)
    return 0
