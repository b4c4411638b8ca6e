"""Encodes the difference between two versions of the same bytes without loss. Pure: no Ray.

    gap width (1 byte) | compressed? (1 byte) | count (8 bytes) | gaps | differences, byte plane by byte plane

Elements are compared by their bits, so that -0.0 and the payload of a NaN are preserved. A gap is the distance to the
previous changed element minus one. If a gap does not fit the gap width, an unchanged element in between is stored too.
A difference is the exclusive or of the bits of both elements.
"""

import numpy as np
from numpy.typing import NDArray

from streamppo.errors import WeightsError

DENSE = 0.1
"""The largest share of changed elements for which a delta is made. Beyond it, a delta costs more than it saves."""
COMPRESSED_FROM = 1 << 14
"""Differences of at least this many bytes are compressed. Gaps are nearly random and never compressed."""
CHUNK = 1 << 17
"""The number of elements compared at a time, so that they stay in the processor's cache."""
SAMPLE = 1 << 12
"""The size of the sample that estimates whether too many elements have changed."""
HEAD_BYTES = 10
GAPS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
Bytes = NDArray[np.uint8]


def changes(before: Bytes, after: Bytes, width: int) -> Bytes | None:
    """Encode the delta from `before` to `after`, whose elements have `width` bytes; None if it saves no bytes."""
    changed = _find_changes(_elements(before, width), _elements(after, width))
    if changed is None:
        return None
    places, differences = changed
    gaps = np.diff(places, prepend=-1)
    # The gap width must fit gaps of twice the mean, because some gaps are longer than the mean.
    mean = 2 * len(before) // width // max(1, len(gaps))
    gap_width = next(size for size in GAPS if mean < 256**size or size == max(GAPS))
    split, between = _split(gaps, gap_width)
    differences = np.insert(differences, between, 0) if len(between) else differences
    planes = differences.view(np.uint8).reshape(-1, width).T.reshape(-1)
    compressed = planes.nbytes >= COMPRESSED_FROM
    stored = np.frombuffer(_zstd().encode(planes), dtype=np.uint8) if compressed else planes
    head = np.array([gap_width, compressed, *len(split).to_bytes(8, "little")], dtype=np.uint8)
    encoded = np.concatenate([head, split.view(np.uint8), stored])
    return encoded if encoded.nbytes < after.nbytes else None


def apply(encoded: Bytes, into: Bytes, width: int) -> None:
    """Apply a delta in place. Raises `WeightsError`, with `into` unchanged, if `changes` cannot have made it."""
    if encoded.nbytes < HEAD_BYTES or encoded[0] not in GAPS or encoded[1] > 1:
        raise WeightsError("a delta has no valid head")
    gap_width, count = int(encoded[0]), int.from_bytes(encoded[2:HEAD_BYTES].tobytes(), "little")
    split, planes = encoded[HEAD_BYTES:][: count * gap_width], encoded[HEAD_BYTES:][count * gap_width :]
    elements = _elements(into, width)
    if split.nbytes != count * gap_width or count > len(elements):
        raise WeightsError("a delta does not fit the bytes that it changes")
    if encoded[1]:
        try:
            planes = np.frombuffer(_zstd().decode(planes), dtype=np.uint8)
        except RuntimeError as error:
            raise WeightsError(f"a delta cannot be decompressed: {error}") from error
    # A slice of bytes may not be aligned for these numbers.
    gaps = np.frombuffer(split.tobytes(), dtype=GAPS[gap_width])
    places = np.cumsum(gaps, dtype=np.int64) + np.arange(count)
    if planes.nbytes != count * width or (count and not 0 <= places[-1] < len(elements)):
        raise WeightsError("a delta does not fit the bytes that it changes")
    differences = np.ascontiguousarray(planes.reshape(width, count).T)
    elements[places] ^= differences.view(elements.dtype).reshape(-1)


Numbers = NDArray[np.uint64]
Places = NDArray[np.int64]


def _find_changes(old: Numbers, new: Numbers) -> tuple[Places, Numbers] | None:
    step = max(1, len(old) // SAMPLE)
    sample = old[::step] != new[::step]
    # Stop early if more than twice the share DENSE of a sample, taken at equal distances, has changed.
    if np.count_nonzero(sample) > 2 * DENSE * len(sample):
        return None
    places, differences, count = list[Places](), list[Numbers](), 0
    for start in range(0, len(old), CHUNK):
        at, values = _different(old[start : start + CHUNK] ^ new[start : start + CHUNK])
        count += len(at)
        if count > DENSE * len(old):
            return None
        places.append(at + start)
        differences.append(values)
    if not places:
        return np.zeros(0, dtype=np.int64), old
    return np.concatenate(places), np.concatenate(differences)


def _different(difference: Numbers) -> tuple[Places, Numbers]:
    """Return the indices and the values of nonzero elements, testing eight bytes at a time, because most are 0."""
    per = 8 // difference.itemsize
    if len(difference) % per:
        at = np.flatnonzero(difference != 0)
        return at, difference[at]
    wide = difference.view(np.uint64)
    words = np.flatnonzero(wide != 0)
    values = wide[words].view(difference.dtype)
    inside = np.flatnonzero(values != 0)
    return words[inside // per] * per + inside % per, values[inside]


def _split(gaps: Places, gap_width: int) -> tuple[NDArray[np.uint64], Places]:
    """Return the encoded gaps and, once for each inserted unchanged element, the index of the gap that it splits."""
    limit = 256**gap_width
    long = np.flatnonzero(gaps > limit)
    between = np.repeat(long, (gaps[long] - 1) // limit)
    # For a long gap, the conversion leaves the remainder modulo `limit`.
    short = (gaps - 1).astype(GAPS[gap_width])
    return np.insert(short, between, limit - 1) if len(between) else short, between


def _elements(data: Bytes, width: int) -> Numbers:
    return data.view(f"<u{width}")


def _zstd():
    from numcodecs.zstd import Zstd  # This import takes a third of a second, and small models do not need it.

    return Zstd(level=1)
