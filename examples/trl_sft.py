"""Fine-tune with TRL's SFTTrainer."""

import common
from datasets import Dataset
from trl import SFTConfig, SFTTrainer


def main():
    args = common.arguments(__doc__)
    model, tokenizer = common.model_and_tokenizer(args)
    common.provide(args, model)  # liger_hw.patch(model)
    meter = common.Meter(args)
    rows = [{"input_ids": row["input_ids"]} for row in common.sequences(args, tokenizer)]
    SFTTrainer(
        model,
        SFTConfig(**common.trainer_arguments(args), max_length=args.seq),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[meter],
    ).train()
    return meter.finish("trl_sft", model)


if __name__ == "__main__":
    main()
