r"""Compute losses of a vocabulary sharded over ranks from small statistics of each shard.

    a rank's columns:   peak_r = max z_j,  total_r = sum exp(z_j - peak_r),  and what a row's options need
    of all ranks:       peak = max peak_r,  total = sum total_r exp(peak_r - peak),  log p_y = z_y - peak - log total
    dz_j = P p_j - E w_j - T [j = y]        P, E, T from the statistics of all ranks, p_j = exp(z_j - peak) / total

One all-gather a chunk exchanges 4 to 9 numbers a row, after which every rank computes the same loss from the same bits.
The gradient needs no communication, and no rank holds the logits of another.

Kernels: those of `selective_log_softmax` on a rank's columns, with the partition of all ranks in the backward, and the
forward of `cross_entropy` for predicted tokens. Label smoothing runs in torch. Peaks have the kernels' units.
"""

import math
from typing import NamedTuple

import torch

from liger_hw._torch import all_gathered
from liger_hw.dispatch import widen
from liger_hw.kernels.vocabulary.cross_entropy import kernels as ce_kernels
from liger_hw.kernels.vocabulary.cross_entropy.formula import Formula, Targets
from liger_hw.kernels.vocabulary.selective_log_softmax import kernels
from liger_hw.kernels.vocabulary.selective_log_softmax.formula import Scaling

LOG2_E, LN_2 = 1 / math.log(2), math.log(2)
LOWEST_PEAK = torch.finfo(torch.float32).min  # peak of a shard whose logits are all -inf, as in the kernels
NOT_COUNTED = -1  # local index of a row that does not count
SLICE_BYTES_BY_DEVICE = {"cpu": 2**18}  # of fp32 logits that torch works on at once: they fit a CPU's cache
LARGE_SLICE_BYTES = 2**25  # elsewhere, ten times beside a chunk


class Statistics(NamedTuple):
    """Statistics of rows over all ranks, (M,) each.

    Attributes:
        peak, total: sum_j exp(z_j) = total exp(peak unit), with the unit of `Columns`.
        lse: log sum_j exp(z_j).
        distance: -log p_y; NaN for a target outside the vocabulary.
        entropy: in nats. smoothed: sum_j w_j (lse - z_j). predicted: column of the largest logit. None: not asked for.
    """

    peak: torch.Tensor
    total: torch.Tensor
    lse: torch.Tensor
    distance: torch.Tensor
    entropy: torch.Tensor | None
    smoothed: torch.Tensor | None
    predicted: torch.Tensor | None


