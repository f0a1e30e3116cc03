"""List the sizes of real models, which the shapes of cases use."""

from dataclasses import dataclass

TOKENS = 8192  # rows of a training step on one GPU: 8 sequences of 1024, or 2 of 4096


@dataclass(frozen=True)
class Model:
    """The sizes of one published model that determine the shapes of its kernels."""

    name: str
    hidden: int
    intermediate: int
    activation: str
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


MODELS = (
    Model("Qwen2.5-0.5B", 896, 4864, "swiglu", 14, 2, 64, 151936),
    Model("Llama-3.2-1B", 2048, 8192, "swiglu", 32, 8, 64, 128256),
    Model("Gemma-2-2B", 2304, 9216, "geglu", 8, 4, 256, 256000),
    Model("Phi-3-mini", 3072, 8192, "swiglu", 32, 32, 96, 32064),
    Model("Gemma-3-12B", 3840, 15360, "geglu", 16, 8, 256, 262208),
    Model("Mistral-7B", 4096, 14336, "swiglu", 32, 8, 128, 32000),
    Model("Llama-3-8B", 4096, 14336, "swiglu", 32, 8, 128, 128256),
    Model("Llama-3-70B", 8192, 28672, "swiglu", 64, 8, 128, 128256),
    Model("Llama-3-405B", 16384, 53248, "swiglu", 128, 8, 128, 128256),
)
SMALL_AND_MEDIUM = (MODELS[0], MODELS[6])  # for ops whose shapes are those of another op
