"""Train with TRL's GRPOTrainer; letters and spaces in a completion earn the reward."""

import common
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

COMPLETIONS = 4  # of each prompt


def letters_and_spaces(completions, **_):
    """Return the share of letters and spaces in each completion."""
    return [sum(c.isalpha() or c == " " for c in text) / max(1, len(text)) for text in completions]


def main():
    args = common.arguments(__doc__, batch=8, seq=256, lora=False)
    args.batch = -(-args.batch // COMPLETIONS) * COMPLETIONS
    model, tokenizer = common.model_and_tokenizer(args)
    meter = common.Meter(args)
    patched = common.provide_trl(args, meter, model)  # liger_hw.patch(model), liger_hw.integrations.accelerate_trl()
    prompts = [{"prompt": row["prompt"][-args.seq :]} for row in common.preferences(args)]
    settings = common.trainer_arguments(
        args, num_generations=COMPLETIONS, max_completion_length=args.seq, gradient_checkpointing=args.checkpointing
    )
    GRPOTrainer(
        model,
        letters_and_spaces,
        GRPOConfig(**settings),
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
        **patched,
    ).train()
    return meter.finish("trl_grpo", model)


if __name__ == "__main__":
    main()