class Columns:
    """A rank's columns of the logits of a chunk.

    Args:
        plan: a `Plan` with a shard; without a group the columns are the whole vocabulary.
        logits: (M, V_r). target: (M,) in the whole vocabulary. scaling: a `Scaling`.
        smooths: label smoothing is on. class_weight: (V,), or None for 1; only smoothing reads it here.

    Attributes:
        unit: of a score: ln 2 with a softcap, else 1 / temperature.
    """

    def __init__(self, plan, logits, target, scaling, smooths=False, class_weight=None):
        self.plan, self.logits, self.scaling, self.smooths = plan, logits, scaling, smooths
        self.with_kernels = plan.with_kernels and not smooths
        cols, local = logits.shape[1], target.long() - plan.first
        self.counts = target != scaling.ignore_index
        self.outside = self.counts & ((target < 0) | (target >= plan.vocabulary))
        self.here = self.counts & (local >= 0) & (local < cols)
        self.index = torch.where(self.here, local, torch.where(self.counts, 0, NOT_COUNTED))
        self.scaling = Scaling(NOT_COUNTED, *scaling[1:])  # Dynamo of torch 2.11 loses the items of _replace
        self.unit = 1 / scaling.temperature if scaling.softcap is None else LN_2
        columns = slice(plan.first, plan.first + cols)
        self.class_weight = None if class_weight is None else widen(class_weight[columns])

    def statistics(self, entropy_needed=False, predict=False):
        """Return the `Statistics` of the rows, the same bits on every rank."""
        local = self._by_kernels if self.with_kernels else self._by_torch
        peak, total, distance, moment, smoothed, col = local(entropy_needed, predict)
        numbers = {"peaks": peak, "totals": total, "distances": torch.where(self.here, distance, 0), "here": self.here}
        if entropy_needed:
            numbers["moments"] = moment
        if self.smooths:
            weight = self.logits.shape[1] if self.class_weight is None else self.class_weight.sum()
            numbers |= {"smoothed": smoothed, "weights": torch.zeros_like(peak) + weight}
        if predict:
            best = widen(self.logits.gather(1, col.clamp(min=0)[:, None])[:, 0]) * self.scaling.logit_scale
            numbers |= {"best": best, "cols": col + self.plan.first}
        sent = torch.stack([number.to(peak.dtype) for number in numbers.values()], -1)
        gathered = all_gathered(sent, self.plan.group) if self.plan.group else sent[None]
        return self._combined(**dict(zip(numbers, gathered.unbind(-1))))

    def _combined(
        self, peaks, totals, distances, here, moments=None, smoothed=None, weights=None, best=None, cols=None
    ):
        """Combine the numbers of all ranks, (ranks, M) each, None where nobody asks for them."""
        peak = peaks.amax(0)
        below = self._difference(peaks, peak)
        scale = below.exp()
        total = (totals * scale).sum(0)
        log_total = total.log()
        # a rank whose logits are all -inf knows no distance from them: its targets have probability 0
        distances = torch.where(peaks == -torch.inf, torch.inf, distances - below)
        distance = torch.where(here > 0, distances, 0).sum(0) + log_total
        distance = distance.masked_fill(self.outside | total.isinf(), float("nan"))  # +inf: a logit of +inf
        entropy = predicted = None
        if moments is not None:
            moments = torch.where(totals * scale > 0, (moments + below * totals) * scale, 0)
            entropy = log_total - moments.sum(0) / total
        if smoothed is not None:
            smoothed = (smoothed + weights * (log_total - below)).sum(0)
        if best is not None:
            cols = torch.where(best == best.amax(0), cols, self.plan.vocabulary - 1).amin(0).long()
            predicted = torch.where(self.counts, cols, -1)
        return Statistics(peak, total, self.lse(peak, total), distance, entropy, smoothed, predicted)

    def lse(self, peak, total):
        """Return log sum_j exp(z_j)."""
        return peak * self.unit + total.log()

    def _by_kernels(self, entropy_needed, predict):
        nll, lse = (self.logits.new_empty(len(self.logits), dtype=torch.float32) for _ in range(2))
        partition, entropy, col = nll.new_empty(len(nll), 2), torch.empty_like(nll) if entropy_needed else None, None
        if predict:
            col = torch.empty_like(self.index)
            formula = Formula(NOT_COUNTED, 0.0, 0.0, self.scaling.softcap, self.scaling.logit_scale, False)
            targets = Targets(self.index, None, None, None, None)
            ce_kernels.forward_rows(self.logits, targets, formula, nll, None, partition, col)
        else:
            kernels.forward_rows(self.logits, self.index, self.scaling, nll, entropy, lse, partition)
            nll = -nll
        peak, total = partition.unbind(-1)
        masked = (peak == -torch.inf) | (total == 0)  # all logits of the row on this rank are -inf
        peak, total = peak.masked_fill(masked, -torch.inf), total.masked_fill(masked, 0)
        moment = total * (total.log() - entropy) if entropy_needed else None
        return peak, total, nll - total.log(), moment, None, col

    def _by_torch(self, entropy_needed, predict):
        slices = []
        for part in self._slices():
            z, _ = self._score(part)
            peak = z.amax(-1).clamp(LOWEST_PEAK, -LOWEST_PEAK)
            below = self._difference(z, peak[:, None])
            power = below.exp()
            distance = -below.gather(1, self.index[part].clamp(min=0)[:, None])[:, 0]
            moment = torch.where(power > 0, power * below, 0).sum(-1) if entropy_needed else None
            weighted = below if self.class_weight is None else below * self.class_weight
            smoothed = -weighted.sum(-1) if self.smooths else None
            col = (widen(self.logits[part]) * self.scaling.logit_scale).argmax(-1) if predict else None
            slices.append((peak, power.sum(-1), distance, moment, smoothed, col))
        return [None if numbers[0] is None else torch.cat(numbers) for numbers in zip(*slices)]

    def write_gradient(self, partition, entropy, dlog_probs, dentropy, dlse, coef_each=None):
        """Write the gradient of the logits over them.

        Args:
            partition: (M, 2) of all ranks. entropy: (M,), or None without `dentropy`.
            dlog_probs: (M,) gradient of log p_y. dentropy, dlse: (M,) of entropy and log-sum-exp, or None.
            coef_each: (M,), subtracted from each logit's gradient after `class_weight` times it; None for 0.
        """
        coef_token = torch.where(self.here, dlog_probs, 0)
        # the softmax's share of a token that another rank holds; kernels subtract it for those here
        coef_power = torch.where(self.here, 0, -dlog_probs) + (0 if dlse is None else dlse)
        coef_power = coef_power.masked_fill(self.outside | partition[:, 1].isinf(), float("nan"))
        if self.with_kernels:
            row_values = partition, coef_token, dentropy, coef_power
            kernels.backward_rows(self.logits, self.index, self.scaling, entropy, *row_values)
            return
        for part in self._slices():
            z, ratio = self._score(part)
            peak, total = partition[part].unbind(-1)
            log_p = self._difference(z, peak[:, None]) - total.log()[:, None]
            p = log_p.exp()
            dz = (coef_power - coef_token)[part, None] * p
            if dentropy is not None:
                dz -= dentropy[part, None] * torch.where(p == 0, 0, p * (log_p + entropy[part, None]))
            if coef_each is not None:
                dz -= coef_each[part, None] * (1 if self.class_weight is None else self.class_weight)
            dz.scatter_add_(1, self.index[part].clamp(min=0)[:, None], coef_token[part, None])
            dz *= self.scaling.logit_scale / self.scaling.temperature
            if ratio is not None:
                dz *= 1 - ratio * ratio
            self.logits[part] = dz.masked_fill_(~self.counts[part, None], 0)

    def _slices(self):
        size = SLICE_BYTES_BY_DEVICE.get(self.logits.device.type, LARGE_SLICE_BYTES)
        rows = max(size // (4 * self.logits.shape[1]), 1)
        return [slice(start, start + rows) for start in range(0, max(len(self.logits), 1), rows)]

    def _score(self, part):
        """Return the scores of rows, and the softcap's factor, as the kernels."""
        z, softcap = widen(self.logits[part]) * self.scaling.logit_scale, self.scaling.softcap
        z = z.masked_fill(~self.counts[part, None], 0)
        if softcap is None:
            return z, None
        ratio = (z / softcap).tanh()
        return ratio * (softcap * LOG2_E / self.scaling.temperature), ratio

    def _difference(self, z, peak):
        """Return (z - peak) unit; halves, because a large difference may overflow."""
        return (z * 0.5 - peak * 0.5) * (2 * self.unit)


class CrossEntropyRows:
    """`forward_rows` and `backward_rows` of `cross_entropy` for a rank's columns."""

    def __init__(self, plan):
        self.plan = plan

    def _columns(self, logits, targets, formula):
        scaling = Scaling(formula.ignore_index, formula.softcap, formula.logit_scale, 1.0)
        smooths = formula.label_smoothing > 0
        return Columns(self.plan, logits, targets.target, scaling, smooths, targets.class_weight)

    def _factors(self, lse, distance, targets, formula):
        """Return the factors of -log p_y, sum_j w_j (lse - z_j) and lse^2; and P."""
        target, class_weight, weight_sum, denominator, count = targets
        coef_target = torch.full_like(lse, 1 - formula.label_smoothing)
        if class_weight is not None:
            coef_target = coef_target * widen(class_weight)[target.long().clamp(0, self.plan.vocabulary - 1)]
        coef_each = torch.full_like(lse, formula.label_smoothing / self.plan.vocabulary)
        coef_square = torch.full_like(lse, formula.lse_square_scale)
        if denominator is not None:
            coef_target, coef_each = coef_target / denominator, coef_each / denominator
            coef_square = coef_square / (denominator if count is None else count)
        if formula.token_scaling:
            p_y = (-distance).exp()
            coef_target, coef_each, coef_square = coef_target * p_y, coef_each * p_y, coef_square * p_y
        coef_weights = coef_each * (self.plan.vocabulary if weight_sum is None else weight_sum)
        return coef_target, coef_each, coef_square, coef_target + coef_weights + 2 * coef_square * lse

    def _write_gradient(self, columns, partition, factors, dloss=1.0):
        coef_target, coef_each, _, coef_power = (factor * dloss for factor in factors)
        coef_each = coef_each if columns.smooths else None
        columns.write_gradient(partition, None, -coef_target, None, coef_power - coef_target, coef_each)

    def forward_rows(self, logits, targets, formula, loss, z_loss, partition, predicted=None, gradient=False):
        columns = self._columns(logits, targets, formula)
        statistics = columns.statistics(predict=predicted is not None)
        factors = self._factors(statistics.lse, statistics.distance, targets, formula)
        coef_target, coef_each, coef_square, _ = factors
        z_rows = coef_square * statistics.lse * statistics.lse
        z_rows = torch.where(coef_square == 0, 0, z_rows)  # without a z-loss, where the log-sum-exp may be infinite
        rows = coef_target * statistics.distance + z_rows
        if columns.smooths:
            rows = rows + coef_each * statistics.smoothed
        loss.copy_(torch.where(columns.counts, rows, 0))
        z_loss.copy_(torch.where(columns.counts, z_rows, 0))
        partition.copy_(torch.stack((statistics.peak, statistics.total), -1))
        if predicted is not None:
            predicted.copy_(statistics.predicted)
        if gradient:
            self._write_gradient(columns, partition, factors)

    def backward_rows(self, logits, targets, formula, partition, dloss):
        columns = self._columns(logits, targets, formula)
        peak, total = partition.unbind(-1)
        distance = columns.statistics().distance if formula.token_scaling else None
        factors = self._factors(columns.lse(peak, total), distance, targets, formula)
        self._write_gradient(columns, partition, factors, dloss)


class SelectedRows:
    """`forward_rows` and `backward_rows` of `selective_log_softmax` for a rank's columns."""

    def __init__(self, plan):
        self.plan = plan

    def forward_rows(self, logits, tokens, scaling, log_probs, entropy, lse, partition):
        columns = Columns(self.plan, logits, tokens, scaling)
        statistics = columns.statistics(entropy_needed=entropy is not None)
        log_probs.copy_(torch.where(columns.counts, -statistics.distance, 0))
        lse.copy_(torch.where(columns.counts, statistics.lse, 0))
        if entropy is not None:
            entropy.copy_(torch.where(columns.counts, statistics.entropy, 0))
        partition.copy_(torch.stack((statistics.peak, statistics.total), -1))

    def backward_rows(self, logits, tokens, scaling, entropy, partition, dlog_probs, dentropy=None, dlse=None):
        columns = Columns(self.plan, logits, tokens, scaling)
        columns.write_gradient(partition, entropy, dlog_probs, dentropy, dlse)
