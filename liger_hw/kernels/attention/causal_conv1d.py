r"""Compute a short causal convolution of each channel, as LFM2, Mamba-2 and Qwen3-Next do.

    u_t = b_t x_t                                       b and c: the gates of LFM2, 1 without them
    s_t = sum over k < K of w_(K-1-k) u_(t-k) + bias    u of the initial states where t < k, 0 in another sequence
    y_t = c_t f(s_t)                                    f: silu, or nothing; rounded once

    ds_t = dy_t c_t f'(s_t),    du_t = sum over k < K of w_(K-1-k) ds_(t+k) + gradient of the final state u_t
    dx_t = du_t b_t,  db_t = du_t x_t,  dc_t = dy_t f(s_t)
    dw_(K-1-k) = sum over t of ds_t u_(t-k),  dbias = sum over t of ds_t

Letters: N values of x, K taps, G gates. Traffic: forward reads x and the gates and writes y ((2 + G) N); backward reads
x, the gates and dy and writes the gradients of x and the gates ((3 + 2 G) N), plus fp32 partial sums of a fixed number
of programs. Both are bound by memory. A program has a block of channels and consecutive tokens: it reads each once, and
keeps the last K - 1 tokens and their unfinished gradients in registers. It reads K - 1 tokens of each neighbour, too.
Its tokens belong to one row of the batch. A program's part of it, for K = 4:

                          first                       end
    tokens      . . b b b | x x x x x x x x x x x x x | a a a . .
                    |---|                               |---|
                    `_before` fills `window` with       the backward goes on here: their ds belong
                    the K - 1 inputs u before           to du of the part's last tokens

    forward     row t:  s_t from u_t and `window`, then `window` <- u_t, u_(t-1), u_(t-2)
    backward    row t:  du_(t-3) = `pending[2]` + w_0 ds_t is complete, and stored
                        `pending` <- w_3 ds_t, pending[0] + w_2 ds_t, pending[1] + w_1 ds_t
"""

import torch
from torch.nn import functional as F

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.checks import check
from liger_hw.dispatch import Cost, differentiable, op, raw, widen
from liger_hw.kernels._math import in_row, load_parameter, sigmoid
from liger_hw.kernels._partials import add_partials, partial_sums, programs_for_blocks
from liger_hw.kernels._rows import contiguous, rows_and_cols, rows_or_none
from liger_hw.launch import launch
from liger_hw.spelling import check_known
from liger_hw.tuning import Config, power_of_2, tuned

CONV_ACTIVATIONS = ("silu",)


def _validate(x, weight, bias, input_gate, output_gate, initial_states, seq_idx, activation, return_final_states):
    check(x.ndim == 3 and x.is_floating_point(), "x", x, "floating point (batch, tokens, channels)")
    batch, tokens, channels = x.shape
    fits = weight.ndim == 2 and weight.shape[0] == channels and 2 <= weight.shape[1] <= 4 and weight.device == x.device
    check(
        fits, "weight", weight, f"2 to 4 taps for each channel of x, ({channels}, 2) to ({channels}, 4), on its device"
    )
    if bias is not None:
        fits = bias.shape == (channels,) and bias.device == x.device
        check(fits, "bias", bias, "one value for each channel of x, on its device")
    for name, gate in (("input_gate", input_gate), ("output_gate", output_gate)):
        if gate is not None:
            check((gate.shape, gate.dtype, gate.device) == (x.shape, x.dtype, x.device), name, gate, x)
    if initial_states is not None:
        states = batch, channels, weight.shape[1] - 1
        fits = (tuple(initial_states.shape), initial_states.dtype, initial_states.device) == (states, x.dtype, x.device)
        check(fits, "initial_states", initial_states, f"{x.dtype} of shape {states} on {x.device}")
    if seq_idx is not None:
        fits = seq_idx.shape == (batch, tokens) and seq_idx.device == x.device
        fits = fits and seq_idx.dtype in (torch.int32, torch.int64)
        check(fits, "seq_idx", seq_idx, f"int32 or int64 of shape {(batch, tokens)} on {x.device}")
        alone = initial_states is None and not return_final_states
        check(
            alone, "seq_idx", seq_idx, "None with initial_states or return_final_states, which hold one sequence a row"
        )
    if activation is not None:
        check_known("activation", activation, CONV_ACTIVATIONS)


