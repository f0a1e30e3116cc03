"""Train with TRL's DPOTrainer to prefer a function's own body to another's."""

import copy

import common
from datasets import Dataset
from trl import DPOConfig, DPOTrainer


def main():
    args = common.arguments(__doc__)
    model, tokenizer = common.model_and_tokenizer(args)
    reference = copy.deepcopy(model)
    for each in (model, reference):
        common.provide(args, each)  # liger_hw.patch(model)
    common.provide_trl(args)  # liger_hw.integrations.accelerate_trl()
    meter = common.Meter(args, tokens=2 * args.batch * args.seq)
    DPOTrainer(
        model,
        reference,
        DPOConfig(**common.trainer_arguments(args), max_length=args.seq),
        train_dataset=Dataset.from_list(common.preferences(args)),
        processing_class=tokenizer,
        callbacks=[meter],
    ).train()
    return meter.finish("trl_dpo", model)


if __name__ == "__main__":
    main()
