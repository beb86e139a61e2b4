# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Read-only mappings and sequences through which a map shows its columns as objects."""

from collections.abc import Mapping, Sequence

from deepspeed.checkpoint.affine.piece import AffinePiece


class PieceSequence(Sequence):
    """The pieces of one shard. Equal to any list, tuple or sequence of the same pieces in the same order."""

    __slots__ = ('_make', '_pieces', '_count')

    def __init__(self, count, make):
        """``make`` returns the tuple of all ``count`` pieces; it is called when the first of them is asked for."""
        self._count = count
        self._make = make
        self._pieces = None

    def _all(self):
        if self._pieces is None:
            self._pieces = self._make()
        return self._pieces

    def __len__(self):
        return self._count

    def __getitem__(self, index):
        return self._all()[index]

    def __iter__(self):
        return iter(self._all())

    def __eq__(self, other):
        if not isinstance(other, (PieceSequence, list, tuple)):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other))

    __hash__ = None

    def __reduce__(self):
        return tuple, (self._all(), )

    def __repr__(self):
        return repr(list(self._all()))


class ReadOnlyMapping(Mapping):
    """A mapping that nobody can change, in pickles too; equal to any mapping with the same items."""

    __slots__ = ('_items', )

    def __init__(self, items):
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)

    def __hash__(self):
        return hash(frozenset(self._items.items()))

    def __reduce__(self):
        return ReadOnlyMapping, (self._items, )

    def __repr__(self):
        return repr(self._items)


def shard_shapes_view(columns):
    """Return a read-only mapping from location id to the tuple of sizes of its shard."""
    ids = columns.shard_ids.tolist()
    shapes = zip(columns.shard_shape.tolist(), columns.shard_ndim.tolist())
    return ReadOnlyMapping({rank: tuple(shape[:ndim]) for rank, (shape, ndim) in zip(ids, shapes)})


def pieces_view(columns):
    """Return a read-only mapping from location id to its pieces, made when they are asked for."""
    ids = columns.shard_ids.tolist()
    starts = columns.shard_starts.tolist()
    sets = {}
    return ReadOnlyMapping({
        rank:
        PieceSequence(stop - start, lambda start=start, stop=stop: _make_pieces(columns, start, stop, sets))
        for rank, start, stop in zip(ids, starts, starts[1:])
    })


def _make_pieces(columns, start, stop, sets):
    """Pieces ``start`` to ``stop`` as objects; ``sets`` keeps the frozenset of each set of holders, made once."""
    pieces = []
    for *geometry, held_by, scale in columns.rows(start, stop):
        if held_by not in sets:
            sets[held_by] = frozenset(columns.holder_ids(held_by))
        pieces.append(AffinePiece(*geometry, sets[held_by], scale))
    return tuple(pieces)
