"""Fine-tune on several GPUs with accelerate and FSDP2, which shards the weights.

accelerate launch --config_file examples/fsdp2.yaml examples/fsdp2_sft.py
torchrun --nproc-per-node 2 examples/fsdp2_sft.py --tiny                    # on a CPU
"""

import common
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin


def main():
    args = common.arguments(__doc__)
    model, tokenizer = common.model_and_tokenizer(args)
    common.provide(args, model)  # liger_hw.patch(model), before prepare
    on_cpu = common.device().type == "cpu"
    options = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"}
    plugin = FullyShardedDataParallelPlugin(**options)
    accelerator = Accelerator(cpu=on_cpu, fsdp_plugin=plugin, mixed_precision="no" if on_cpu else "bf16")
    common.shard_on_cpus(accelerator.state, **options)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-4))

    def step(**batch):
        loss = model(**batch, use_cache=False).loss
        accelerator.backward(loss)
        norm = common.gradient_norm(model)
        optimizer.step(), optimizer.zero_grad()
        return loss, norm

    rows = common.sequences(args, tokenizer)
    return common.train_ranks(args, "fsdp2_sft", model, rows, step, dist.get_world_size())


if __name__ == "__main__":
    main()
