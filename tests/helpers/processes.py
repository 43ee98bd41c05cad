"""
Runs the trainer in one and in two processes under DDP, ZeRO and FSDP2 on CPUs, and leaves what each process saw.

    python -m tests.helpers.processes FOLDER

A process of its own, not pytest's: cases are forked after the heavy imports, which spares each of them 5 s, and a
process that has already run a backward pass must not be forked.
"""

import multiprocessing
import os
import signal
import socket
import sys
import traceback
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from tests.helpers import cheaper, scripted


os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
os.environ["DS_ACCELERATOR"] = "cpu"


def deepspeed(stage: int, **more: str) -> dict[str, str]:
    auto = {"GRADIENT_ACCUMULATION_STEPS": "auto", "GRADIENT_CLIPPING": "1.0", "CONFIG_DS_FIELDS": ""}
    of_stage = {"USE_DEEPSPEED": "true", "MIXED_PRECISION": "no", "DEEPSPEED_ZERO_STAGE": str(stage)}
    return {f"ACCELERATE_{name}": value for name, value in (auto | of_stage | more).items()}


FSDP = {"VERSION": "2", "AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "RESHARD_AFTER_FORWARD": "true"}
FSDP |= {"OFFLOAD_PARAMS": "false", "STATE_DICT_TYPE": "FULL_STATE_DICT"}
FSDP |= {"CPU_RAM_EFFICIENT_LOADING": "false", "ACTIVATION_CHECKPOINTING": "false"}
BACKENDS = {
    "ddp": {},
    "zero1": deepspeed(1),
    "zero2": deepspeed(2),
    "zero3": deepspeed(3, DEEPSPEED_ZERO3_INIT="true", DEEPSPEED_ZERO3_SAVE_16BIT_MODEL="true"),
    "fsdp2": {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}
    | {f"FSDP_{name}": value for name, value in FSDP.items()},
}
AGENT_BACKENDS = ("ddp", "zero3", "fsdp2")
ASYNC_BACKENDS = ("ddp", "zero2", "fsdp2")  # under ZeRO-3 TRL's asynchronous trainer sends a server parts of weights
SAMPLED, EXTRA = "the forwards that sampled", "one extra no-gradient forward"
# 12 rows a rollout on all processes together. Of 3 groups of 4, the middle one straddles two processes.
SOURCES = {
    EXTRA: {"num_generations": 4},
    SAMPLED: {"num_generations": 3},
    "the no-gradient forward that GRPOTrainer runs anyway": {"num_generations": 4, "num_iterations": 2},
}
OWN_BASELINE = "tests.helpers.processes:own_baseline"


def own_baseline(x):
    """A user's: weights of a token's own energy."""
    return x.mean(x.energy + 0.1 * x.mask, leave_one_out=True)


@dataclass(frozen=True)
class Part:
    """What a case trains with, whatever the backend."""

    source: str
    lora: bool
    checkpointing: bool
    baseline: str = "otb"
    pictures: bool = False
    one: bool = False  # completion per prompt
    scale_rewards: str = "none"
    progress: bool = False  # functions of the text so far

    @property
    def energies_from(self) -> str | None:
        """Some need none, and have those that cost nothing."""
        free = self.source not in (SAMPLED, EXTRA)
        return self.source if free or self.baseline not in ("rloo_pooled", "group_mean") else None

    @property
    def name(self) -> str:
        flags = [flag for flag in ("lora", "checkpointing", "pictures", "one", "progress") if getattr(self, flag)]
        name = self.baseline.rpartition(":")[2]
        return "-".join([name, str([*SOURCES].index(self.source)), *flags, self.scale_rewards])


def pairwise() -> list[tuple[str, Part]]:
    """
    (backend, part): every two of backend, source of energies, adapter and checkpointing meet in some case, but for
    ZeRO-1 and ZeRO-2, of which there is one case each. Then a user's own baseline, those that compare prompts, one that
    learns, the running scale, and a vision-language model, whose rows are shuffled with their pictures.
    """
    cases = []
    for b, backend in enumerate(("ddp", "zero3", "fsdp2")):
        for i, source in enumerate(SOURCES):
            lora = (b + (i == 2)) % 2 == 1
            cases.append((backend, Part(source, lora, checkpointing=(i + lora) % 2 == 1)))
    for i, backend in enumerate(BACKENDS):
        cases += [(backend, Part(list(SOURCES)[i % 3], i % 2 == 1, i % 2 == 0, "value"))]
    cases += [("ddp", Part(SAMPLED, False, False, name)) for name in (OWN_BASELINE, "ogb_pooled", "rloo_pooled")]
    others = ({"one": True}, {"scale_rewards": "running"}, {"baseline": "otb", "pictures": True}, {"progress": True})
    cases += [("ddp", Part(SAMPLED, False, False, **{"baseline": "value"} | other)) for other in others]
    return [*cases, ("zero3", Part(SAMPLED, False, False, "value", one=True))]


CASES = pairwise()


def script(step: int, row: int) -> list[int]:
    """The completion of a row among all processes; those of the later half are three times as long."""
    import torch

    g = torch.Generator().manual_seed(100 * step + row)
    length = int(torch.randint(2, 6, (1,), generator=g)) * (3 if row >= 6 else 1)
    return torch.randint(0, 256, (length,), generator=g).tolist()


def rollout(prompts, trainer):
    """The script, sampled elsewhere."""
    first = trainer.accelerator.process_index * len(prompts)
    ids = [script(trainer.state.global_step, first + i) for i in range(len(prompts))]
    return {"prompt_ids": trainer.processing_class(prompts)["input_ids"], "completion_ids": ids, "logprobs": None}


@contextmanager
def sampling_the_script(trainer):
    """Lets `generate` draw the script's tokens, then the one that ends a completion."""
    import torch

    drawn = 0

    def draw(probs, num_samples):
        nonlocal drawn
        first, end, tokens = trainer.accelerator.process_index * len(probs), trainer._tokenizer.eos_token_id, []
        for row in range(first, first + len(probs)):
            ids = script(trainer.state.global_step, row)
            tokens.append([ids[drawn] if drawn < len(ids) else end])
        drawn += 1
        return torch.tensor(tokens)

    with patch.object(torch, "multinomial", draw):
        yield


def fsdp_on_cpu() -> bool:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    fsdp = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if fsdp:  # accelerate turns GPU states into FSDP and never CPU ones: name this one so, over gloo
        PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    return fsdp


def settings_of(folder: str, rows: int, fsdp: bool = False, **options) -> dict:
    """Of a config; `rows` are those of a micro-batch on all processes together."""
    from tests.helpers import tiny

    options = {"optim": "sgd", "learning_rate": 0.3, **options}
    rows //= int(os.environ.get("WORLD_SIZE", 1))
    return {**tiny.SETTINGS, "output_dir": folder, "use_cpu": not fsdp, "per_device_train_batch_size": rows, **options}


def case(model: str, folder: str, part: Part) -> dict:
    from tests.helpers import tiny, tiny_vision
    from tests.helpers.settings import LORA
    from trl_otb import OTBGRPOConfig, OTBGRPOTrainer
    from trl_otb.seam.forwards import extra_forward

    fsdp, differences, first = fsdp_on_cpu(), [], {}

    class Recording(OTBGRPOTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            with sampling_the_script(self):
                return super()._generate_single_turn(*args, **kwargs)

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            if part.energies_from == SAMPLED:
                mine = self.rollouts["train"]
                difference = (mine.energy - extra_forward(self, batch, False).energy) * mine.mask
                differences.append(difference.abs().max().item())
            first.setdefault("advantages", batch["advantages"].view(len(batch["advantages"]), -1))
            first.setdefault("energy", self.rollouts["train"].energy)
            return batch

    reused = "num_iterations" in SOURCES[part.source]
    options = {**SOURCES[part.source], **({"num_generations": 1} if part.one else {})}
    settings = settings_of(
        folder,
        12 if reused else 6,
        fsdp,
        gradient_accumulation_steps=1 if reused else 2,
        max_steps=5 if part.baseline == "value" else 3,  # which has learned something after a few
        beta=0.1,
        gradient_checkpointing=part.checkpointing,
        baseline=part.baseline,
        scale_rewards=part.scale_rewards,
        max_completion_length=32,
        **options,
    )
    trainer = Recording(
        model,
        tiny.even_bytes,
        args=OTBGRPOConfig(**settings),
        train_dataset=tiny_vision.prompts_with_several() if part.pictures else tiny.prompts(24 if part.one else 8),
        processing_class=tiny_vision.processor("patches") if part.pictures else None,
        rollout_func=None if part.source == SAMPLED else rollout,
        peft_config=LORA if part.lora else None,
        progress_funcs="rewards" if part.progress else None,
    )
    trainer.train()
    trainer.save_model(os.path.join(folder, "saved"))  # collective under sharding
    weight = next(p for name, p in trainer.model.named_parameters() if "q_proj" in name)
    local = weight.to_local() if hasattr(weight, "to_local") else getattr(weight, "ds_tensor", weight)
    whole = weight.ds_numel if hasattr(weight, "ds_numel") else weight.numel()
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    return {
        **first,
        "processes": trainer.accelerator.num_processes,
        "distributed_type": str(trainer.accelerator.distributed_type),
        "share_held": local.numel() / whole,
        # But for times
        "metrics": [{k: v for k, v in of.items() if k.startswith("otb/") and "time" not in k} for of in log],
        "source": trainer.energy_source,
        "differences": differences,
        "state": trainer.baseline.state_dict()["state"] if trainer.baseline.entry.learns else None,
    }


# Of 12 completions: those of the first of two processes take up to five turns, of the second one or two
AGENT_TURNS = [scripted.TURNS[i] for i in (7, 0, 1, 3, 6, 2, 1, 2, 6, 1, 1, 2)]


def agent_case(model: str, folder: str) -> dict:
    import pytest
    from datasets import Dataset

    from tests.helpers.recording import Recording
    from trl_otb import OTBGRPOConfig

    fsdp = fsdp_on_cpu()

    def progress(completions, completion_ids, **kwargs):
        """One reward per turn where there are several, and so on one process only; else a number."""
        turns = [[0.1 * len(m["content"]) for m in c if m["role"] == "assistant"] for c in completions]
        return [t if len(t) > 2 else sum(t) for t in turns]

    options = {
        "generation_kwargs": {"max_new_tokens": 3},
        "max_completion_length": 400,
        "learning_rate": 1e-2,
        "max_steps": 1,
    }
    settings = settings_of(folder, 12, fsdp, **options)
    rows = settings["per_device_train_batch_size"]
    prompts = [[{"role": "user", "content": f"{i}+3?"}] for i in range(6)]
    data, args = Dataset.from_dict({"prompt": prompts}), OTBGRPOConfig(**settings)
    with pytest.MonkeyPatch.context() as patched:
        scripted.script_turns(patched, AGENT_TURNS, lambda trainer: trainer.accelerator.process_index * rows)
        trainer = Recording(model, progress, args=args, train_dataset=data, tools=scripted.TOOLS)
        trainer.train()
    trainer.save_model(os.path.join(folder, "saved"))
    return {
        "processes": trainer.accelerator.num_processes,
        "advantages": trainer.batches[0]["advantages"],
        "reward": [h["reward"] for h in trainer.state.log_history if "reward" in h],
    }


def trainer_of(model: str, folder: str, reward, **options):
    from tests.helpers import tiny
    from trl_otb import OTBGRPOConfig, OTBGRPOTrainer

    args = OTBGRPOConfig(**settings_of(folder, 12, num_generations=3, **options))
    return OTBGRPOTrainer(model, reward, args=args, train_dataset=tiny.prompts())


def compare_case(model: str, folder: str) -> dict:
    """Five prompts, which two processes cannot share evenly."""
    from tests.helpers import tiny
    from trl_otb import compare_baselines
    from trl_otb.comparison import moments

    trainer = trainer_of(model, folder, tiny.even_bytes, per_device_eval_batch_size=24)
    names = ["otb", "ogb_pooled", "value"]
    moments.BATCH_PARTITIONS = 1  # for speed
    report = compare_baselines(trainer, names, num_prompts=5, completions_per_prompt=24, group_sizes=[3])
    return {"processes": trainer.accelerator.num_processes, "report": report.to_json()}


def async_case(model: str, folder: str) -> dict:
    """Steps of 24 samples, packed into a row for each process; groups of 4 are cut by micro-batches of 6."""
    from datasets import Dataset

    from recipes.toy.local_rollouts import LocalWorker, on_cpu
    from tests.helpers import tiny
    from trl_otb import AsyncOTBGRPOConfig, AsyncOTBGRPOTrainer

    options = {"max_steps": 4, "max_staleness": 4, "gradient_accumulation_steps": 4, "token_budget": 0}
    settings = settings_of(folder, 6, **options)
    args, tokenizer = AsyncOTBGRPOConfig(**settings), tiny.tokenizer()
    prompts = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i}+{i}="}]} for i in range(30)])
    worker = LocalWorker(model, args, prompts, [tiny.even_bytes], tokenizer)
    with on_cpu():
        data = {"train_dataset": prompts, "rollout_worker": worker, "weight_transfer": worker}
        trainer = AsyncOTBGRPOTrainer(model, args=args, processing_class=tokenizer, **data)
        trainer.train()
    trainer.save_model(os.path.join(folder, "saved"))
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    metrics = [{k: v for k, v in entry.items() if "otb/" in k or k == "kl"} for entry in log]
    return {
        "processes": trainer.accelerator.num_processes,
        "state": trainer.baseline.state_dict()["state"],
        "metrics": metrics,
    }


def failing_case(model: str, folder: str) -> dict:
    """A reward that one process alone refuses."""

    def reward(completion_ids, **kwargs):
        broken = os.environ["RANK"] == "1"
        return [float("inf") if broken else 0.0 for _ in completion_ids]

    trainer_of(model, folder, reward).train()
    return {}


def short_policy() -> Path:
    from recipes.toy import warm_start

    return warm_start.policy("sums", 20)


def stopping(completions, trainer_state, **kwargs):
    """A reward that sends SIGINT to the process STOPPED in the second step."""
    if os.environ["RANK"] == os.environ.get("STOPPED") and trainer_state.global_step == 1:
        os.kill(os.getpid(), signal.SIGINT)
    return [0.0] * len(completions)


def recipe_case(model: str, folder: str, output: str, *flags: str) -> dict:
    """recipes/math.py, whose policy is made first; SIGINT may reach one process in the second step."""
    from recipes import math as recipe
    from tests.recipes.conftest import SMALL

    signal.signal(signal.SIGINT, signal.default_int_handler)  # which whoever started the tests may ignore
    own = "--max_steps 3 --per_device_train_batch_size 12 --num_generations 8 --gradient_accumulation_steps 2 "
    own += "--per_device_eval_batch_size 20 --model_name_or_path tests.helpers.processes:short_policy "
    own += "--reward_funcs tests.helpers.processes:stopping --reward_weights 1 0 --output_dir"
    global trained  # until the process ends: to free DDP waits for gloo's thread, which may wait for Python's lock
    trained = recipe.main([*SMALL, *own.split(), str(Path(folder).with_name(output)), *flags])
    return {}


KINDS = {
    "agent": (agent_case, AGENT_BACKENDS),
    "compare": (compare_case, ("ddp", "zero3")),
    "async": (async_case, ASYNC_BACKENDS),
}


def _process(rank: int, world: int, port: int, env: dict, run, arguments: tuple, result: Path) -> None:
    import torch

    os.environ |= env
    if world > 1:
        addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(world)}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), **addresses}
    log = os.open(result.with_suffix(".log"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        torch.save(run(*arguments), result)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads can abort the interpreter's teardown after a good run


def launch(folder: Path, name: str, world: int, env: dict, run, model: str, *more: Part | str) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("fork")
    arguments = (model, str(folder / name), *more)
    processes = [
        context.Process(target=_process, args=(rank, world, port, env, run, arguments, folder / f"{name}.{rank}.pt"))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=900)  # a process that hangs, however busy the machine
        if process.is_alive():
            process.kill()
            process.join()
    (folder / f"{name}.codes").write_text(" ".join(str(process.exitcode) for process in processes))


def main(folder: Path) -> None:
    import deepspeed.ops
    import pytest  # noqa: F401
    import reasoning_gym  # noqa: F401
    import torch
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401
    import trl.trainer.grpo_trainer  # noqa: F401

    import recipes.math  # noqa: F401
    from tests.helpers import settings, tiny, tiny_vision  # noqa: F401
    from trl_otb import OTBGRPOTrainer  # noqa: F401
    from trl_otb.seam.parts import GRPO

    with suppress(ImportError):  # where its parts of TRL have moved
        from trl_otb import AsyncOTBGRPOTrainer  # noqa: F401

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled for a minute, and is not needed
    torch.set_num_threads(1)
    GRPO.sources()  # hashed once a process
    cheaper.package_search()
    cheaper.seeds_of_absent_devices()
    cheaper.search_for_garbage()  # which would copy the pages of these modules, too
    model = tiny.save_model(folder / "model")
    models = {False: model, True: tiny_vision.save_model(folder / "pictures", "patches")}
    for part in dict.fromkeys(part for _, part in CASES):
        launch(folder, f"single-{part.name}", 1, {}, case, models[part.pictures], part)
    for backend, part in CASES:
        launch(folder, f"{backend}-{part.name}", 2, BACKENDS[backend], case, models[part.pictures], part)
    for kind, (function, backends) in KINDS.items():
        launch(folder, f"{kind}-single", 1, {}, function, model)
        for backend in backends:
            launch(folder, f"{kind}-{backend}", 2, BACKENDS[backend], function, model)
    cache = {"TRL_OTB_CACHE": str(folder / "cache")}
    launch(folder, "recipe-whole", 2, cache, recipe_case, model, "whole")
    launch(folder, "recipe-stopped", 2, cache | {"STOPPED": "1"}, recipe_case, model, "stopped")
    launch(folder, "recipe-resumed", 2, cache, recipe_case, model, "stopped", "--resume_from_checkpoint", "latest")
    launch(folder, "failing", 2, BACKENDS["ddp"], failing_case, model)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
