"""Train one small Llama on real text twice, plain and patched, and compare: `liger-hw demo`.

Both runs start from the same weights and see the same batches through the same optimiser. They alternate in rounds of
steps, so that a drifting clock affects both.
"""

import importlib
import os
import platform
import random
import sys
import sysconfig
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

import liger_hw
from liger_hw import backends, dispatch
from liger_lab.bench import memory

VOCABULARY = 16384
SAMPLE = 4_000_000  # characters of text that train the tokenizer: 1 s on two cores, and enough for every merge
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PLAIN, PATCHED, PEER = "plain", "liger_hw", "liger-kernel"


@dataclass(frozen=True)
class DemoModel:
    """The sizes of a model, by transformers' names, and the defaults of its training."""

    config: dict
    batch: int
    seq: int
    steps: int
    learning_rate: float
    checkpointing: bool = False
    family: str = "llama"  # transformers' model_type

    def configuration(self, **more):
        from transformers import AutoConfig

        return AutoConfig.for_model(self.family, **self.config, use_cache=False, **more)


def llama(hidden, intermediate, layers, heads, kv_heads, vocabulary, **more):
    return {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary, **more,
    }  # fmt: skip


MODELS = {
    "tiny": DemoModel(llama(256, 768, 4, 4, 2, VOCABULARY), batch=4, seq=256, steps=60, learning_rate=1e-3),
    "0.5b": DemoModel(
        llama(896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True),  # Qwen2.5-0.5B's sizes
        batch=8, seq=1024, steps=50, learning_rate=1e-4,
    ),
    "1b": DemoModel(
        llama(2048, 8192, 16, 32, 8, 128256, tie_word_embeddings=True),  # Llama-3.2-1B
        batch=8, seq=1024, steps=50, learning_rate=1e-4,
    ),
    "8b": DemoModel(
        llama(4096, 14336, 32, 32, 8, 128256),  # Llama-3-8B
        batch=8, seq=2048, steps=20, learning_rate=1e-4, checkpointing=True,
    ),
}  # fmt: skip


def step(model, optimizer, **batch):
    """Make one optimiser step; return its loss, on the device."""
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return loss.detach()


@dataclass
class DemoRun:
    """One model in training.

    Attributes:
        name: "plain", "liger_hw" or "liger-kernel".
        patched: the summary of `liger_hw.patch`.
        globals: names that the peer replaced in transformers' module of Llama.
        losses: the loss of every step.
        step_seconds: seconds of a step, one number for each timed round.
        step_bytes: peak memory of one step: parameters, optimiser state, and the step's own allocations.
        loss_bytes: peak memory of the head and the loss alone, forward and backward, without their inputs.
    """

    name: str
    model: torch.nn.Module = None
    optimizer: torch.optim.Optimizer = None
    patched: str = ""
    globals: dict = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    step_bytes: int = 0
    loss_bytes: int = 0

    def step(self, batch):
        return step(self.model, self.optimizer, input_ids=batch, labels=batch)

    def release(self):
        self.model = self.optimizer = None


@dataclass
class Comparison:
    """The runs of the demo, with `settings` and `machine` as plain data for the report."""

    runs: list[DemoRun]
    settings: dict
    machine: dict
    complete: bool

    def tokens_per_second(self, run: DemoRun) -> float:
        return self.settings["batch"] * self.settings["seq"] / median(run.step_seconds)

    def to_json(self) -> dict:
        """Return the comparison as plain data."""
        runs = [
            {
                "name": run.name, "losses": run.losses, "tokens_per_second": self.tokens_per_second(run),
                "step_bytes": run.step_bytes, "loss_bytes": run.loss_bytes, "patched": run.patched,
            }
            for run in self.runs
        ]  # fmt: skip
        return {"settings": self.settings, "machine": self.machine, "complete": self.complete, "runs": runs}


LAST = 10  # steps whose losses are the result: that of one step is of one batch, which may be an outlier


def final_loss(run: DemoRun) -> tuple[float, float]:
    """Return the mean loss of the last steps and its standard deviation over batches."""
    losses = torch.tensor(run.losses[-LAST:], dtype=torch.float64)
    return losses.mean().item(), losses.std().item() if len(losses) > 1 else 0.0


def difference(one: DemoRun, other: DemoRun) -> list[float]:
    """Return the absolute difference of two runs' losses at every step."""
    return [abs(a - b) for a, b in zip(one.losses, other.losses)]