@op(validate=_validate)
def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, input_gate: torch.Tensor | None = None,
    output_gate: torch.Tensor | None = None, initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None, activation: str | None = None, return_final_states: bool = False,
):  # fmt: skip
    """Convolve each channel with its own taps over the last tokens of its sequence.

    y = output_gate * activation(conv(input_gate * x) + bias), in fp32, rounded once; LFM2's unfused module also rounds
    each product and sum. The argument names are those of the package causal_conv1d, which has no gates.

    Args:
        x: (batch, tokens, channels), any strides and floating dtype; plain torch computes dtypes other than fp32, fp16
            and bf16. Pass `x.transpose(1, 2)` of a tensor (batch, channels, tokens): it is read in place if its
            channels are adjacent in memory, as in transformers' models; others are copied.
        weight: (channels, taps) with 2 to 4 taps, any floating dtype; the last tap multiplies the token itself.
        bias: (channels,), any floating dtype, or None.
        input_gate: like `x`, or None; multiplies it before the convolution.
        output_gate: like `x`, or None; multiplies the result.
        initial_states: (batch, channels, taps - 1) in `x.dtype`, the gated inputs of the tokens before the first, or
            None for zeros.
        seq_idx: (batch, tokens), int32 or int64: the sequence of each token in a packed row. A sequence begins where
            the number changes, and nothing before it counts. A token with a negative number is padding: its result and
            gradient are 0. None: one sequence a row.
        activation: "silu" or None.
        return_final_states: also return the gated inputs of the last tokens, rounded to `x.dtype`: the initial states
            of the tokens that follow.

    Returns:
        Like `x`, contiguous; or that and (batch, channels, taps - 1) in `x.dtype`.

    Raises:
        ValueError: an argument does not fit `x`, `weight` has another number of taps, `activation` is unknown, or
            states are given or asked for beside `seq_idx`.

    Examples:
        >>> liger_hw.causal_conv1d(torch.rand(2, 5, 8), torch.rand(8, 4), activation="silu").shape
        torch.Size([2, 5, 8])
    """
    tokens, before = x.shape[1], weight.shape[1] - 1
    u = widen(x) if input_gate is None else widen(x) * widen(input_gate)
    if initial_states is None:
        u = F.pad(u, (0, 0, before, 0))
    else:
        u = torch.cat([widen(initial_states).transpose(1, 2), u], 1)
    s = 0.0 if bias is None else widen(bias)
    if seq_idx is not None:
        first = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (min(tokens, 1), 0))
        sequence = F.pad(first.cumsum(1), (before, 0), value=-1)
    for tap in range(before + 1):
        term = u[:, tap : tap + tokens]
        if seq_idx is not None:
            same = sequence[:, tap : tap + tokens] == sequence[:, before:]
            term = torch.where(same[..., None], term, 0.0)
        s = s + widen(weight[:, tap]) * term
    y = s if activation is None else F.silu(s)
    y = y if output_gate is None else y * widen(output_gate)
    y = y if seq_idx is None else torch.where(seq_idx[..., None] < 0, 0.0, y)
    y = y.to(x.dtype)
    if not return_final_states:
        return y
    states = None if initial_states is None else initial_states.transpose(1, 2)
    return y, _final_states(x, input_gate, states, before).transpose(1, 2)


def _final_states(x, input_gate, initial_states, size):
    """Return the last `size` gated inputs (batch, size, channels); so are the initial states."""
    start = max(x.shape[1] - size, 0)
    state = x[:, start:]
    if input_gate is not None:
        state = (widen(state) * widen(input_gate[:, start:])).to(x.dtype)
    earlier = x.new_zeros(len(x), size, x.shape[2]) if initial_states is None else initial_states
    return torch.cat([earlier[:, state.shape[1] :], state], 1)


causal_conv1d.shards(
    x="b T c", weight="c K", bias="c", input_gate="b T c", output_gate="b T c", initial_states="b c S", seq_idx="b T",
    returns=("x", "b c S"),
)  # fmt: skip


