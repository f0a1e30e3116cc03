"""Fine-tune a language model with Lightning.

python examples/lightning_sft.py
torchrun --nproc-per-node 2 examples/lightning_sft.py --strategy fsdp                  # or deepspeed_stage_3
"""

import logging

import common
import lightning
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy


class Training(lightning.LightningModule):
    def __init__(self, model, meter):
        super().__init__()
        self.model, self.meter = model, meter

    def training_step(self, batch, _):
        loss = self.model(**batch).loss
        self.meter.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def on_train_batch_start(self, *_):
        self.meter.on_step_begin()

    def on_train_batch_end(self, *_):
        self.meter.on_step_end()


def main():
    args = common.arguments(__doc__, strategy="auto")
    model, tokenizer = common.model_and_tokenizer(args)
    common.provide(args, model.train())  # liger_hw.patch(model)
    rows = [{name: torch.tensor(row) for name, row in rows.items()} for rows in common.sequences(args, tokenizer)]
    meter = common.Meter(args)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    strategy = args.strategy
    if strategy == "fsdp":  # alone it would gather the whole model at once
        strategy = FSDPStrategy(auto_wrap_policy={type(model.model.layers[0])})
    elif strategy == "deepspeed_stage_3" and args.bf16_states:
        strategy = DeepSpeedStrategy(stage=3)
        states = dict.fromkeys(("enabled", "bf16_master_weights_and_grads", "bf16_optimizer_states"), True)
        strategy.config["bf16"] = states
    lightning.Trainer(
        max_steps=args.steps, accelerator="auto", devices=common.gpus(), strategy=strategy,
        precision="32-true" if common.device().type == "cpu" else "bf16-true", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(Training(model, meter), torch.utils.data.DataLoader(rows, batch_size=args.batch))  # fmt: skip
    return meter.finish("lightning_sft", model)


if __name__ == "__main__":
    main()
