"""Train a small Llama, plain and patched, and compare: `liger-hw demo`."""

from liger_hw import console
from liger_hw.cli.common import add_command, show
from liger_lab import terminal
from liger_lab.cli import common


def add(commands) -> None:
    command = add_command(
        commands, "demo", demo, "train a small Llama on real text, plain and patched, and compare",
        "Train a Llama of random weights on the same batches twice, plain and patched, and compare losses, tokens per "
        "second, and the peak memory of a step and of the loss alone. It writes report.html with pictures, and "
        "downloads nothing.",
        {"": "a tiny model, which a CPU can train", "--model 1b --against liger": "Llama-3.2-1B's sizes, on a GPU"},
        "one to two minutes on two CPU cores; on a GPU most of the time goes into building the models.",
    )  # fmt: skip
    command.add_argument(
        "--model", choices=("tiny", "0.5b", "1b", "8b"), default="tiny", help="its sizes; weights are random"
    )
    command.add_argument("--steps", type=common.positive, metavar="N", help="optimiser steps of each run")
    command.add_argument("--batch", type=common.positive, metavar="N", help="sequences in a batch")
    command.add_argument("--seq", type=common.positive, metavar="N", help="tokens in a sequence")
    command.add_argument("--dtype", choices=("fp32", "bf16"), help="fp32 on a CPU, bf16 elsewhere")
    command.add_argument("--text", nargs="+", metavar="PATH", help="files or folders (the standard library's source)")
    common.add_report(command)
    command.add_argument("--against", choices=("liger",), help="add a run patched by the package liger-kernel")


def demo(args) -> None:
    """Train plain and patched, print the table, write the report."""
    console.require("matplotlib", "rich", "tokenizers", "transformers", *(["liger_kernel"] if args.against else []))
    import transformers

    from liger_lab.bench import demo, report

    transformers.logging.set_verbosity_error()
    with terminal.progress() as progress:
        comparison = demo.compare(args, progress)
    file = report.write(comparison, args.report)
    show(args, comparison.to_json(), report.show(comparison), f"report: {file}")
