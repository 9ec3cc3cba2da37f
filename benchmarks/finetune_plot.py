"""The curves of benchmarks/finetune_quality.py as a picture: evaluation loss over updates, both sides."""

from __future__ import annotations

import csv
from pathlib import Path

STYLES = {"FineInfer": ("-", "o"), "HF + PEFT": ("--", "x")}


def curves(path: Path) -> tuple[str, dict[str, list[tuple[int, float, float]]]]:
    """(what was trained, side -> (step, evaluation loss, training loss)) of the newest run in the file."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    first = max(index for index, row in enumerate(rows) if row["side"] == "FineInfer" and row["step"] == "0")
    found: dict[str, list[tuple[int, float, float]]] = {}
    for row in rows[first:]:
        found.setdefault(row["side"], []).append((int(row["step"]), float(row["eval_loss"]), float(row["train_loss"])))
    row = rows[first]
    return f"{row['chats']} chats, {row['held_out']} held out, {row['card']}", found


def plot(source: Path, picture: Path) -> bool:
    """Write the picture; False, with a line that says so, where matplotlib is not installed (extra ``dev``)."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed (pip install 'fineinfer[dev]')", flush=True)
        return False
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "fineinfer"  # the same rows give the same file
    from matplotlib import pyplot

    title, found = curves(source)
    figure, axes = pyplot.subplots(figsize=(7.5, 4.0), layout="constrained")
    for side, points in found.items():
        line, marker = STYLES[side]
        steps = [step for step, _, _ in points]
        color = axes.plot(steps, [loss for _, loss, _ in points], line, marker=marker, label=f"{side}, held out")[0]
        axes.plot(
            steps[1:], [loss for _, _, loss in points][1:], line, alpha=0.4, color=color.get_color(),
            label=f"{side}, training",
        )  # fmt: skip
    axes.set_xlabel("optimizer updates")
    axes.set_ylabel("loss per trained token")
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, metadata={"Date": None})
    pyplot.close(figure)
    print(f"wrote {picture}", flush=True)
    return True
