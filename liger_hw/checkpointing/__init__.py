"""Keep, recompute or offload each result of a decoder layer, within a budget: `liger_hw.activations`.

A model's layers run under torch's activation checkpointing, with two additions: results that a plan keeps on the device
or in host memory are not recomputed, and a layer that keeps everything runs without checkpointing. The plan follows
from the first passes of the training itself, which recompute every layer: one warms up, one records the operations of
each layer with their times, one measures the memory over a pass. Then the plan is solved, and proved: the next pass
recomputes what it keeps, and compares the bits.
"""
