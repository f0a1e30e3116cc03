"""Train with every step in one CUDA graph, which frees the host.

python examples/cuda_graph.py                   # Qwen2.5-0.5B's sizes
python examples/cuda_graph.py --no-graph        # to compare
python examples/cuda_graph.py --tiny            # a CPU, without a graph
"""

import common
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# A batch of whole sequences needs no mask. For a name that it has no mask for, transformers makes none; for "sdpa" it
# makes one wherever it cannot read its values, as in a graph, and attention is then slower.
AttentionInterface.register("causal", sdpa_attention_forward)
WARM_UP = 3  # steps before the capture: they compile kernels and make the optimiser's state


class Graphed:
    """Capture `step(ids)` in a graph after the warm-up, and replay it from then on."""

    def __init__(self, step, ids):
        self.step, self.ids = step, ids.clone()  # a graph reads and writes the same memory at every replay
        self.graph = self.results = None
        self.steps, self.stream = 0, torch.cuda.Stream()

    def __call__(self, ids):
        self.ids.copy_(ids)
        if self.steps < WARM_UP:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.results = self.step(self.ids)
            torch.cuda.current_stream().wait_stream(self.stream)
        elif self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.results = self.step(self.ids)
        if self.graph:
            self.graph.replay()
        self.steps += 1
        return self.results


def main():
    args = common.arguments(__doc__, batch=1, seq=2048, steps=24, shape="0.5b", no_graph=False)
    model, tokenizer = common.model_and_tokenizer(args)
    common.provide(args, model)  # liger_hw.patch(model)
    model.set_attn_implementation("causal")
    graphed = common.device().type == "cuda" and not args.no_graph
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True, capturable=graphed)

    def step(ids):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach(), norm

    rows = torch.tensor([row["input_ids"] for row in common.sequences(args, tokenizer)], device=common.device())
    train = Graphed(step, rows[: args.batch]) if graphed else step
    meter = common.Meter(args)
    for ids in rows.split(args.batch):
        meter.on_step_begin()
        loss, norm = train(ids)
        meter.on_step_end()
        meter.on_log(None, None, None, {"loss": loss.item(), "grad_norm": norm.item()})
    return meter.finish("cuda_graph", model)


if __name__ == "__main__":
    main()
