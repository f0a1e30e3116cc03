"""Fine-tune with TRL's SFTTrainer: all weights, or adapters.

python examples/trl_sft.py --lora --checkpointing --shape 8b      in bf16
python examples/trl_sft.py --qlora --checkpointing --shape 8b     on weights in 4 bits; writes 16 GB to --output first
"""

import common
from datasets import Dataset
from trl import SFTConfig, SFTTrainer


def main():
    args = common.arguments(__doc__, lora=False, qlora=False)
    if args.qlora:
        from qlora_sft import load

        model, tokenizer = load(args), common.tokenizer_of(args)
    else:
        model, tokenizer = common.model_and_tokenizer(args)
    meter = common.Meter(args)
    patched = common.provide_trl(args, meter, model)  # liger_hw.patch(model), liger_hw.integrations.accelerate_trl()
    rows = [{"input_ids": row["input_ids"]} for row in common.sequences(args, tokenizer)]
    SFTTrainer(
        model,
        SFTConfig(**common.trainer_arguments(args, gradient_checkpointing=args.checkpointing), max_length=args.seq),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        **patched,
    ).train()
    return meter.finish("trl_sft", model)


if __name__ == "__main__":
    main()
