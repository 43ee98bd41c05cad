"""
All that waits for a GPU, in one command: tests of the GPU's own paths, what a step costs, the main job, and a report.

    python -m recipes.benchmarks.gpu                               # one GPU, no hub; at most 25 minutes. Or: make gpu
    python -m recipes.benchmarks.gpu --parts tests step-lora       # some parts; the report keeps the others' results
    python -m recipes.benchmarks.gpu --device cpu --small          # every part, tiny, in about 3 minutes on two cores

Each part is a command of its own, printed and logged, that is stopped at its limit. Where one fails the others go on.
runs/gpu/report.md says of each how it ended, on which machine, and what it printed last: the tables for the Cost
section of recipes/README.md. Sizes are for a card of 140 GB; a smaller one wants `--length 1024` or less.

To a machine without network carry this checkout and, as wheels, what its PyTorch came without: trl, datasets, dill and
multiprocess are seldom there (peft, pytest-xdist, matplotlib and psutil often are); for the main job also
reasoning-gym, math-verify and their own requirements.
"""

import argparse
import os
import platform
import shlex
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "trl")
LINES = 25  # of a part's log that the report has


def parts_for(folder: Path, device: str, small: bool, length: int) -> dict[str, tuple[float, list[str]]]:
    """The minutes that each part has, and what Python is called with."""

    def benchmark(name: str, *flags: str) -> list[str]:
        return ["-m", f"recipes.benchmarks.{name}", "--device", device, *flags]

    model = ["--shape", "small" if small else "qwen2.5-1.5b", "--length", str(length)]
    model += [] if small else ["--gradient_checkpointing"]
    model += ["--rounds", "1" if small else "3", "--steps", "2"]
    marks = "gpu" if device == "cuda" else "not gpu and not slow" if small else "not gpu"
    main = ["--output_dir", str(folder / "main"), "--overwrite", "--disable_tqdm", "true"]
    main += ["--use_cpu", str(device == "cpu").lower()]
    if small:
        main += "--max_steps 2 --per_device_train_batch_size 16 --per_device_eval_batch_size 40".split()
        main += "--num_train_problems 200 --num_held_out_problems 20 --eval_strategy no".split()
    return {
        "tests": (3, ["-m", "pytest", "-q", "-n", "0", "-m", marks, "tests/trainer/test_gpu.py"]),
        "step-lora": (6, benchmark("step", *model, "--lora")),
        "step-full": (6, benchmark("step", *model)),
        "advantages": (2, benchmark("advantages", *(["--longest", "2048"] if small else []))),
        "meter": (3, benchmark("step", *model, "--meter")),
        "main": (5, ["recipes/math.py", *main]),
    }


def run(name: str, limit: float, command: list[str], folder: Path, device: str) -> bool:
    """Whether a part succeeds within its limit, in minutes. Its section of the report goes to `folder`."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    shown = f"python {shlex.join(command)}"
    print(f"\n{name}, at most {limit:g} min: {shown}", flush=True)
    began, outcome, log = time.perf_counter(), "done", folder / f"{name}.log"
    with log.open("w") as file:
        where = {"cwd": ROOT, "env": environment, "stdout": file, "stderr": subprocess.STDOUT}
        try:
            subprocess.run([sys.executable, *command], **where, timeout=60 * limit, check=True)
        except subprocess.CalledProcessError as error:
            outcome = f"failed with exit status {error.returncode}"
        except subprocess.TimeoutExpired:
            outcome = f"stopped at its limit of {limit:g} min"
    title = f"### {name}: {outcome}, {(time.perf_counter() - began) / 60:.1f} min"
    printed = "\n".join([line for line in log.read_text().splitlines() if line.strip()][-LINES:])
    section = f"{title}\n\n{machine(device)}; {date.today()}\n\n```\n$ {shown}\n{printed}\n```\n"
    (folder / f"{name}.md").write_text(section)
    print(section, flush=True)
    return outcome == "done"


def machine(device: str) -> str:
    name = f"CPU, {os.cpu_count()} cores"
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        name = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return f"{name}; Python {platform.python_version()}, {', '.join(map(installed, PACKAGES))}"


def installed(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


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
    parts, failed = parts_for(folder, args.device, args.small, args.length or (16 if args.small else 4096)), []
    for name in args.parts:
        if not run(name, *parts[name], folder, args.device):
            failed.append(name)
        sections = [folder / f"{part}.md" for part in names]
        (folder / "report.md").write_text("\n".join(path.read_text() for path in sections if path.exists()))
    verdict = f"Failed: {', '.join(failed)}." if failed else "All parts are done."
    print(f"{folder}: report.md, and a log of each part. {verdict}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
