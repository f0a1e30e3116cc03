"""Plant mistakes in kernels and check that the parity tests fail.

    python -m liger_lab.tools.mutants [FILE ...]      # rms_norm, glu, ...; all by default

Each mutant replaces one piece of a kernel in a copy of the package and runs the kernel's test file in the interpreter.
The status is 1 if a mutant survives, or if the source lacks the piece.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

MUTANTS = {
    "rms_norm": [
        (
            "mean over the block, not the row",
            "tl.sum(square(x, dtype, CASTING), 1) / cols",
            "tl.sum(square(x, dtype, CASTING), 1) / COLS",
        ),
        ("eps left out", "1.0 / tl.sqrt(mean + eps)", "1.0 / tl.sqrt(mean)"),
        (
            "offset left out",
            '+ offset, dtype) if CASTING == "none" else w + offset',
            '+ offset, dtype) if CASTING == "none" else w',
        ),
        (
            "backward without the mean term",
            "rstd * (m - normed * mean)",
            "rstd * m",
        ),
        ("weight gradient without rstd", "return dy * (normed if", "return dy * (s if"),
        ("gradient of the sum dropped", "if DS_OUT is not None:\n        ds +=", "if DS_OUT is None:\n        ds +="),
        (
            "rounding order of the llama mode",
            'if CASTING != "gemma":\n            y = rounded(y, dtype)',
            'if CASTING == "none":\n            y = rounded(y, dtype)',
        ),
        ("the sum of input and residual not rounded", "x = rounded(x, S.dtype.element_ty)", "x = x * 1.0"),
        ("squares not rounded", 'rounded(x * x, dtype) if CASTING == "none" else x * x', "x * x"),
        (
            "weight gradient of values that are not rounded",
            '(normed if CASTING == "gemma" else rounded(normed, dtype))',
            "normed",
        ),
        ("last row of a tile masked", "(row < rows)[:, None] & in_row", "(row < rows - 1)[:, None] & in_row"),
    ],
    "glu": [
        ("slope of silu without its second term", "s * (1.0 + x * (1.0 - s))", "s"),
        ("gate and up swapped in backward", "dy * u * slope, mask", "dy * f * slope, mask"),
        ("the other half's stride", "u = _load(U, row * u_stride", "u = _load(U, row * g_stride"),
        ("activation not rounded", "    return rounded(y, dtype)", "    return y"),
        ("last tile unmasked", "mask = (row < rows) & (col < cols)", "mask = (row < rows) & (col < cols - 1)"),
        ("tanh form for both", "0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))", "0.5 * x * (1.0 + tanh(0.8 * x))"),
    ],
    "expert_glu": [
        ("the weighted gradient in the weights' own", "dw += d * y", "dw += dy * y"),
        ("the weight left out", "rounded(w * d, D.dtype.element_ty)", "d"),
        ("the other half's stride", "tl.store(U + row * u_stride", "tl.store(U + row * cols"),
        (
            "the gradient in the product's place",
            "tl.store(D + row * cols + col, y",
            "tl.store(D + row * cols + col, dy",
        ),
        ("one block of a row", "range(0, cols, COLS)", "range(0, COLS, COLS)"),
    ],
    "gathered_sum": [
        ("every fifth twice", "range(0, K, 4)", "range(0, K, 3)"),
        ("the weight of another row", "tl.load(W + row, valid", "tl.load(W + at, valid"),
        ("rows that are not there", "k + 3 < K, col", "k + 2 < K, col"),
    ],
    "activate": [
        ("slope of the squared ReLU", "return y * y, 2.0 * y", "return y * y, y"),
        ("a cube rounded once", "rounded(rounded(x * x, dtype) * x, dtype)", "rounded(x * x * x, dtype)"),
        (
            "sigmoid not rounded",
            "x * rounded(tl.sigmoid(rounded(1.702 * x, dtype)), dtype)",
            "x * tl.sigmoid(1.702 * x)",
        ),
        ("not a number becomes zero", "y = tl.where(x < 0.0, 0.0, x)", "y = tl.where(x > 0.0, x, 0.0)"),
        ("quick GELU's slope", "s * (1.0 + 1.702 * x * (1.0 - s))", "s * (1.0 + x * (1.0 - s))"),
    ],
    "glu_linear": [
        (
            "product left out in place",
            "launch_backward(gate, up, dy, gate, up, dy,",
            "launch_backward(gate, up, dy, gate, up, None,",
        ),
        (
            "product left out",
            "launch_backward(gate, up, dy, dgate, dup, dy,",
            "launch_backward(gate, up, dy, dgate, dup, None,",
        ),
        ("keeps the product after all", "if not keeps_y or not gate", "if keeps_y or not gate"),
        ("weight in its own dtype under autocast", "(weight,) = cast_for_linear(dtype, weight)", "pass"),
    ],
    "layer_norm": [
        ("gradient without the mean's share", "rstd * (m - normed * along - shift)", "rstd * (m - normed * along)"),
        (
            "values beyond the row have a deviation",
            "x = tl.where(in_row(col, cols, COLS), x - mean[:, None], 0.0)",
            "x = x - mean[:, None]",
        ),
    ],
    "gated_rms_norm": [
        ("a span's sum with the gate", "(dy if SHARED else dweighted)", "dweighted"),
        ("gate of the first span", "(program % spans).to(tl.int64) * span", "(program % spans).to(tl.int64) * 0"),
        (
            "scale's gradient without offset",
            ".to(tl.float32) + offset\n        tl.store(DGATE",
            ".to(tl.float32)\n        tl.store(DGATE",
        ),
        ("gradient of a first gate not multiplied by x", "du * x * slope", "du * slope"),
        (
            "weight gradient of values that are not rounded",
            '(normed if CASTING == "gemma" else rounded(normed, dtype))',
            "normed",
        ),
        ("a gate's gradient of values that are not rounded", "dgate = dy * _weighted(", "dgate = dy * before_weight("),
        (
            "not rounded before a modulation",
            'if CASTING != "gemma" or ACTIVATION == "modulation"',
            'if CASTING != "gemma"',
        ),
    ],
    "l2_norm": [("mean of the squares", "width if self.mean else 1", "width")],
    "group_norm": [
        ("means of blocks not merged", "difference * (difference * (start * share))", "0.0"),
        ("means of channels not merged", "within + difference * difference", "within"),
        (
            "group's sum without the weight",
            "along += tl.load(SUM_PRODUCT + first + col, valid, other=0.0) * w",
            "along += tl.load(SUM_PRODUCT + first + col, valid, other=0.0)",
        ),
    ],
    "dyt": [
        ("slope of tanh", "4.0 * e * q * q", "4.0 * e * q"),
        ("cancels near zero", "tl.where(square < 0.09, series,", "tl.where(square < 0.0, series,"),
    ],
    "attention_residual": [
        ("sum not moved to the new maximum", "total = total * kept + power", "total = total + power"),
        ("slope of the norm left out", "slope * (u - v * (score * rstd / cols)[:, None])", "slope * u"),
        (
            "a part of a row for the whole",
            "    if cols > COLS:\n        products =",
            "    if cols < 0:\n        products =",
        ),
        ("sum of the scores' gradients left", "p * (along - delta) * rstd", "p * along * rstd"),
    ],
    "int2_matmul": [
        ("weights from 0 to 3", ".to(tl.int8) - 1", ".to(tl.int8)"),
        ("quarters in reverse", "(2 * tl.arange(0, 4))", "(6 - 2 * tl.arange(0, 4))"),
        ("weights beyond the last column", " & (which * quarter + first + column < depth)", ""),
        ("columns of the next quarter", "(first + column < quarter) & ", ""),
        ("quarters of whole fours", "tl.constexpr = (depth + 3) // 4", "tl.constexpr = depth // 4"),
        ("the row before the last twice", "tl.minimum(row, rows - 1)", "tl.minimum(row, tl.maximum(rows - 2, 0))"),
        ("packed rows without their stride", "packed += DEPTH * k_stride", "packed += DEPTH * cols"),
        ("rows without their stride", "[:, None] * x_stride", "[:, None] * depth"),
        ("the argument of pack_int2 changed", "= weight + 1", "= weight.add_(1)"),
    ],
    "lora_linear": [
        ("the last bits of a factor left out", "dot(x, lo, lo_total", "dot(x, 0.0 * lo, lo_total"),
        ("the last bits of u left out", "tl.store(at + 2 * rank, lo, mask)", "tl.store(at + 2 * rank, 0.0 * lo, mask)"),
        ("u without its scale", "+ total, 0) * scale", "+ total, 0)"),
        ("parts that share a column", "[:, None, None] * DEPTH, tl", "[:, None, None] * (DEPTH - 1), tl"),
        ("u of many rows without its scale", "hi, mid, lo = split(total * scale", "hi, mid, lo = split(total"),
        ("one part thrice", "x_stride + part * cols + col", "x_stride + 0 * part + col"),
        ("the last columns of x left out", "mask & (i < inner)", "mask & (i < inner - 1)"),
        ("the last columns of y left out", "& (col < outer), (row", "& (col < outer - 1), (row"),
        ("dropout's factor left out", "scaling / (1 - dropout)", "scaling"),
        ("the result of 4 bits in autocast's dtype", "return y if state is None else y.to(x.dtype)", "return y"),
        (
            "the whole weight kept",
            "y = _frozen_linear.apply(x, stored, state, first_bias)",
            "y = torch.nn.functional.linear(x, dequantize_4bit(*weight).to(x.dtype), first_bias)",
        ),
        ("the gradient of a bias in fp32 rounded", "dy.sum(0, dtype=sum_dtype)", "dy.sum(0)"),
        ("the middle bits of u left out", "torch.cat([hi, hi, mid], 1)", "torch.cat([hi, hi, 0 * mid], 1)"),
        ("the dropped values' gradients kept", "y if mask is None else y.mul_(mask)", "y"),
        ("dx of one layer of two", "return y.addmm_(rows, matrix)", "return y"),
        ("terms in another order", "for u in projected], 2).flatten(1)", "for u in projected], 1).flatten(1)"),
        ("gradients without the last bits", "in tl.static_range(PARTS):", "in tl.static_range(1, PARTS):"),
        ("gradients without the last row", "(row < rows)[None, :] & (col", "(row < rows - 1)[None, :] & (col"),
        ("the gradient of A not transposed", "if A_FIRST & (which == 0):", "if A_FIRST & (which < 0):"),
        (
            "the gradient of one B for another",
            "tl.where(which == 2, third, first)",
            "tl.where(which > 2, third, first)",
        ),
    ],
    "dequantize_4bit": [
        ("the first value in the low bits", "high * scale, low * scale", "low * scale, high * scale"),
        ("the scale of the tile's first block", "(first + row * COLS) // half", "(first + 0 * row) // half"),
        ("the offset left out", " + tl.load(OFFSET)", ""),
        ("the nested scale of the first blocks", "block // nested_block_size", "block * 0"),
        ("the last value dropped", "value < left)", "value < left - 1)"),
        ("the last byte dropped", "2 * byte < left,", "2 * byte < left - 1,"),
        ("a last tile written whole", "if left >= 2 * BYTES", "if left >= BYTES"),
        ("sums and products fused", "fp_fusion=False", "fp_fusion=True"),
        ("strided bytes read as if without gaps", "map(contiguous, (packed, *scales[:5]))", "(packed, *scales[:5])"),
        ("the layout for a CPU taken", 'getattr(state, "packing_format_for_cpu", False)', "False"),
    ],
    "embedding": [
        ("the sum of the run before", "tl.where(token == previous, total, 0.0)", "total"),
        ("a run in an earlier chunk stored as whole", "if ends & (token != before):", "if ends:"),
        ("the part that ends a chunk dropped", "& (ends | (start + i == end - 1))", "& ends"),
        (
            "eight parts alone",
            "more = tl.sum(valid.to(tl.int32), 0) == ROWS",
            "more = tl.sum(valid.to(tl.int32), 0) > ROWS",
        ),
        ("padding counted from the end", "padding_idx % weight.shape[0]", "padding_idx"),
        ("padding that crosses chunks", "& begins & (token != padding)", "& begins"),
        ("every second row", "row * dy_stride + col", "row * cols + col"),
    ],
    "neighborhood_attention": [
        ("the position after the last", "other < length)\n        score =", "other <= length)\n        score ="),
        ("sum not moved to the new maximum", "total = total * kept + power", "total = total + power"),
        ("gradient of a key by its own result", "(v - _load(Y + y_at, other,", "(v - _load(Y + y_at, row,"),
        ("strides of the gradients", "_store(DQ + y_at, row, valid, y_stride", "_store(DQ + y_at, row, valid, stride"),
    ],
    "multi_token_attention": [
        ("the result's future kept", "else mixed.tril_()", "else mixed"),
        (
            "sparsemax for softmax",
            "softmax_rows(scores, sparse, True)",
            "softmax_rows(scores, True, True)",
        ),
    ],
    "causal_softmax": [
        ("rows that do not begin again with each matrix", "tl.arange(0, ROWS)) % queries)[:", "tl.arange(0, ROWS)))[:"),
        ("the query's own key left out", "tl.where(at <= _last(row", "tl.where(at < _last(row"),
        ("the rest of a vector read as scores", "return _replace_future(x, row, at, queries, other)", "return x"),
        ("a vector too few", "queries) // 8 + 1) * 8", "queries) // 8) * 8"),
        ("infinite gradients of the future", "return y, _replace_future(dy, row, at, queries, 0.0)", "return y, dy"),
        (
            "the future of a row of NaN",
            "_replace_future(power / tl.sum(power, 1)[:, None], row, col, queries, 0.0)",
            "power / tl.sum(power, 1)[:, None]",
        ),
    ],
    "causal_conv1d": [
        ("a sequence sees the one before", "_where_within(window[k - 1], row - k, opened, row)", "window[k - 1]"),
        ("a gradient ends with its part", "tl.where(first < end, end + BEFORE, first)", "end"),
        ("a token counted twice", "part_ds, sums = _where_within(ds, row, first, end), ()", "part_ds, sums = ds, ()"),
        ("states of another part", "mask = _within(valid, first, begin, begin + 1) &", "mask = valid &"),
        ("a final state without a gradient", "if DFINAL is not None:", "if DFINAL is not None and SIZE < 0:"),
    ],
    "poly_norm": [
        ("slope of the third power", "3.0 * square * (dy", "2.0 * square * (dy"),
        ("weights in another order", "tl.where(at == 0, tl.sum(dw3, 0)", "tl.where(at == 0, tl.sum(dw1, 0)"),
    ],
    "hyper_connections": [
        ("the gradient of another pair of streams", "coefficients[j * outs + o] * dys[o]", "coefficients[j] * dys[o]"),
        ("streams of another group", "tl.program_id(1) * SIZE", "tl.program_id(1) * GROUP"),
        ("a block's sums alone", "new_dh + (dh[j * outs + o] + tl.sum(x", "new_dh + (tl.sum(x"),
    ],
    "mhc_coefficients": [
        ("the divisors of the next step", "place -= rows.to", "place += 0 * rows.to"),
        ("a part of the columns", "place = SUMS + (tl.program_id(1)", "place = SUMS + (0 * tl.program_id(1)"),
        ("the norm's part of dx", "dx = -tl.load(G", "dx = -0.0 * tl.load(G"),
        ("softmax's term of the gradient", "dz = p * (dm - tl.sum(p * dm, 2)[:, :, None])", "dz = p * dm"),
        (
            "alphas that share a gradient",
            "tl.store(partial + COUNT + 1, tl.sum(da_post",
            "tl.store(partial + COUNT + 1, tl.sum(da_pre",
        ),
    ],
    "rope": [
        (
            "backward turns on",
            "rounded(x2 * cos2, dtype) - rounded(x1 * sin1, dtype)",
            "rounded(x2 * cos2, dtype) + rounded(x1 * sin1, dtype)",
        ),
        ("tables not laid out as the result", "PAIRS_IN if BACKWARD else PAIRS_OUT", "PAIRS_IN"),
    ],
    "qk_norm_rope": [
        ("backward turns on", "dout[1] * cos2 - dout[0] * sin1", "dout[1] * cos2 + dout[0] * sin1"),
        ("mean of all heads over one", "tl.sum(total, 0) / (heads * head_dim)", "tl.sum(total, 0) / head_dim"),
        (
            "norm not rounded before it is turned",
            "rounded(before_weight(normed, W, w[part], offset, dtype, CASTING), dtype)",
            "before_weight(normed, W, w[part], offset, dtype, CASTING)",
        ),
    ],
    "cross_entropy": [
        ("a block behind the last", "max(-(-(cols // vector * vector) // block), 1)", "-(-cols // block)"),
        (
            "gradient without the z-loss",
            "(coef_target + coef_all + 2.0 * unit * coef_square * lse) * coef_loss",
            "(coef_target + coef_all) * coef_loss",
        ),
        (
            "labels smoothed by one class less",
            "coef_each += label_smoothing / cols",
            "coef_each += label_smoothing / (cols - 1)",
        ),
        ("smoothing by an earlier maximum", "(old_max * 0.5 - new_max * 0.5)", "0.0"),
        ("a maximum of +inf", "tl.max(z, 1)), -LOWEST_FINITE)", "tl.max(z, 1)), float('inf'))"),
    ],
    "selective_log_softmax": [
        (
            "moment not moved to the new maximum",
            "(moment + moved * sum_exp) * tl.exp2(moved)",
            "moment * tl.exp2(moved)",
        ),
        ("entropy's gradient without the entropy", "log_sum_exp) * LN_2 + entropy, 0.0", "log_sum_exp) * LN_2, 0.0"),
        ("softcap's slope left out", "dx *= 1.0 - ratio * ratio", "dx *= 1.0"),
        ("a maximum of +inf", "tl.max(z, 1)), -LOWEST_FINITE)", "tl.max(z, 1)), float('inf'))"),
    ],
    "divergence": [
        ("jsd's other argument", "tl.where(q_larger, larger_term, smaller_term)", "larger_term"),
        ("slope of the reverse KL without its second term", "return value, value + q, q", "return value, value, q"),
        ("ignored rows have a gradient", "factor = tl.where(counts, factor, 0.0)", "factor = factor"),
        ("1 - beta of a rounded beta", "tl.where(q_larger, beta, rest_beta) * share", "(1.0 - weight) * share"),
    ],
    "logits_divergence": [
        ("softmax's term of the gradient", "(slope - q * slope_sum)", "slope"),
        (
            "labels see the temperature",
            "s_max, hard_sum_exp, VECTOR, LOG2_E",
            "s_max, hard_sum_exp, VECTOR, power_unit",
        ),
        ("the shorter vocabulary is not padded", "t, tl.where(at < cols, 0.0,", "t, tl.where(at < 0, 0.0,"),
        ("blocks behind a shorter row", "    if row_cols < cols:", "    if row_cols < 0:"),
        ("alignment of another dtype", "T_VECTOR: tl.constexpr = 128 // T.", "T_VECTOR: tl.constexpr = 128 // S."),
    ],
    "experts": [
        ("a first factor without the scale", "return u if scale == 1 else u.mul_(scale)", "return u"),
        (
            "gradient of A without routing weights",
            "multiply_groups(_weighted(du, row_weights), y",
            "multiply_groups(du, y",
        ),
        (
            "gradient of x without an adapter",
            "hidden, gate_up_proj, offs, None, du, gate_up_a",
            "hidden, gate_up_proj, offs, None, None, None",
        ),
    ],
    "cross_entropy_tvd": [
        ("slope without the distribution's share", "(_slope(q, p) - q * tl.load(STATE + 4))", "_slope(q, p)"),
        ("teacher's powers by the student's peak", "(t - tl.load(STATE + 2))", "(t - tl.load(STATE))"),
    ],
    "soft_targets": [
        ("rows that do not add up to 1", "(mass * tl.exp2(log_q * LOG2_E) - p)", "(tl.exp2(log_q * LOG2_E) - p)"),
        ("probabilities as logarithms", "log_p = tl.log2(tl.maximum(p, eps))", "log_p = tl.log2(p)"),
    ],
    "sequences": [
        ("rows recomputed too early", "rows_over -= stop - start", "rows_over -= 1"),
        ("gradient of no group", "row.copy_(grad)", "row.copy_(0 * grad)"),
    ],
}
PLACES = {  # source and tests of mutants where they are not those of an op of this name
    "activate": ("kernels/_math.py", "kernels/test_activate.py"),
    "l2_norm": ("kernels/norms/gated_rms_norm/kernels.py", "kernels/test_l2_norm.py"),
    "causal_softmax": ("kernels/attention/softmax.py", "kernels/test_multi_token_attention.py"),
    "logits_divergence": ("kernels/vocabulary/divergence/logits.py", "losses/test_distillation.py"),
    "soft_targets": ("kernels/vocabulary/divergence/probabilities.py", "losses/test_offline_distillation.py"),
    "sequences": ("losses/sequences.py", "losses/test_sequences.py"),
}


def sources(name, package: Path) -> list[Path]:
    """Return the files that may hold a kernel's mutants, the likelier first."""
    if name in PLACES:
        files = [package / PLACES[name][0]]
    else:
        files = [*package.glob(f"kernels/*/{name}.py"), *package.glob(f"kernels/*/{name}/*.py")]
    return [*files, *package.glob("kernels/_*.py")]


