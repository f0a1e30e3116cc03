"""Fine-tune by QLoRA on a card of 24 GB: adapters on weights in 4 bits.

python examples/qlora_sft.py --checkpointing                            Llama-3-8B's shape, random weights
python examples/qlora_sft.py --checkpointing --model my-org/my-8b-model --text ./my-texts
"""

import common
import torch
from peft import get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def main():
    args = common.arguments(__doc__, shape="8b")
    model = prepare_model_for_kbit_training(load(args), use_gradient_checkpointing=args.checkpointing)
    model = get_peft_model(model, common.lora_config())
    common.provide(args, model)  # liger_hw.patch(model)
    return common.train(args, "qlora_sft", model, common.sequences(args, common.tokenizer_of(args)))


def load(args):
    """Load the model in 4 bits, by default random weights."""
    dtype = torch.float32 if common.device().type == "cpu" else torch.bfloat16
    in_4_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return AutoModelForCausalLM.from_pretrained(
        args.model or random_model(args), dtype=dtype, quantization_config=in_4_bits, device_map={"": common.device()}
    )


def random_model(args):
    """Write a folder for `from_pretrained`, which makes 4 bits of the weights that it reads."""
    model, _ = common.model_and_tokenizer(args)
    folder = f"{args.output}/random"
    model.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
