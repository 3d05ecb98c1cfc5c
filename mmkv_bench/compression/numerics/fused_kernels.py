"""Triton kernels of the attention statistics: scores live in registers, one tile at a time, never in memory.

Only ``fused.py`` imports this module; see there for what the kernels compute. Every softmax takes two passes over the
keys: ``row_softmax`` computes a row's maximum and sum, then another kernel adds up the row's probabilities. No two
programs add to the same key, so results are equal on every run. Maximum and sum are kept apart, because a log-sum-exp
in float32 would cost 1e-5 at scores of some hundreds, as spread proxies have them.

Matrix multiplications use the inputs' dtype and sum in float32; float32 inputs are not multiplied as TF32. Scores are
exponents of 2 (``scale`` contains log2 e). Head dimensions, rows and keys that fill no tile are masked. Lengths are not
specialised, because Triton would compile several programs for lengths that change with every decode step.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-125.0)  # no exponential of an unmasked row is 0, as in `attention.exponentials`


@triton.jit
def _tile(X, row_stride, rows, count, DIM: tl.constexpr, DEPTH: tl.constexpr):
    """Load a tile ``[rows, DEPTH]`` of a head's vectors, with zeros beyond the last row and the last dimension."""
    dim = tl.arange(0, DEPTH)
    place = rows.to(tl.int64)[:, None] * row_stride + dim[None, :]
    return tl.load(X + place, mask=(rows < count)[:, None] & (dim < DIM)[None, :], other=0.0)


@triton.jit
def _scores(query, key, scale, WIDE: tl.constexpr):
    """Return the scores ``[rows, keys]`` of two tiles. WIDE: multiply as float32, for inputs of two dtypes."""
    if WIDE:
        query = query.to(tl.float32)
        key = key.to(tl.float32)
    return tl.dot(query, tl.trans(key), input_precision="ieee") * scale


