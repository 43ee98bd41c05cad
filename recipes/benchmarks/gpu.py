"""
All that waits for a GPU, in one command: tests of the GPU's own paths, what a step costs, and a report to be pasted.

    python -m recipes.benchmarks.gpu                               # one GPU, no hub; at most 25 minutes. Or: make gpu
    python -m recipes.benchmarks.gpu --parts tests step-lora       # some parts; the report keeps the others' results
    python -m recipes.benchmarks.gpu --device cpu --small          # every part, tiny, in about 3 minutes on two cores

Each part is a command of its own, printed and logged, that is stopped at its limit. Where one fails the others go on.
runs/gpu/report.json and report.md have the machine, its versions, and a table and the minutes of each part; report.md
is made for the Cost section of recipes/README.md. Sizes are for a card of 140 GB; a smaller one wants `--length 1024`
or less.

To a machine without network carry this checkout and, as wheels, what its PyTorch came without: trl, datasets, dill and
multiprocess are seldom there (peft, pytest-xdist, matplotlib and psutil often are); for the main job also
reasoning-gym, math-verify and their own requirements.
"""

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

import torch

from recipes.benchmarks import markdown


ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "trl")


class Part(NamedTuple):
    """What Python is called with, how many minutes it has, and how to read the note and the table that it leaves."""

    title: str
    limit: float
    command: list[str]
    result: Callable[[], tuple[str, list[list[str]]]]


def parts_for(folder: Path, device: str, small: bool, length: int) -> dict[str, Part]:
    on_gpu = device == "cuda"

    def benchmark(name: str, title: str, limit: float, module: str, *flags: str) -> Part:
        def result():
            figures = json.loads(file.read_text())
            return figures["note"], figures["table"]

        file = folder / f"{name}.json"
        module = f"recipes.benchmarks.{module}"
        return Part(title, limit, ["-m", module, "--device", device, *flags, "--output", str(file)], result)

    def main_result():
        run = json.loads((folder / "main" / "result.json").read_text())
        head = ["steps", "training, s", "tokens generated", "held-out before", "after"]
        row = [f"{run['steps']}", f"{run['training_seconds']:.0f}", f"{run['tokens_generated']:,.0f}"]
        row += [f"{100 * run[when]['mean']:.1f} %" for when in ("before", "after")]
        return "The toy policy of recipes/math.py in float32.", [head, row]

    model = ["--shape", "small" if small else "qwen2.5-1.5b", "--length", str(length)]
    model += [] if small else ["--gradient_checkpointing"]
    rounds = ["--rounds", "1" if small else "3", "--steps", "2"]
    longest = ["--longest", "2048"] if small else []
    marks = "gpu" if on_gpu else "not gpu and not slow" if small else "not gpu"
    main = ["--output_dir", str(folder / "main"), "--disable_tqdm", "true", "--use_cpu", str(not on_gpu).lower()]
    if small:
        main += "--max_steps 2 --per_device_train_batch_size 16 --per_device_eval_batch_size 40".split()
        main += "--num_train_problems 200 --num_held_out_problems 20 --eval_strategy no".split()
    pytest = ["-m", "pytest", "-q", "-n", "0", "-m", marks, "tests/trainer/test_gpu.py"]
    return {
        "tests": Part("Tests", 3, pytest, lambda: ("", [pytest[-1:], [last_lines(folder / "tests.log", 1)]])),
        "step-lora": benchmark("step-lora", "A step, LoRA", 6, "step", *model, *rounds, "--lora"),
        "step-full": benchmark("step-full", "A step, full fine-tuning", 6, "step", *model, *rounds),
        "advantages": benchmark("advantages", "Advantages over one read and one write", 2, "advantages", *longest),
        "meter": benchmark("meter", "The meter", 3, "meter", *model, "--pairs", "2" if small else "12"),
        "main": Part("The main job", 5, ["recipes/math.py", *main], main_result),
    }


def last_lines(file: Path, count: int) -> str:
    return "\n".join([line for line in file.read_text().splitlines() if line.strip()][-count:])


def run(name: str, part: Part, folder: Path, device: str) -> dict:
    """The part's entry in the report."""
    log = folder / f"{name}.log"
    (folder / f"{name}.json").unlink(missing_ok=True)
    shutil.rmtree(folder / name, ignore_errors=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    print(f"\n{name}, at most {part.limit:g} min: python {shlex.join(part.command)}", flush=True)
    began = time.perf_counter()
    failure, note, table = "", "", []
    with log.open("w") as file:
        where = {"cwd": ROOT, "env": environment, "stdout": file, "stderr": subprocess.STDOUT}
        try:
            subprocess.run([sys.executable, *part.command], **where, timeout=60 * part.limit, check=True)
        except subprocess.CalledProcessError as error:
            failure = f"failed with exit status {error.returncode}"
        except subprocess.TimeoutExpired:
            failure = f"stopped at its limit of {part.limit:g} min"
    minutes = (time.perf_counter() - began) / 60
    try:
        note, table = part.result()  # what a stopped part has left counts too
    except (OSError, LookupError, ValueError) as error:
        failure = failure or f"left no result ({error!r})"
    if failure:
        note = f"{note}\n\n{failure}; the end of {log.name}:\n\n```\n{last_lines(log, 15)}\n```".strip()
    entry = {"title": part.title, "minutes": minutes, "failure": failure, "note": note, "table": table}
    print(text_of(entry), flush=True)
    return entry


def machine(device: str) -> str:
    name = f"CPU, {os.cpu_count()} cores"
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        name = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    installed = {package: next(distributions(name=package), None) for package in PACKAGES}
    versions = [f"{package} {of.version}" if of else f"no {package}" for package, of in installed.items()]
    return f"{name}; Python {platform.python_version()}, {', '.join(versions)}"


def text_of(entry: dict) -> str:
    title = f"### {entry['title']}: {entry['failure'] or 'done'}, {entry['minutes']:.1f} min"
    return "\n\n".join(filter(None, [title, entry["note"], entry["table"] and markdown(entry["table"])]))


def write(report: dict, folder: Path) -> None:
    (folder / "report.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    entries = report["parts"].values()
    total = f"{sum(entry['minutes'] for entry in entries):.0f} minutes in all"
    texts = [f"{report['machine']}; {report['date']}; {total}.", *map(text_of, entries)]
    (folder / "report.md").write_text("\n\n".join(texts) + "\n")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1], allow_abbrev=False)
    names = list(parts_for(Path(), "cpu", True, 16))
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--length", type=int, help="longest completion of a step, in tokens; 4096, or 16 with --small")
    parser.add_argument("--output_dir", default="runs/gpu")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("No GPU is there. `--device cpu --small` runs every part on the CPU, tiny.")
        return 1

    folder = Path(args.output_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    parts = parts_for(folder, args.device, args.small, args.length or (16 if args.small else 4096))
    report = {"machine": machine(args.device), "small": args.small, "date": str(date.today()), "parts": {}}
    print(report["machine"])
    if (folder / "report.json").exists():
        earlier = json.loads((folder / "report.json").read_text())
        if all(earlier[key] == report[key] for key in ("machine", "small")):
            report["parts"] = earlier["parts"]
    for name in args.parts:
        entries = report["parts"] | {name: run(name, parts[name], folder, args.device)}
        report["parts"] = {name: entries[name] for name in names if name in entries}
        write(report, folder)
    failed = [name for name in args.parts if report["parts"][name]["failure"]]
    verdict = f"Failed: {', '.join(failed)}." if failed else "All parts are done."
    print(f"\n{folder}: report.json and report.md. {verdict}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
