"""Fine-tune by QLoRA on a card of 24 GB: adapters on weights in 4 bits.

python examples/qlora_sft.py --checkpointing                            Llama-3-8B's shape, random weights
python examples/qlora_sft.py --checkpointing --model my-org/my-8b-model --text ./my-texts
"""

import common
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def main():
    args = common.arguments(__doc__, shape="8b")
    dtype = torch.float32 if common.device().type == "cpu" else torch.bfloat16
    if not args.model:
        save_random_model(args)
    in_4_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=dtype, quantization_config=in_4_bits, device_map={"": common.device()}
    )
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=args.checkpointing)
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    common.provide(args, model)  # liger_hw.patch(model)
    return common.train(args, "qlora_sft", model, common.sequences(args, common.tokenizer_of(args)))


def save_random_model(args):
    """Write a folder for `from_pretrained`, which makes 4 bits of the weights that it reads."""
    model, tokenizer = common.model_and_tokenizer(args)
    args.model = f"{args.output}/random"
    model.save_pretrained(args.model)
    tokenizer.save_pretrained(args.model)


if __name__ == "__main__":
    main()