def read_text(paths, enough: int = SAMPLE) -> list[str]:
    """Read files of text in a fixed random order, until they hold `enough` characters.

    Args:
        paths: files, or folders of *.py, *.txt and *.md files; empty means this interpreter's standard library.

    Raises:
        ValueError: a path does not exist or holds no text.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in map(Path, paths or [library]):
        if not path.exists():
            raise ValueError(f"--text: got {path}, which does not exist, allowed: files and folders of text")
        candidates = sorted(path.rglob("*")) if path.is_dir() else [path]
        files += [
            file for file in candidates if file.is_file() and (file == path or file.suffix in (".py", ".txt", ".md"))
        ]
    if not paths:
        files = [file for file in files if "site-packages" not in file.parts]
    random.Random(0).shuffle(files)
    texts, characters = [], 0
    for file in files:
        texts.append(file.read_text(errors="replace"))
        characters += len(texts[-1])
        if characters >= enough:
            break
    if not characters:
        raise ValueError(f"--text: got {', '.join(map(str, paths or [library]))}, allowed: files or folders with text")
    return texts


def train_tokenizer(texts):
    """Train a byte-level BPE of VOCABULARY entries on `texts`; short texts give fewer entries."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def make_batches(texts, tokenizer, steps, batch, seq) -> torch.Tensor:
    """Cut token ids (steps, batch, seq) from random places of the text.

    Every run gets the same ids.

    Raises:
        ValueError: the text is shorter than one sequence.
    """
    tokens = torch.tensor([token for encoding in tokenizer.encode_batch(texts) for token in encoding.ids])
    if len(tokens) <= seq:
        raise ValueError(f"--text: got {len(tokens)} tokens, allowed: more than the {seq} of one sequence (--seq)")
    starts = torch.randint(len(tokens) - seq, (steps, batch, 1), generator=torch.Generator().manual_seed(0))
    return tokens[starts + torch.arange(seq)]


def build(name, shape: DemoModel, seq, dtype, device) -> DemoRun:
    """Build a model with its optimiser; every name gets the same weights."""
    from transformers import AutoModelForCausalLM

    config = shape.configuration(max_position_embeddings=seq)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.train()
    if shape.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    run = DemoRun(name, model)
    if name == PATCHED:
        run.patched = str(liger_hw.patch(model))
    elif name == PEER:
        run.globals = _patch_by_peer(model)
    run.optimizer = torch.optim.AdamW(model.parameters(), lr=shape.learning_rate, fused=True)
    return run


def _modeling(model):
    """Return the module of transformers that defines the model's class."""
    return sys.modules[type(model).__module__]


def _patch_by_peer(model) -> dict:
    """Patch with liger-kernel; undo and return its changes to transformers' module."""
    modeling = _modeling(model)
    before = dict(vars(modeling))
    peer = importlib.import_module("liger_kernel.transformers")
    peer._apply_liger_kernel_to_instance(model=model)
    changed = {name: value for name, value in vars(modeling).items() if before.get(name) is not value}
    vars(modeling).update({name: before[name] for name in changed})
    return changed


@contextmanager
def active(run: DemoRun):
    """Put the names that the library of `run` replaces into transformers' module within the block."""
    modeling = vars(_modeling(run.model))
    before = {name: modeling[name] for name in run.globals}
    modeling.update(run.globals)
    try:
        yield
    finally:
        modeling.update(before)


def _round(run: DemoRun, batches, device, timed: bool):
    with active(run):
        synchronize(device)
        start = time.perf_counter()
        losses = [run.step(batch) for batch in batches]
        synchronize(device)
        elapsed = time.perf_counter() - start
    run.losses += torch.stack(losses).tolist()
    if timed:
        run.step_seconds.append(elapsed / len(batches))


def synchronize(device):
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure_memory(run: DemoRun, batch: torch.Tensor):
    """Measure the peak memory of one more step, and of head and loss alone."""
    with active(run):
        run.step_bytes = step_bytes(run, batch)
        run.optimizer.zero_grad()
        run.loss_bytes = memory.peak(_loss_alone(run.model, batch), batch.device)
        run.optimizer.zero_grad()


