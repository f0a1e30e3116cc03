"""Fine-tune with the Hugging Face Trainer; liger_hw needs one more line.

python examples/trainer_sft.py
accelerate launch --config_file examples/fsdp2.yaml examples/trainer_sft.py     # two GPUs, or by torchrun
"""

import common


def main():
    args = common.arguments(__doc__)
    model, tokenizer = common.model_and_tokenizer(args)
    common.provide(args, model)  # liger_hw.patch(model), before the Trainer shards it
    return common.train(args, "trainer_sft", model, common.sequences(args, tokenizer))


if __name__ == "__main__":
    main()
