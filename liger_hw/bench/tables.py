"""Results as text: the table after a run, what changed between two, and the table of the README."""

from liger_hw.bench.peers import FLOOR, OURS
from liger_hw.bench.report import size
from liger_hw.console import table

NOISE = 0.03  # a smaller change is not worth a line, nor is one within both runs' spreads


def by_shape(found: dict) -> dict:
    """(op, shape, mode) -> provider -> record, in the order of measurement."""
    shapes = {}
    for record in found["results"]:
        shapes.setdefault((record["op"], record["shape"], record["mode"]), {})[record["provider"]] = record
    return shapes


def fastest_peer(records: dict) -> dict | None:
    peers = [record for name, record in records.items() if name not in (OURS, FLOOR)]
    return min(peers, key=lambda record: record["median"], default=None)


def kernels(record: dict) -> float:
    """Milliseconds of the kernels alone, or of calls that could not be captured."""
    return record.get("gpu") or record["median"]


def kernels_share(record: dict) -> float | None:
    """What of the machine's limit those milliseconds reach."""
    return record["share"] and record["share"] * record["median"] / kernels(record)


def number(value: float) -> str:
    """Of milliseconds or microseconds: four significant digits or so."""
    if value < 0.01:
        return f"{value:.3g}"
    return f"{value:.4f}" if value < 1 else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def memory(record: dict | None) -> str:
    return size(record["peak_bytes"]) if record and "peak_bytes" in record else ""


HEADER = [
    "op", "shape", "mode", "liger_hw", "p20-p80", "kernels alone", "of the limit",
    "fastest peer", "", "its kernels", "speed-up", "memory", "the peer's", "over floor",
]  # fmt: skip


def rows(found: dict) -> list[list[str]]:
    """A line for each op, shape and mode that has a time of ours; milliseconds, microseconds for the host's times."""
    lines = []
    for (op, shape, mode), records in by_shape(found).items():
        ours, peer, floor = records.get(OURS), fastest_peer(records), records.get(FLOOR)
        if ours is None:
            continue
        unit = " us" if mode.startswith("host") else " ms"
        lines.append([
            op, shape, mode + (" (full - fwd)" if ours.get("derived") else ""), number(ours["median"]) + unit,
            f"{number(ours['p20'])}-{number(ours['p80'])}", number(ours["gpu"]) if ours.get("gpu") else "",
            percent(ours.get("share")), peer["provider"] if peer else "", number(peer["median"]) if peer else "",
            number(peer["gpu"]) if peer and peer.get("gpu") else "",
            f"{peer['median'] / ours['median']:.2f}x" if peer and ours["median"] > 0 else "",
            memory(ours), memory(peer), f"{ours['median'] / floor['median']:.3f}x" if floor else "",
        ])  # fmt: skip
    return lines


def facts(found: dict) -> dict[str, str]:
    """What holds for the run as a whole."""
    device, versions = found["device"], found["versions"]
    named = f"{device['name']} ({device['vendor']} {device['arch']})"
    lines = {"device": named, "clock": device["clock"]}
    if "dtype" in found:
        lines["dtype"] = found["dtype"]
    if "ceilings" in found:
        lines["copy"] = f"{found['ceilings']['bytes_per_second'] / 1e12:.3f} TB/s, read and written"
        lines["matrix product"] = f"{found['ceilings']['flops_per_second'] / 1e12:.2f} TFLOP/s"
    lines["versions"] = ", ".join(f"{package} {number}" for package, number in versions.items() if number)
    return lines | {
        "commit": found["commit"] or "unknown", "date": found["date"], "backend": found["backend"],
        "command": found["command"],
    }  # fmt: skip


def problems(found: dict) -> list[str]:
    """What a reader of the table must know: ops that are wrong here, providers that could not run, an early end."""
    lines = [
        f"RED: {op} is not measured, its parity fails here: {result['error']}"
        for op, result in found["parity"].items()
        if result["error"]
    ]
    lines += [f"skipped: {s['op']} {s['shape']} by {s['provider']}: {s['why']}" for s in found["skipped"]]
    return lines if found["complete"] else [*lines, "interrupted: not everything was measured"]


