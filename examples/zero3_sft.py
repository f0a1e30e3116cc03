"""Fine-tune on several GPUs with DeepSpeed's ZeRO-3, which shards the weights.

torchrun --nproc-per-node 2 examples/zero3_sft.py           # or: deepspeed examples/zero3_sft.py
torchrun --nproc-per-node 2 examples/zero3_sft.py --tiny    # on a CPU
"""

import common
import deepspeed
import torch
import torch.distributed as dist


def main():
    args = common.arguments(__doc__)
    model, tokenizer = common.model_and_tokenizer(args)
    common.provide(args, model)  # liger_hw.patch(model), before initialize
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False)
    config = {
        "train_batch_size": args.batch,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": common.device().type != "cpu"},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(**batch):
        loss = engine(**batch, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return loss, engine.get_global_grad_norm()

    rows = common.sequences(args, tokenizer)
    return common.train_ranks(args, "zero3_sft", model, rows, step, dist.get_world_size())


if __name__ == "__main__":
    main()
