"""Fine-tune on several GPUs with tensor parallelism by transformers' plan.

torchrun --nproc-per-node 2 examples/tensor_parallel_sft.py
torchrun --nproc-per-node 2 examples/tensor_parallel_sft.py --tiny    # on a CPU
"""

from pathlib import Path

import common
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM


def main():
    args = common.arguments(__doc__)
    model, tokenizer = common.model_and_tokenizer(args)
    folder = args.model or Path(args.output) / "random"
    if not args.model and dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=model.dtype).train()
    common.provide(args, model)  # liger_hw.patch(model)
    # foreach and fused take no mixture of sharded and whole weights
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, foreach=False)

    def step(**batch):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        norm = common.gradient_norm(model)
        optimizer.step(), optimizer.zero_grad()
        return loss, norm

    return common.train_ranks(args, "tensor_parallel_sft", model, common.sequences(args, tokenizer), step, 1)


if __name__ == "__main__":
    main()
