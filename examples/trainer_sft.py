"""Fine-tune with the Hugging Face Trainer; liger_hw needs one more line."""

import common
from transformers import Trainer, TrainingArguments, default_data_collator


def main():
    args = common.arguments(__doc__)
    model, tokenizer = common.model_and_tokenizer(args)
    common.provide(args, model)  # liger_hw.patch(model)
    meter = common.Meter(args)
    Trainer(
        model,
        TrainingArguments(**common.trainer_arguments(args)),
        train_dataset=common.sequences(args, tokenizer),
        data_collator=default_data_collator,
        callbacks=[meter],
    ).train()
    return meter.finish("trainer_sft", model)


if __name__ == "__main__":
    main()