def show(found: dict) -> str:
    """Everything for a terminal."""
    lines = [f"{name}: {value}" for name, value in facts(found).items()]
    green = sum(result["cases"] for result in found["parity"].values() if not result["error"])
    lines += [f"parity: {green} cases pass", ""]
    return "\n".join([*lines, table(HEADER, rows(found)), *problems(found)])


TRAINING = ["model", "", "tokens/s", "p20-p80 ms", "peak memory", "longest context", "liger_hw is"]


def training_rows(found: dict) -> list[list[str]]:
    """A line for each training run; last comes how liger_hw's compares with it, in speed (or context) and memory."""
    runs = by_setting(found)
    lines = []
    for label, records in runs.items():
        ours = records.get(OURS, {})
        for name, record in records.items():
            if "error" in record:
                lines.append([label, name, record["error"], "", "", "", ""])
                continue
            value = "tokens_per_second" if record["seq"] else "longest"
            gain = []
            if name != OURS and ours.get(value) and record[value]:
                gain.append(f"{ours[value] / record[value]:.2f}x")
                if "peak_bytes" in record:
                    gain.append(f"with {ours['peak_bytes'] / record['peak_bytes']:.2f}x the memory")
            timed = "peak_bytes" in record
            lines.append([
                label, name, f"{record['tokens_per_second']:,.0f}" if timed else "",
                f"{record['p20']:.1f}-{record['p80']:.1f}" if timed else "",
                size(record["peak_bytes"]) if timed else "", "" if timed else f"{record['longest']:,}", " ".join(gain),
            ])  # fmt: skip
    return lines


def by_setting(found: dict) -> dict:
    """Label of a training run -> provider -> record."""
    runs = {}
    for record in found["results"]:
        runs.setdefault(setting(record), {})[record["provider"]] = record
    return runs


def setting(run: dict) -> str:
    """What a training run trains: "llama-1b 8x1024", "llama-8b longest context, checkpointing"; of sharded training
    also by what and over how many processes: "llama-8b 8x1024 fsdp2 on 4".
    """
    sizes = f"{run['batch']}x{run['seq']}" if run["seq"] else "longest context"
    if "engine" in run:
        return f"{run['model']} {sizes} {run['engine']} on {run['gpus']}"
    return f"{run['model']} {sizes}{', checkpointing' if run['checkpointing'] else ''}"


def show_training(found: dict) -> str:
    """Everything of a training benchmark for a terminal."""
    lines = [f"{name}: {value}" for name, value in facts(found).items()]
    lines += ["", table(TRAINING, training_rows(found))]
    return "\n".join(lines if found["complete"] else [*lines, "interrupted: not everything was measured"])


def compare(before: dict, after: dict) -> str:
    """What got faster and slower from one run to another: by more than 3% and beyond both runs' spreads."""
    old = {key + (name,): record for key, records in by_shape(before).items() for name, record in records.items()}
    new = {key + (name,): record for key, records in by_shape(after).items() for name, record in records.items()}
    both = [key for key in new if key in old]
    changes = []
    for key in both:
        a, b = old[key], new[key]
        change = b["median"] / a["median"] - 1
        apart = b["p80"] < a["p20"] or b["p20"] > a["p80"]
        if apart and abs(change) > NOISE:
            word = "faster" if change < 0 else "slower"
            unit = "us" if key[2].startswith("host") else "ms"
            memories = [memory(a), memory(b)]
            changes.append((change, [
                f"{change:+.1%}", word, *key, f"{number(a['median'])} {unit}", f"{number(b['median'])} {unit}",
                " -> ".join(memories) if memories[0] != memories[1] else memories[0],
            ]))  # fmt: skip
    changes.sort(key=lambda item: item[0])
    header = ["change", "", "op", "shape", "mode", "provider", "before", "after", "memory"]
    told = f"{len(changes)} of {len(both)} times differ by more than {NOISE:.0%} and beyond their spreads"
    if len(old) != len(both) or len(new) != len(both):
        told += f"; only before: {len(old) - len(both)}, only after: {len(new) - len(both)}"
    where = [f"before: {_run(before)}", f"after:  {_run(after)}"]
    return "\n".join([*where, told, *([table(header, [row for _, row in changes])] if changes else [])])


def _run(found: dict) -> str:
    return f"{found['device']['name']}, {found['date']}, commit {found['commit'] or 'unknown'}"
