"""What the YAML files of run_axolotl.py name: data, a reward, and a plugin that lets several processes use one CPU."""

from axolotl.integrations.base import BasePlugin
from axolotl.loaders.model import ModelLoader

from tests.hosts.run_swift import shares_of_even


def problems(cfg, *args, **kwargs):
    return lambda example, tokenizer=None: {"prompt": example["question"], "answer": example["answer"]}


def even(completions, **kwargs):
    return shares_of_even([of if isinstance(of, str) else of[-1]["content"] for of in completions])


class OnCPU(BasePlugin):
    """Axolotl puts the model of each of several processes on a GPU of its own."""

    def __init__(self):
        super().__init__()
        as_axolotl = ModelLoader._set_device_map_config

        def on_cpu(loader):
            as_axolotl(loader)
            loader.model_kwargs["device_map"] = "cpu"

        ModelLoader._set_device_map_config = on_cpu