def step_bytes(run: DemoRun, batch) -> int:
    """Return the peak memory of one more step: parameters, optimiser state and the step's allocations."""
    run.optimizer.zero_grad()
    state = [value for values in run.optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    resident = sum(t.numel() * t.element_size() for t in (*run.model.parameters(), *run.model.buffers(), *state))
    return resident + memory.peak(lambda: run.step(batch), run.model.device)


def _loss_alone(model, batch):
    """Return a function that runs head and loss, forward and backward, on random hidden states."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    weight = model.lm_head.weight
    hidden = torch.randn(*batch.shape, weight.shape[1], dtype=weight.dtype, device=weight.device, requires_grad=True)

    def function():
        model.model.forward = lambda *args, **kwargs: BaseModelOutputWithPast(last_hidden_state=hidden)
        try:
            model(input_ids=batch, labels=batch).loss.backward()
        finally:
            del model.model.forward

    return function


def compare(args, progress) -> Comparison:
    """Train and measure the runs of the command line `args`.

    Args:
        progress: a visible `rich.progress.Progress`.

    Raises:
        ValueError: an argument is out of range, names no text, or names a peer that cannot run here.
        KeyboardInterrupt: a run has no timed step yet; later, Ctrl-C ends the comparison with the steps so far.
    """
    device = torch.device(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    if device.type != "cpu":
        device = torch.device(device.type, torch.accelerator.current_device_index())
    shape = MODELS[args.model]
    batch, seq, steps = args.batch or shape.batch, args.seq or shape.seq, args.steps or shape.steps
    dtype = DTYPES[args.dtype or ("fp32" if device.type == "cpu" else "bf16")]
    names = [PLAIN, PATCHED, *([PEER] if args.against else [])]
    if args.against and device.type == "cpu":
        raise ValueError("--against: got liger, which runs on accelerators alone, and torch finds none here")

    stage = progress.add_task("text and tokenizer", total=3, note="")
    texts = read_text(args.text)
    progress.advance(stage)
    tokenizer = train_tokenizer(texts)
    progress.advance(stage)
    batches = make_batches(texts, tokenizer, steps + 1, batch, seq).to(device)  # the last one measures the memory
    progress.update(stage, advance=1, note=f"{tokenizer.get_vocab_size():,} entries from {len(texts)} files")

    # five steps between synchronisations, as a training loop that logs now and then; a CPU needs none
    round_steps = 1 if device.type == "cpu" else 5
    warmup = min(round_steps if device.type != "cpu" else 3, steps - round_steps)
    bars = {name: progress.add_task(name, total=steps, note="", start=False) for name in names}

    def advance(run):
        done = len(run.losses)
        count = min(round_steps, steps - done)
        if not done:
            progress.start_task(bars[run.name])
        _round(run, batches[done : done + count], device, timed=done >= warmup)
        speed = f"{batch * seq / run.step_seconds[-1]:,.0f} tokens/s" if run.step_seconds else "warming up"
        progress.update(bars[run.name], completed=len(run.losses), note=f"loss {run.losses[-1]:.4f}  {speed}")

    together = _fit_together(shape, dtype, device, len(names))
    runs, complete = [], True
    try:
        for group in [names] if together else [[name] for name in names]:
            turn = [build(name, shape, seq, dtype, device) for name in group]
            runs += turn
            for number in range(0, steps, round_steps):
                for run in turn if number % (2 * round_steps) == 0 else turn[::-1]:
                    advance(run)
            if not together:
                measure_memory(turn[0], batches[steps])
                turn[0].release()
    except KeyboardInterrupt:
        complete = False
        if len(runs) < len(names) or not all(run.step_seconds for run in runs):
            raise
    for run in runs:
        if run.model is not None:
            measure_memory(run, batches[steps])
            run.release()
    shortest = min(len(run.losses) for run in runs)
    for run in runs:
        del run.losses[shortest:]

    settings = {
        "model": args.model, "batch": batch, "seq": seq, "steps": shortest,
        "dtype": str(dtype).removeprefix("torch."), "vocabulary": shape.config["vocab_size"],
        "text": ", ".join(args.text) if args.text else "the Python standard library's source",
        "order": f"rounds of {round_steps}, in turn" if together else "one after the other (together they do not fit)",
        "warm-up steps": warmup,
    }  # fmt: skip
    return Comparison(runs, settings, machine(device), complete)


def _fit_together(shape: DemoModel, dtype, device, count) -> bool:
    """Return whether the weights and optimiser states of all runs fit half the memory."""
    if device.type == "cpu":
        return True
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.configuration())
    parameters = sum(p.numel() for p in model.parameters())
    _, total = torch.accelerator.get_memory_info(device)
    return 3 * parameters * dtype.itemsize * count < total / 2  # a weight and AdamW's two moments


def machine(device: torch.device) -> dict:
    """Describe the device, the implementation of the ops, and the versions."""
    import transformers

    here = backends.detected(device)
    name = here.name or f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    served = ", ".join(sorted({op.choose(device) for op in dispatch.OPS.values()}))
    return {
        "device": f"{name} ({here.vendor} {here.arch})" if here.vendor != "cpu" else f"CPU ({name})",
        "backend": f"{backends.forced()} (forced)" if backends.forced() else served,
        "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        "liger_hw": liger_hw.__version__, "command": " ".join(["liger-hw", *sys.argv[1:]]),
    }  # fmt: skip