@causal_conv1d.cost
def _(x, weight, bias=None, input_gate=None, output_gate=None, initial_states=None, *options, **named):
    once = sum(p.nbytes for p in (weight, bias, initial_states) if p is not None)
    gates, taps = sum(gate is not None for gate in (input_gate, output_gate)), weight.shape[1]
    flops = 2 * taps + gates + 5, 6 * taps + 3 * gates + 10
    return Cost(
        (2 + gates) * x.nbytes + once, (3 + 2 * gates) * x.nbytes + 2 * once, *(count * x.numel() for count in flops)
    )


@tuned
def causal_conv1d_forward_config(cols, itemsize, tensors, device):
    return _one_warp(cols, itemsize, tensors, 16 // itemsize, 8, 8, 1, device)


@tuned
def causal_conv1d_backward_config(cols, itemsize, tensors, device):
    # 2 x 4096 x 8192 in bf16 (H200): 0.158 ms with loads to registers, 0.135 with three stages in shared memory, and
    # 0.120 with twice the channels, which spill with a bias or states.
    if device.async_copy:
        return _one_warp(cols, itemsize, tensors, 4, 20, 4, 3, device)
    return _one_warp(cols, itemsize, tensors, 16 // itemsize, 20, power_of_2(8 // tensors + 1) // 2, 1, device)


def _one_warp(cols, itemsize, tensors, lane, each, most, stages, device):
    """Return the configuration of one warp.

    It has a block of channels, and loads at most `most` tokens at once. A lane has `lane` channels. It needs 60
    registers, and `each` for a channel; all programs run at once, as far as shared memory holds their stages. Twice
    the bytes that the bandwidth needs are in flight.
    """
    # single values of 16 bits take a register each: at odd widths 8 channels with gates spill (compiled for sm90)
    lane = 4 if cols % 8 else lane
    if device.core is None:  # a lane has no more registers where fewer run
        lane = min(lane, device.registers // 32)
    programs = device.registers * device.max_threads // ((60 + each * lane) * device.warp_size)
    block = min(power_of_2(cols), lane * device.warp_size)
    step = programs * device.warp_size * lane * itemsize * tensors
    rows = min(power_of_2(-(-2 * device.bytes_in_flight // step)), most)
    if stages > 1:
        programs = min(programs, device.shared_memory // ((stages - 1) * rows * block * itemsize * tensors))
    return Config({"ROWS": rows, "COLS": block, "STAGES": stages}, num_warps=1, programs=programs)


@triton.jit
def _program_columns(cols: tl.constexpr, COLS: tl.constexpr):
    """Return this program's columns and mask, its number, and how many share its columns."""
    BLOCKS: tl.constexpr = (cols + COLS - 1) // COLS
    col = tl.program_id(0) % BLOCKS * COLS + tl.arange(0, COLS)[None, :]
    return col, in_row(col, cols, COLS), tl.program_id(0) // BLOCKS, tl.num_programs(0) // BLOCKS


@triton.jit
def _program_part(index, parts, length, ROWS: tl.constexpr):
    """Return a part's batch entry, that entry's first and end row, and the part's."""
    entry, size = index // parts, ((length + ROWS - 1) // ROWS + parts - 1) // parts * ROWS
    begin, close = entry * length, entry * length + length
    first = tl.minimum(begin + index % parts * size, close)
    return entry, begin, close, first, tl.minimum(first + size, close)


@triton.jit
def _within(valid, row, first, end):
    """Return the mask `valid` for a row from `first` to `end`, else an empty one."""
    row = tl.full((1, 1), row, tl.int32)  # Triton's interpreter makes integers of a scalar condition
    return valid & (row >= first) & (row < end)


@triton.jit
def _where_within(x, row, first, end):
    """Return `x` for a row from `first` to `end`, else 0."""
    row = tl.full((1, 1), row, tl.int32)
    return tl.where((row >= first) & (row < end), x, 0.0)


@triton.jit
def _load_row(P, row, stride, col, mask):
    """Load the columns of a row; return 1 without P."""
    if P is not None:
        return tl.load(P + tl.cast(row, tl.int64) * stride + col, mask, other=0.0)
    else:
        return tl.full((1, 1), 1.0, tl.float32)


@triton.jit
def _load_rows(
    X, INPUT_GATE, OUTPUT_GATE, DY, SEQ_IDX, start, end, x_stride, input_stride, output_stride, dy_stride, col, valid,
    rows, ROWS: tl.constexpr,
):  # fmt: skip
    """Load ROWS rows of each tensor, before any store: no load may pass one."""
    xs, inputs, outputs, dys, numbers = (), (), (), (), ()
    for i in tl.static_range(ROWS):
        mask = _within(valid, start + i, start, end)
        xs = xs + (_load_row(X, start + i, x_stride, col, mask),)
        inputs = inputs + (_load_row(INPUT_GATE, start + i, input_stride, col, mask),)
        outputs = outputs + (_load_row(OUTPUT_GATE, start + i, output_stride, col, mask),)
        dys = dys + (_load_row(DY, start + i, dy_stride, col, mask),)
        numbers = numbers + (_number(SEQ_IDX, start + i, rows),)
    return xs, inputs, outputs, dys, numbers


@triton.jit
def _load_taps(W, col, valid, cols: tl.constexpr, SIZE: tl.constexpr):
    taps = ()
    for k in tl.static_range(SIZE):
        taps = taps + (tl.load(W + k * cols + col, valid, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _zeros(COUNT: tl.constexpr, COLS: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(COUNT):
        zeros = zeros + (tl.zeros((1, COLS), tl.float32),)
    return zeros


@triton.jit
def _pushed(window, value, SIZE: tl.constexpr):
    """Return `window`, values of the SIZE - 1 rows before, for the next row."""
    pushed = (value,)
    for k in tl.static_range(SIZE - 2):
        pushed = pushed + (window[k],)
    return pushed


@triton.jit
def _within_sequence(window, row, opened, SEQ_IDX, SIZE: tl.constexpr):
    """Return `window` with 0 for rows before `opened`.

    It has values of the SIZE - 1 rows before `row`. Without sequence numbers there are none.
    """
    if SEQ_IDX is None:
        return window
    else:
        kept = ()
        for k in tl.static_range(1, SIZE):
            kept = kept + (_where_within(window[k - 1], row - k, opened, row),)
        return kept


@triton.jit
def _state(entry, token, cols: tl.constexpr, SIZE: tl.constexpr):
    """Return the place of a state of (batch, SIZE - 1, cols)."""
    return (tl.cast(entry, tl.int64) * (SIZE - 1) + token) * cols


@triton.jit
def _number(SEQ_IDX, row, rows):
    """Load a row's sequence number, or that of the nearest row; return 0 without numbers.

    A mask would split AMD's code into branches: a forward with 238 registers instead of 91 (compiled for gfx942).
    """
    if SEQ_IDX is not None:
        return tl.load(SEQ_IDX + tl.minimum(tl.maximum(row, 0), rows - 1))
    else:
        return 0


@triton.jit
def _before(
    X, INPUT_GATE, INITIAL, SEQ_IDX, entry, begin, row, rows, x_stride, input_stride, col, valid, cols: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Return inputs, gates and gated inputs of the rows before `row`, the latest first.

    They are 0 where the row is of another sequence. The last result is the first row of the sequence, if it is one of
    them, or an earlier row.
    """
    xs, gates, window = (), (), ()
    opened = begin
    for k in tl.static_range(1, SIZE):
        if SEQ_IDX is not None:
            if (row - k >= opened) & (_number(SEQ_IDX, row - k, rows) != _number(SEQ_IDX, row - k + 1, rows)):
                opened = row - k + 1
        mask = _within(valid, row - k, opened, row)
        x = _load_row(X, row - k, x_stride, col, mask)
        gate = _load_row(INPUT_GATE, row - k, input_stride, col, mask)
        u = x.to(tl.float32) * gate.to(tl.float32)
        if INITIAL is not None:
            at = _state(entry, SIZE - 1 + row - k - begin, cols, SIZE) + col
            u += tl.load(INITIAL + at, _within(valid, row - k, begin - SIZE + 1, begin), other=0.0).to(tl.float32)
        xs, gates, window = xs + (x,), gates + (gate,), window + (u,)
    return xs, gates, window, opened


@triton.jit
def _convolved(u, window, taps, bias, SIZE: tl.constexpr):
    s = taps[SIZE - 1] * u + bias
    for k in tl.static_range(1, SIZE):
        s += taps[SIZE - 1 - k] * window[k - 1]
    return s


@triton.jit(do_not_specialize=["rows", "length", "parts"])
def causal_conv1d_forward(
    X, W, B, INPUT_GATE, OUTPUT_GATE, INITIAL, SEQ_IDX, Y, rows, length, parts, x_stride, input_stride, output_stride,
    cols: tl.constexpr, SIZE: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    col, valid, program, programs = _program_columns(cols, COLS)
    taps, bias = _load_taps(W, col, valid, cols, SIZE), load_parameter(B, col, 0.0, cols, COLS).to(tl.float32)
    for index in range(program, rows // length * parts, programs):
        entry, begin, close, first, end = _program_part(index, parts, length, ROWS)
        xs_before, gates_before, window, opened = _before(
            X, INPUT_GATE, INITIAL, SEQ_IDX, entry, begin, first, rows, x_stride, input_stride, col, valid, cols, SIZE
        )  # fmt: skip
        previous = _number(SEQ_IDX, first - 1, rows)
        for start in tl.range(first, end, ROWS, num_stages=STAGES):
            xs, inputs, outputs, unused, numbers = _load_rows(
                X, INPUT_GATE, OUTPUT_GATE, None, SEQ_IDX, start, end, x_stride, input_stride, output_stride, 0, col,
                valid, rows, ROWS,
            )  # fmt: skip
            for i in tl.static_range(ROWS):
                row, number = start + i, numbers[i]
                opened = tl.where(number == previous, opened, row)
                u = xs[i].to(tl.float32) * inputs[i].to(tl.float32)
                window = _within_sequence(window, row, opened, SEQ_IDX, SIZE)
                y = _convolved(u, window, taps, bias, SIZE)
                if ACTIVATION is not None:
                    y *= sigmoid(y, X.dtype.element_ty)
                y *= outputs[i].to(tl.float32)
                if SEQ_IDX is not None:
                    y = tl.where(number < 0, 0.0, y)
                tl.store(Y + tl.cast(row, tl.int64) * cols + col, y, _within(valid, row, first, end))
                window, previous = _pushed(window, u, SIZE), number


@triton.jit(do_not_specialize=["rows", "length", "parts"])
def causal_conv1d_backward(
    X, W, B, INPUT_GATE, OUTPUT_GATE, INITIAL, SEQ_IDX, DY, DFINAL, DX, DINPUT, DOUTPUT, DINITIAL, SUMS, rows, length,
    parts, x_stride, input_stride, output_stride, dy_stride, cols: tl.constexpr, SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # a fixed number of programs; each sums its own gradients of weight and bias
    BEFORE: tl.constexpr = SIZE - 1
    col, valid, program, programs = _program_columns(cols, COLS)
    taps, bias = _load_taps(W, col, valid, cols, SIZE), load_parameter(B, col, 0.0, cols, COLS).to(tl.float32)
    dtaps, dbias = _zeros(SIZE, COLS), tl.zeros((1, COLS), tl.float32)
    for index in range(program, rows // length * parts, programs):
        entry, begin, close, first, end = _program_part(index, parts, length, ROWS)
        xs_before, gates_before, window, opened = _before(
            X, INPUT_GATE, INITIAL, SEQ_IDX, entry, begin, first, rows, x_stride, input_stride, col, valid, cols, SIZE
        )  # fmt: skip
        previous, pending = _number(SEQ_IDX, first - 1, rows), _zeros(BEFORE, COLS)
        for start in tl.range(first, tl.where(first < end, end + BEFORE, first), ROWS, num_stages=STAGES):
            xs, inputs, outputs, dys, numbers = _load_rows(
                X, INPUT_GATE, OUTPUT_GATE, DY, SEQ_IDX, start, close, x_stride, input_stride, output_stride,
                dy_stride, col, valid, rows, ROWS,
            )  # fmt: skip
            for i in tl.static_range(ROWS):
                row, number = start + i, numbers[i]
                opened = tl.where(number == previous, opened, row)
                u, dy = xs[i].to(tl.float32) * inputs[i].to(tl.float32), dys[i].to(tl.float32)
                window = _within_sequence(window, row, opened, SEQ_IDX, SIZE)
                y = _convolved(u, window, taps, bias, SIZE)
                ds = dy * outputs[i].to(tl.float32)
                if ACTIVATION is not None:
                    share = sigmoid(y, X.dtype.element_ty)
                    ds *= share * (1.0 + y * (1.0 - share))
                    y *= share
                dgate, ds = dy * y, _where_within(ds, row, first, close)
                if SEQ_IDX is not None:
                    ds, dgate = tl.where(number < 0, 0.0, ds), tl.where(number < 0, 0.0, dgate)
                if DOUTPUT is not None:
                    tl.store(DOUTPUT + tl.cast(row, tl.int64) * cols + col, dgate, _within(valid, row, first, end))
                # this row's share of the gradients of the rows before, the oldest of which is complete
                shares = ()
                for k in tl.static_range(1, SIZE):
                    shares = shares + (taps[BEFORE - k] * ds,)
                shares = _within_sequence(shares, row, opened, SEQ_IDX, SIZE)
                oldest, du = row - BEFORE, pending[BEFORE - 1] + shares[BEFORE - 1]
                if DFINAL is not None:
                    at = _state(entry, oldest - close + BEFORE, cols, SIZE) + col
                    du += tl.load(DFINAL + at, _within(valid, oldest, close - BEFORE, close), other=0.0).to(tl.float32)
                mask, at = _within(valid, oldest, first, end), tl.cast(oldest, tl.int64) * cols + col
                if DX is not None:
                    tl.store(DX + at, du * gates_before[BEFORE - 1].to(tl.float32), mask)
                if DINPUT is not None:
                    tl.store(DINPUT + at, du * xs_before[BEFORE - 1].to(tl.float32), mask)
                if DINITIAL is not None:
                    mask = _within(valid, first, begin, begin + 1) & _within(valid, oldest, begin - BEFORE, begin)
                    tl.store(DINITIAL + _state(entry, row - begin, cols, SIZE) + col, du, mask)
                unfinished = (taps[BEFORE] * ds,)
                for k in tl.static_range(1, BEFORE):
                    unfinished = unfinished + (pending[k - 1] + shares[k - 1],)
                part_ds, sums = _where_within(ds, row, first, end), ()
                for k in tl.static_range(1, SIZE):
                    sums = sums + (dtaps[k - 1] + part_ds * window[BEFORE - k],)
                dtaps, dbias, pending = sums + (dtaps[BEFORE] + part_ds * u,), dbias + part_ds, unfinished
                window, previous = _pushed(window, u, SIZE), number
                xs_before, gates_before = _pushed(xs_before, xs[i], SIZE), _pushed(gates_before, inputs[i], SIZE)
    if SUMS is not None:
        COUNT: tl.constexpr = SIZE if B is None else SIZE + 1
        width = (cols + COLS - 1) // COLS * COLS
        at = program.to(tl.int64) * COUNT * width + col
        for k in tl.static_range(SIZE):
            tl.store(SUMS + at + k * width, dtaps[k])
        if B is not None:
            tl.store(SUMS + at + SIZE * width, dbias)


def _divided(find_config, x, views):
    """Return a configuration, blocks of columns, programs of a block, parts of a batch entry."""
    rows, cols = rows_and_cols(x)
    config = find_config(cols, x.element_size(), sum(view is not None for view in views), device_of(x))
    blocks = -(-cols // config["COLS"])
    programs = programs_for_blocks(config, x.numel(), rows, blocks)
    parts = max(programs // len(x), 1)
    return config, blocks, min(programs, len(x) * parts), parts


@raw()
def _causal_conv1d_forward(
    x: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None, input_gate: torch.Tensor | None,
    output_gate: torch.Tensor | None, initial_states: torch.Tensor | None, seq_idx: torch.Tensor | None,
    activation: str | None, *, y,
):  # fmt: skip
    if not x.numel():
        return
    rows, cols = rows_and_cols(x)
    views, strides = zip(*map(rows_or_none, (x, input_gate, output_gate)))
    config, blocks, programs, parts = _divided(causal_conv1d_forward_config, x, views)
    launch(
        causal_conv1d_forward, (programs * blocks, 1, 1), config,
        views[0], taps, bias, *views[1:], initial_states, seq_idx, y, rows, x.shape[1], parts, *strides, cols,
        len(taps), activation,
    )  # fmt: skip


@raw()
def _causal_conv1d_backward(
    x: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None, input_gate: torch.Tensor | None,
    output_gate: torch.Tensor | None, initial_states: torch.Tensor | None, seq_idx: torch.Tensor | None,
    activation: str | None, dy: torch.Tensor, dfinal: torch.Tensor | None, x_grad: bool, taps_grad: bool,
    bias_grad: bool, input_gate_grad: bool, output_gate_grad: bool, initial_states_grad: bool,
    *, dx, dtaps, dbias, dinput_gate, doutput_gate, dinitial_states,
):  # fmt: skip
    if not x.numel():
        for gradient in (dx, dtaps, dbias, dinput_gate, doutput_gate, dinitial_states):
            if gradient is not None:
                gradient.zero_()
        if dinitial_states is not None and dfinal is not None:
            dinitial_states.copy_(dfinal)
        return
    rows, cols = rows_and_cols(x)
    views, strides = zip(*map(rows_or_none, (x, input_gate, output_gate, dy)))
    config, blocks, programs, parts = _divided(causal_conv1d_backward_config, x, views)
    count, width, total = len(taps) + (bias is not None), blocks * config["COLS"], None
    if dtaps is not None or dbias is not None:
        total = dy.new_empty(count * width, dtype=torch.float32)
    sums = partial_sums(total, programs)
    launch(
        causal_conv1d_backward, (programs * blocks, 1, 1), config,
        views[0], taps, bias, *views[1:3], initial_states, seq_idx, views[3], dfinal, dx, dinput_gate, doutput_gate,
        dinitial_states,
        sums, rows, x.shape[1], parts, *strides, cols, len(taps), activation,
    )  # fmt: skip
    add_partials(sums, total)
    if dtaps is not None:
        dtaps.copy_(total.view(count, width)[: len(taps), :cols])
    if dbias is not None:
        dbias.copy_(total.view(count, width)[-1, :cols])


@differentiable("y final_states")
def _causal_conv1d(
    x: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None, input_gate: torch.Tensor | None,
    output_gate: torch.Tensor | None, initial_states: torch.Tensor | None, seq_idx: torch.Tensor | None,
    activation: str | None, return_final_states: bool,
):  # fmt: skip
    """Compute y and, where asked for, the final states.

    Taps are (taps, channels), states (batch, taps - 1, channels), so that lanes read whole vectors.
    """
    y = _causal_conv1d_forward(x, taps, bias, input_gate, output_gate, initial_states, seq_idx, activation)
    return y, _final_states(x, input_gate, initial_states, len(taps) - 1) if return_final_states else None


@_causal_conv1d.backward(depends={"final_states": ["x", "input_gate", "initial_states"]})
def _(
    x, taps, bias, input_gate, output_gate, initial_states, seq_idx, activation, dy: torch.Tensor | None,
    dfinal_states: torch.Tensor | None,
    *, x_grad, taps_grad, bias_grad, input_gate_grad, output_gate_grad, initial_states_grad,
):  # fmt: skip
    if dy is None:  # nothing but the final states is used: they do not depend on weight, bias and output gate
        dy, taps_grad, bias_grad, output_gate_grad = torch.zeros_like(x), False, False, False
    return _causal_conv1d_backward(
        x, taps, bias, input_gate, output_gate, initial_states, seq_idx, activation, dy, contiguous(dfinal_states),
        x_grad, taps_grad, bias_grad, input_gate_grad, output_gate_grad, initial_states_grad,
    )  # fmt: skip


@causal_conv1d.register("triton", bound=True)
def _(call):
    states = call.initial_states
    y, final_states = _causal_conv1d.apply(
        call.x, call.weight.t().contiguous(), contiguous(call.bias), call.input_gate, call.output_gate,
        states if states is None else states.transpose(1, 2).contiguous(), contiguous(call.seq_idx), call.activation,
        call.return_final_states,
    )  # fmt: skip
    return (y, final_states.transpose(1, 2)) if call.return_final_states else y
