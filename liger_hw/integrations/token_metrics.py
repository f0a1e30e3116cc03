"""Token accuracy and entropy in the logs of transformers' Trainer, without logits in memory.

class MyTrainer(TokenMetrics, Trainer):  # or Seq2SeqTrainer
    pass
"""

import torch

from liger_hw.checks import check
from liger_hw.patching.output_classes import without_by_products

METRICS = ("token_accuracy", "entropy")
NOT_PATCHED = (
    "a causal model whose loss is patched, given labels: call liger_hw.patch(model), or add LigerHwCallback() to the "
    "trainer's callbacks. And one that is not compiled under DDP: its outputs lose the two"
)
NO_LABELS = "none: it takes the labels away from the model's loss, which knows both numbers"
SMOOTHING = f"0.0 ({NO_LABELS[6:]}): override compute_loss and add {{'label_smoothing': ...}} to the inputs"


class TokenMetrics:
    """Log a patched causal model's token accuracy and mean entropy beside its loss.

    `token_accuracy` is the share of labels that are the likeliest token, `entropy` the mean over labels of the
    distributions' entropy in nats, both since the last log, over all ranks: sums over the labels that count, which stay
    on the device until then. Evaluation and prediction add them to their metrics. Loss and gradients are unchanged.

    Raises:
        ValueError: a step's model is not patched, or its loss gets no labels (`label_smoothing_factor`,
            `compute_loss_func`, nn.DataParallel), or it is compiled under DDP.

    Examples:
        >>> from transformers import Trainer
        >>> class MyTrainer(liger_hw.integrations.TokenMetrics, Trainer):
        ...     pass
    """

    token_sums = None  # {training: (3,) fp32 on the device: labels, right ones, sum of their entropies}

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        """Compute the loss, and add its by-products to the sums."""
        function, smoothing = self.compute_loss_func, self.args.label_smoothing_factor
        check(function is None, "compute_loss_func", function, NO_LABELS)
        check(not smoothing, "label_smoothing_factor", smoothing, SMOOTHING)
        check(self.args.n_gpu <= 1, "n_gpu", self.args.n_gpu, "1: start a process for each GPU, by torchrun")
        asked = {f"return_{name}": True for name in METRICS}
        loss, outputs = super().compute_loss(model, {**inputs, **asked}, return_outputs=True, **kwargs)
        check(all(hasattr(outputs, name) for name in METRICS), "model", type(model).__name__, NOT_PATCHED)
        labels = inputs["labels"][..., 1:] if inputs.get("shift_labels") is None else inputs["shift_labels"]
        count = (labels != -100).sum().float()
        sums = torch.stack((count, *(count * getattr(outputs, name) for name in METRICS)))
        self.token_sums = self.token_sums or {}
        self.token_sums[model.training] = self.token_sums.get(model.training, 0) + sums
        return (loss, without_by_products(outputs)) if return_outputs else loss

    def log(self, logs, *args, **kwargs):
        """Log a step's numbers with the two names."""
        more = self.pop_token_metrics(True) if "loss" in logs else {}
        super().log({**logs, **more}, *args, **kwargs)

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        """Evaluate or predict, and add the two names to the metrics."""
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        output.metrics.update(self.pop_token_metrics(False, f"{metric_key_prefix}_"))
        return output

    def pop_token_metrics(self, training, prefix=""):
        """Return the metrics of all ranks since the last call, once the device has them."""
        sums = (self.token_sums or {}).pop(training, None)
        if sums is None:
            return {}
        count, *values = self.accelerator.reduce(sums, "sum").tolist()
        return {f"{prefix}{name}": value / count for name, value in zip(METRICS, values) if count}
