# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Location ids for buffers that people know by other names."""


def location_ids(labels):
    """Return a dict from each label to a location id: its position in the order given.

    The q, k and v projections of one rank are three buffers, so a map of the fused parameter needs three locations.
    Label them, say ``('q', rank)``, once for a whole model; maps and ``TransferEndpoints`` are then built from the
    same ids on every process.

    Args:
        labels: iterable of hashable labels.

    Raises:
        ValueError: a label that comes twice, because two buffers would share an id.

    Example::

        >>> location_ids([('q', 0), ('q', 1), ('k', 0)])[('k', 0)]
        2
    """
    ids = {}
    for label in labels:
        if label in ids:
            raise ValueError(f'The label {label!r} is given twice, at positions {ids[label]} and {len(ids)}; every '
                             'buffer needs a label of its own.')
        ids[label] = len(ids)
    return ids