def survivor(name: str, description: str, old: str, new: str) -> str | None:
    """Plant a mistake in a copy of the package; return what survived."""
    test = PLACES.get(name, ("", f"kernels/test_{name}.py"))[1]
    with tempfile.TemporaryDirectory() as folder:
        for part in ("liger_hw", "lab/liger_lab", "tests"):
            shutil.copytree(ROOT / part, Path(folder) / part)
        shutil.copy(ROOT / "pyproject.toml", folder)
        for file in sources(name, Path(folder) / "liger_hw"):
            source = file.read_text()
            if old in source:
                file.write_text(source.replace(old, new))
                break
        else:
            return f"{name}: {description}: its piece is not in the source"
        environment = os.environ | {"TRITON_INTERPRET": "1", "LIGER_HW_BACKEND": "nvidia", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-x", f"tests/{test}"]
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    killed = run.returncode == 1 or run.returncode < 0  # a test failed, or a write out of bounds ended it
    print(f"{'killed  ' if killed else 'SURVIVED'} {name}: {description}", flush=True)
    return None if killed else f"{name}: {description}: pytest ended with {run.returncode}\n{run.stdout[-1500:]}"


if __name__ == "__main__":
    planted = [(name, *mutant) for name in sys.argv[1:] or MUTANTS for mutant in MUTANTS[name]]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        alive = [line for line in pool.map(survivor, *zip(*planted)) if line]
    sys.exit("\n".join(alive) if alive else 0)
