"""Train with TRL's DPOTrainer to prefer a function's own body to another's.

python examples/trl_dpo.py --lora --checkpointing --shape 8b      adapters: no second model is the reference
"""

import copy

import common
from datasets import Dataset
from trl import DPOConfig, DPOTrainer


def main():
    args = common.arguments(__doc__, lora=False)
    model, tokenizer = common.model_and_tokenizer(args)
    reference = None if args.lora else copy.deepcopy(model)  # with an adapter TRL disables it instead
    meter = common.Meter(args, tokens=2 * args.batch * args.seq)
    trained = (model,) if args.lora else (model, reference)
    patched = common.provide_trl(args, meter, *trained)  # liger_hw.patch(model), liger_hw.integrations.accelerate_trl()
    DPOTrainer(
        model,
        reference,
        DPOConfig(**common.trainer_arguments(args, gradient_checkpointing=args.checkpointing), max_length=args.seq),
        train_dataset=Dataset.from_list(common.preferences(args)),
        processing_class=tokenizer,
        **patched,
    ).train()
    return meter.finish("trl_dpo", model)


if __name__ == "__main__":
    main()
