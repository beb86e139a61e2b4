# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Compare what an adapter said on every rank with the whole tensors that DeepSpeed has, element by element."""

from affine_oracle import check_map, shard_element_ids


def check_views(views, location_of=lambda rank: rank):
    """``views``: what each rank said of one tensor, see ``affine_zero_processes``.

    All ranks give one map, which covers the tensor. A rank hands out the buffer of its own location, if the map has
    that, and its elements are those that the map names.
    """
    check_one_map([view["layout"] for view in views])
    elements = shard_element_ids(views[0]["layout"])
    assert set(elements) <= {location_of(rank) for rank in range(len(views))}
    for rank, view in enumerate(views):
        assert view["full"] == views[0]["full"]
        own = location_of(rank)
        expected = {own: [view["full"][element] for element in elements[own]]} if own in elements else {}
        assert view["buffers"] == expected
        assert set(view["dtypes"]) <= {view["dtype"]}


def check_one_map(layouts):
    check_map(layouts[0])
    assert [layout.to_dict() for layout in layouts] == [layouts[0].to_dict()] * len(layouts)


def holders(view):
    """Location: number of elements."""
    return {location: shape[0] for location, shape in view["layout"].shard_shapes.items()}
