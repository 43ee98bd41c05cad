"""vllm_on_cpu.py beside this file, the only check against a real vLLM, with a server that is a copy of the policy."""

import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import requests
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from trl.generation import vllm_client, vllm_generation

from recipes import math as math_recipe
from tests.helpers import tiny
from tests.helpers.settings import logged
from tests.trainer import vllm_on_cpu
from trl_otb import OTBGRPOConfig


URL = f"http://{vllm_on_cpu.HOST}:{vllm_on_cpu.PORT}"


class Server:
    """Samples token by token from the checkpoint in `folder`, and reads its weights again when it is asked to."""

    def __init__(self, folder):
        self.folder, self.reloads = folder, 0
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def post(self, url, json=None):
        assert (url, json) == (f"{URL}/collective_rpc", {"method": "reload_weights"})
        weights = load_file(self.folder / "model.safetensors")
        assert set(weights) == set(dict(self.model.named_parameters()))
        self.model.load_state_dict(weights)
        self.reloads += 1
        response = requests.Response()
        response.status_code = 200
        return response

    @torch.no_grad()
    def complete(self, prompt, temperature, max_tokens):
        ids, logprobs = list(prompt), []
        while len(logprobs) < max_tokens and (not logprobs or ids[-1] != self.model.config.eos_token_id):
            logps = (self.model(torch.tensor([ids])).logits[0, -1] / temperature).log_softmax(-1)
            ids.append(int(logps.exp().multinomial(1)))
            logprobs.append([logps[ids[-1]].item()])
        return ids[len(prompt) :], logprobs


@pytest.fixture
def server(tmp_path, model_path, monkeypatch):
    """In the place of the client's transport; what the recipe puts into the client is undone afterwards."""
    folder = tmp_path / "served"
    shutil.copytree(model_path, folder)
    server = Server(folder)
    client = vllm_client.VLLMClient

    def generate(self, prompts, features=None, n=1, temperature=1.0, max_tokens=16, logprobs=0, **sampling):
        assert features is None and logprobs == 0 and sampling["top_p"] == 1.0
        found = [server.complete(prompt, temperature, max_tokens) for prompt in prompts for _ in range(n)]
        ids, logps = map(list, zip(*found, strict=True))
        return {"prompt_ids": prompts, "completion_ids": ids, "logprobs": logps}

    def get(self, url, **kwargs):
        return {"data": [{"id": str(folder)}]}

    info = {"model_config": {"logprobs_mode": "processed_logprobs"}, "weight_transfer_config": None}
    monkeypatch.setattr(client, "check_server", lambda self, *args: None)
    monkeypatch.setattr(client, "_get", get)
    monkeypatch.setattr(client, "get_server_info", lambda self: info)
    monkeypatch.setattr(client, "reset_prefix_cache", lambda self: None)
    monkeypatch.setattr(client, "generate", generate)
    for name in ("init_communicator", "_start_weight_update", "_finish_weight_update", "update_named_params"):
        monkeypatch.setattr(client, name, getattr(client, name))
    for module in (vllm_client, vllm_generation):
        monkeypatch.setattr(module, "is_vllm_available", lambda *args, **kwargs: True)
    monkeypatch.setattr(vllm_on_cpu, "SERVED", folder)
    monkeypatch.setattr(vllm_on_cpu.requests, "post", server.post)
    monkeypatch.setattr(math_recipe, "OTBGRPOTrainer", math_recipe.OTBGRPOTrainer)
    return server


def test_vllm_check_shows_what_it_promises(server, model_path, tmp_path, monkeypatch, capsys):
    trainers = []

    def main(argv):
        """The recipe's, without its problems."""
        given = dict(zip(argv[::2], argv[1::2], strict=True))
        assert given["--vllm_server_base_url"] == URL and given["--max_steps"] == "2"
        assert Path(given["--config"]).is_file()
        args = OTBGRPOConfig(
            **tiny.SETTINGS | {"max_steps": 2, "temperature": 0.9, "output_dir": str(tmp_path)},
            use_vllm=given["--use_vllm"] == "true",
            vllm_mode=given["--vllm_mode"],
            vllm_server_base_url=given["--vllm_server_base_url"],
        )
        trainer = math_recipe.OTBGRPOTrainer(model_path, tiny.even_bytes, args=args, train_dataset=tiny.prompts())
        trainers.append(trainer)
        trainer.train()

    monkeypatch.setattr(math_recipe, "main", main)
    vllm_on_cpu.train(["--max_steps", "2"])
    (trainer,) = trainers
    out = capsys.readouterr().out
    # TRL's own forward yields energies, and after an update the server samples from the policy as it is
    assert "In 2 steps 2 forwards without gradient, 2 with; energies come from the no-gradient forward that" in out
    assert server.reloads >= 2
    assert max(map(float, logged(trainer, "sampling/sampling_logp_difference/max"))) < 1e-3
    weights = dict(trainer.model.named_parameters())
    assert any(not torch.equal(p, weights[name]) for name, p in server.model.named_parameters())  # one update later
    for line in ("reward", "otb/energy/token_mean", "sampling/importance_sampling_ratio/max"):
        assert f"\n{line}: " in f"\n{out}"


def test_vllm_check_names_own_commands():
    commands = re.findall(r"python -m (\S+) (\w+)", vllm_on_cpu.__doc__)
    assert commands == [(vllm_on_cpu.__name__, verb) for verb in ("prepare", "serve", "train", "train_async")]
    command = [sys.executable, "-m", vllm_on_cpu.__name__, "help"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.endswith(
        "vllm_on_cpu.py: error: say prepare, serve, train or train_async.\n"
    )


def test_stubbed_client_takes_same_arguments():
    replaced = {}

    class Client:
        def __setattr__(self, name, value):
            replaced[name] = value

    vllm_on_cpu.reload_instead_of_nccl(Client())
    for name, function in replaced.items():
        original = inspect.signature(getattr(vllm_client.VLLMClient, name))
        assert list(inspect.signature(function).parameters) == list(original.parameters), name