@triton.jit(do_not_specialize=["count", "seen", "offset", "reach"])
def row_softmax(
    QUERY, KEY, PEAK, TOTAL, count, seen, offset, reach, scale, query_head, query_row, key_head, key_row,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, DIM: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute maximum score and sum of exponentials over this program's ``reach`` keys, for ROWS rows of a head."""
    block, head, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    rows = block * ROWS + tl.arange(0, ROWS)
    query = _tile(QUERY + head * query_head, query_row, rows, count, DIM, DEPTH)
    end = tl.minimum(seen, (part + 1) * reach)
    if CAUSAL:
        end = tl.minimum(end, offset + (block + 1) * ROWS)  # no row of the block sees more
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(part * reach, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        key = _tile(KEY + head // GROUP * key_head, key_row, keys, seen, DIM, DEPTH)
        scores = _scores(query, key, scale, WIDE)
        visible = (keys < seen)[None, :]
        if CAUSAL:
            visible = visible & (keys[None, :] <= offset + rows[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row that sees none of these keys
        total = total * tl.exp2(peak - base) + tl.sum(tl.exp2(scores - base[:, None]), 1)
        peak = higher
    place = (part * tl.num_programs(1) + head) * count + rows
    tl.store(PEAK + place, peak, mask=rows < count)
    tl.store(TOTAL + place, total, mask=rows < count)


@triton.jit(do_not_specialize=["count", "seen", "offset"])
def column_sums(
    QUERY, KEY, PEAK, WEIGHT, SUMS, count, seen, offset, scale, query_head, query_row, key_head, key_row,
    GROUP: tl.constexpr, DIM: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Sum the causal probabilities of KEYS keys over all rows of the GROUP query heads that read them."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    keys = block * KEYS + tl.arange(0, KEYS)
    key = _tile(KEY + head * key_head, key_row, keys, seen, DIM, DEPTH)
    first = tl.maximum(block * KEYS - offset, 0) // ROWS * ROWS  # no row before it sees the block
    sums = tl.zeros([KEYS], tl.float32)
    for member in range(GROUP):
        own = head * GROUP + member
        part = tl.zeros([KEYS], tl.float32)
        for start in range(first, count, ROWS):
            rows = start + tl.arange(0, ROWS)
            query = _tile(QUERY + own * query_head, query_row, rows, count, DIM, DEPTH)
            peak = tl.load(PEAK + own * count + rows, mask=rows < count, other=float("inf"))
            weight = tl.load(WEIGHT + own * count + rows, mask=rows < count, other=0.0)
            power = _scores(query, key, scale, WIDE) - peak[:, None]
            power = tl.where(keys[None, :] <= offset + rows[:, None], power, float("-inf"))
            part += tl.sum(tl.exp2(power) * weight[:, None], 0)
        sums += part
    tl.store(SUMS + head * seen + keys, sums, mask=keys < seen)


@triton.jit(do_not_specialize=["count", "seen", "size"])
def group_mass(
    QUERY, KEY, PEAK, WEIGHT, MASS, count, seen, size, scale, query_head, query_row, key_head, key_row,
    GROUP: tl.constexpr, MEMBERS: tl.constexpr, DIM: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Sum the probabilities of KEYS keys over the ``size`` rows of a group, mean over MEMBERS query heads."""
    block, group, made = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    keys = block * KEYS + tl.arange(0, KEYS)
    key = _tile(KEY + made * MEMBERS // GROUP * key_head, key_row, keys, seen, DIM, DEPTH)
    sums = tl.zeros([KEYS], tl.float32)
    for member in range(MEMBERS):
        own = made * MEMBERS + member
        part = tl.zeros([KEYS], tl.float32)
        for start in range(group * size, (group + 1) * size, ROWS):
            rows = start + tl.arange(0, ROWS)
            inside = rows < (group + 1) * size
            query = _tile(QUERY + own * query_head, query_row, rows, count, DIM, DEPTH)
            peak = tl.load(PEAK + own * count + rows, mask=inside, other=float("inf"))
            weight = tl.load(WEIGHT + own * count + rows, mask=inside, other=0.0)
            power = tl.maximum(_scores(query, key, scale, WIDE) - peak[:, None], LOWEST)
            part += tl.sum(tl.exp2(power) * weight[:, None], 0)
        sums += part
    place = (made * tl.num_programs(1) + group) * seen + keys
    tl.store(MASS + place, sums / MEMBERS, mask=keys < seen)


@triton.jit
def _above(MASS, width, bits, BLOCK: tl.constexpr):
    """Sum the masses whose bit pattern is larger than ``bits``, float64; non-negative floats order like these."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, width, BLOCK):
        index = start + tl.arange(0, BLOCK)
        mass = tl.load(MASS + index, mask=index < width, other=0.0)
        total += tl.where(mass.to(tl.int32, bitcast=True) > bits, mass, 0.0).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["width"])
def covering_set(MASS, TARGET, HIGHEST, THRESHOLD, CUT, width, LEFT: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the smallest mass in a row's covering set, and the last index of such a key in the set (-1: none).

    The bit pattern of the threshold is bisected down to its last bit, each time with one sum over the row
    (``ordering.nucleus`` stops earlier and sorts the rest, which a kernel cannot do as cheaply).
    """
    row = tl.program_id(0).to(tl.int64)
    MASS += row * width
    low = tl.full([], -1, tl.int32)
    high = tl.load(HIGHEST + row)
    target = tl.minimum(tl.load(TARGET + row), _above(MASS, width, low, BLOCK))
    for _ in range(32):  # throughout: mass above `low` >= target > mass above `high`
        middle = low + (high - low) // 2
        enough = _above(MASS, width, middle, BLOCK) >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    threshold = high.to(tl.float32, bitcast=True)
    wanted = (target - _above(MASS, width, high, BLOCK)) / threshold.to(tl.float64)
    if LEFT:
        wanted = tl.maximum(tl.ceil(wanted), 1.0)
    else:
        wanted = tl.floor(wanted)
    met = tl.full([], 0, tl.int32)
    cut = tl.full([], -1, tl.int32)
    for start in range(0, width, BLOCK):
        index = start + tl.arange(0, BLOCK)
        mass = tl.load(MASS + index, mask=index < width, other=-1.0)
        equal = (mass == threshold).to(tl.int32)
        rank = met + tl.cumsum(equal, 0)
        chosen = (equal == 1) & (rank.to(tl.float64) <= wanted)
        cut = tl.maximum(cut, tl.max(tl.where(chosen, index, -1), 0))
        met += tl.sum(equal, 0)
    tl.store(THRESHOLD + row, threshold)
    tl.store(CUT + row, cut)


@triton.jit(do_not_specialize=["width", "rows"])
def votes(MASS, THRESHOLD, CUT, VOTES, width, rows, BLOCK: tl.constexpr):
    """Count, for each of BLOCK keys, how many of a head's ``rows`` covering sets contain the key."""
    head = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.float32)
    for number in range(rows):
        row = head * rows + number
        mass = tl.load(MASS + row * width + index, mask=index < width, other=-1.0)
        threshold = tl.load(THRESHOLD + row)
        member = (mass > threshold) | ((mass == threshold) & (index <= tl.load(CUT + row)))
        found += member.to(tl.float32)
    tl.store(VOTES + head * width + index, found, mask=index < width)
