"""Fine-tune Qwen2.5-VL on pictures and captions with the Hugging Face Trainer.

python examples/vision_sft.py
accelerate launch --config_file examples/fsdp2.yaml examples/vision_sft.py     # two GPUs, or by torchrun
"""

import random

import common
import torch
from PIL import Image, ImageDraw
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from liger_lab.bench.demo import llama
from liger_lab.bench.training import SETTINGS

IGNORED = -100
COLOURS, SHAPES = ("red", "green", "blue", "orange", "purple"), ("rectangle", "ellipse")
SPECIAL = ("<image>", "<video>", "<vision>", "</vision>")
IDS = dict(zip(SPECIAL, ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")))


def configuration(args, tokenizer):
    special = {name: tokenizer.convert_tokens_to_ids(token) for token, name in IDS.items()}
    if not args.tiny:
        return Qwen2_5_VLConfig(**SETTINGS["qwen2.5-vl-3b"].model.config, **special)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    words = llama(64, 128, 2, 4, 2, len(tokenizer), rope_parameters=rope)
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    return Qwen2_5_VLConfig(text_config=words, vision_config=vision, **special)


def picture(chance, side):
    """Draw a coloured shape in a corner; return the picture and a caption."""
    colour, shape = chance.choice(COLOURS), chance.choice(SHAPES)
    column, row = chance.randrange(2), chance.randrange(2)
    image = Image.new("RGB", (side, side), "white")
    corner = (column * side // 2, row * side // 2)
    getattr(ImageDraw.Draw(image), shape)((*corner, corner[0] + side // 2 - 1, corner[1] + side // 2 - 1), fill=colour)
    return image, f"A {colour} {shape} at the {('upper', 'lower')[row]} {('left', 'right')[column]}. "


def rows(args, tokenizer):
    """Yield sequences of `args.seq` tokens: picture, caption, text; labels exclude the picture."""
    chance, processor = random.Random(0), Qwen2VLImageProcessorPil()
    start, end = (tokenizer.convert_tokens_to_ids(token) for token in SPECIAL[2:])
    for row in common.sequences(args, tokenizer):
        image, caption = picture(chance, 56 if args.tiny else 448)
        seen = processor(image, return_tensors="pt")
        places = int(seen["image_grid_thw"].prod()) // processor.merge_size**2
        shown = [start] + [tokenizer.convert_tokens_to_ids("<image>")] * places + [end]
        said = (tokenizer(caption)["input_ids"] + row["input_ids"])[: args.seq - len(shown)]
        yield {
            "input_ids": torch.tensor(shown + said),
            "labels": torch.tensor([IGNORED] * len(shown) + said),
            "mm_token_type_ids": torch.tensor([0] + [1] * places + [0] * (1 + len(said))),
            **seen,
        }


def collate(batch):
    together = {"pixel_values": torch.cat, "image_grid_thw": torch.cat}
    return {name: together.get(name, torch.stack)([row[name] for row in batch]) for name in batch[0]}


def main():
    args = common.arguments(__doc__)
    tokenizer = common.tokenizer_of(args)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    dtype = torch.float32 if common.device().type == "cpu" else torch.bfloat16
    with common.device():
        model = AutoModelForImageTextToText.from_config(configuration(args, tokenizer), dtype=dtype)
    common.provide(args, common.checkpointed(args, model))  # liger_hw.patch(model)
    return common.train(args, "vision_sft", model, list(rows(args, tokenizer)), collate)


if __name__ == "__main__":
    main()
