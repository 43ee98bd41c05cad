"""
Runs the trainer in one and in two processes under DDP, ZeRO and FSDP2 on CPUs, and leaves what each process saw.

    python -m tests.helpers.processes FOLDER

A process of its own, not pytest's: cases are forked after the heavy imports, which spares each of them 5 s, and a
process that has already run a backward pass must not be forked.
"""

import multiprocessing
import os
import socket
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import scripted


os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
}

ZERO = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto",
    "ACCELERATE_GRADIENT_CLIPPING": "1.0",
    "ACCELERATE_CONFIG_DS_FIELDS": "",
}
BACKENDS = {
    "ddp": {},
    "zero1": {**ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"},
    "zero2": {**ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "zero3": {
        **ZERO,
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
    },
    "fsdp2": {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_OFFLOAD_PARAMS": "false",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
        "FSDP_ACTIVATION_CHECKPOINTING": "false",
        "ACCELERATE_TORCH_DEVICE": "cpu",
    },
}
AGENT_BACKENDS = ("ddp", "zero3", "fsdp2")
TRAINING, EXTRA = "the training forward", "one extra no-gradient forward"
# 12 rows a rollout on all processes together. Of 3 groups of 4, the middle one straddles two processes.
SOURCES = {
    EXTRA: {"num_generations": 4},
    TRAINING: {"num_generations": 3},
    "the no-gradient forward that GRPOTrainer runs anyway": {"num_generations": 4, "num_iterations": 2},
}
OWN_BASELINE = "tests.helpers.processes:own_baseline"


def own_baseline(group):
    """A user's: weights of a token's own energy."""
    return group.mean(group.energy + 0.1 * group.present)


@dataclass(frozen=True)
class Part:
    """What a case trains with, whatever the backend."""

    source: str
    lora: bool
    checkpointing: bool
    baseline: str = "otb"
    pictures: bool = False

    @property
    def energies_from(self) -> str:
        """`value` credits rows by themselves: where others need an extra forward, it needs none."""
        return TRAINING if self.baseline == "value" and self.source == EXTRA else self.source

    @property
    def name(self) -> str:
        kind = f"{'lora' if self.lora else 'full'}-{'gc' if self.checkpointing else 'plain'}"
        kind += f"-{list(SOURCES).index(self.source)}"
        baseline = {"otb": "", OWN_BASELINE: "-own"}.get(self.baseline, f"-{self.baseline}")
        return kind + baseline + ("-pictures" if self.pictures else "")


def pairwise() -> list[tuple[str, Part]]:
    """
    (backend, part): every two of backend, source of energies, adapter and checkpointing meet in some case. Then a
    user's own baseline, those that compare prompts, one that remembers, and a vision-language model.
    """
    cases = []
    for b, backend in enumerate(BACKENDS):
        for i, source in enumerate(SOURCES):
            lora = (b + (i == 2)) % 2 == 1
            cases.append((backend, Part(source, lora, checkpointing=(i + lora) % 2 == 1)))
    cases += [("ddp", Part(source, False, False, OWN_BASELINE)) for source in SOURCES]
    cases += [("ddp", Part(source, False, False, "ogb_pooled")) for source in SOURCES if source != TRAINING]
    cases += [("ddp", Part(TRAINING, False, False, "rloo_pooled"))]  # whole groups on every process
    for i, backend in enumerate(BACKENDS):
        cases += [(backend, Part(list(SOURCES)[i % 3], i % 2 == 1, i % 2 == 0, "value"))]
    cases += [("ddp", Part(TRAINING, False, False, "value")), ("zero3", Part(EXTRA, False, False, "value"))]
    # Where rows are shuffled with their pictures
    pictures = Part(TRAINING, lora=False, checkpointing=False, pictures=True)
    return cases + [(backend, pictures) for backend in ("ddp", "zero3")]


CASES = pairwise()


def rollout(prompts, trainer):
    """Completions that depend only on the row among all processes; the later half is three times as long."""
    import torch

    first = trainer.accelerator.process_index * len(prompts)
    ids = []
    for row in range(first, first + len(prompts)):
        g = torch.Generator().manual_seed(100 * trainer.state.global_step + row)
        length = int(torch.randint(2, 6, (1,), generator=g)) * (3 if row >= 6 else 1)
        ids.append(torch.randint(0, 256, (length,), generator=g).tolist())
    if isinstance(prompts[0], str):
        prompt_ids = [trainer.processing_class(p)["input_ids"] for p in prompts]
    else:
        prompt_ids = trainer.processing_class.apply_chat_template(
            prompts, add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None}


def fsdp_on_cpu() -> bool:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    fsdp = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if fsdp:  # accelerate turns GPU states into FSDP and never CPU ones: name this one so, over gloo
        PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    return fsdp


def case(model: str, folder: str, part: Part) -> dict:
    import torch
    from peft import LoraConfig

    from tests.helpers import tiny, tiny_vision
    from trl_otb import OTBGRPOConfig, OTBGRPOTrainer

    fsdp = fsdp_on_cpu()
    micro_batches = []

    class Recording(OTBGRPOTrainer):
        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            micro_batches.append({key: inputs[key] for key in ("rows_of_rollout", "advantages")})
            return loss

    processes = int(os.environ.get("WORLD_SIZE", 1))
    settings = {
        **tiny.SETTINGS,
        **SOURCES[part.source],
        "output_dir": folder,
        "use_cpu": not fsdp,
        "per_device_train_batch_size": 6 // processes,
        "gradient_accumulation_steps": 2,
        "max_steps": 5 if part.baseline == "value" else 3,  # which has learnt something after a few
        "beta": 0.1,
        "optim": "sgd",
        "learning_rate": 0.3,
        "gradient_checkpointing": part.checkpointing,
        "baseline": part.baseline,
        "leave_one_out": part.baseline == OWN_BASELINE,
        "max_completion_length": 32,
    }
    if "num_iterations" in SOURCES[part.source]:
        settings["gradient_accumulation_steps"] = 1
        settings["per_device_train_batch_size"] = 12 // processes
    trainer = Recording(
        model,
        tiny.even_bytes,
        args=OTBGRPOConfig(**settings),
        train_dataset=tiny_vision.prompts_with_several() if part.pictures else tiny.prompts(),
        processing_class=tiny_vision.processor("patches") if part.pictures else None,
        rollout_func=rollout,
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        if part.lora
        else None,
    )
    trainer.train()
    trainer.save_model(os.path.join(folder, "saved"))  # collective under sharding
    weight = next(p for name, p in trainer.model.named_parameters() if "q_proj" in name)
    local = weight.to_local() if hasattr(weight, "to_local") else getattr(weight, "ds_tensor", weight)
    whole = weight.ds_numel if hasattr(weight, "ds_numel") else weight.numel()
    rollouts = settings["gradient_accumulation_steps"]  # micro-batches of the first rollout
    rows = torch.cat([b["rows_of_rollout"] for b in micro_batches[:rollouts]])
    advantages = [b["advantages"].view(len(b["rows_of_rollout"]), -1) for b in micro_batches[:rollouts]]
    longest = max(a.size(1) for a in advantages)
    padded = [torch.nn.functional.pad(a, (0, longest - a.size(1))) for a in advantages]
    return {
        "processes": trainer.accelerator.num_processes,
        "distributed_type": str(trainer.accelerator.distributed_type),
        "share_held": local.numel() / whole,
        "advantages": torch.cat(padded)[rows.argsort()],
        "metrics": [
            {k: v for k, v in h.items() if k.startswith("otb/")}
            for h in trainer.state.log_history
            if "otb/grad_power" in h
        ],
        "source": trainer.energy_source,
        "state": trainer.state_to_save() if trainer.keeps_state else None,
    }


# Turns of 12 completions: those of the first of two processes have up to five, of the second none but one a second
# one.
AGENT_TURNS = [scripted.TURNS[i] for i in (7, 0, 1, 3, 6, 2, 1, 2, 6, 1, 1, 2)]


def agent_case(model: str, folder: str) -> dict:
    import pytest
    from datasets import Dataset
    from trl_otb.display.group import places

    from tests.helpers import tiny
    from trl_otb import OTBGRPOConfig, OTBGRPOTrainer

    fsdp = fsdp_on_cpu()

    class Recording(OTBGRPOTrainer):
        advantages = None

        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            if self.advantages is None:
                self.advantages = inputs["advantages"][inputs["rows_of_rollout"].argsort()]
            return loss

    def progress(completions, completion_ids, **kwargs):
        """One reward per turn where there are several, and so on one process only; else a number."""
        turns = [[0.1 * len(m["content"]) for m in c if m["role"] == "assistant"] for c in completions]
        return [t if len(t) > 2 else sum(t) for t in turns]

    rows = 12 // int(os.environ.get("WORLD_SIZE", 1))
    settings = {
        **tiny.SETTINGS,
        "output_dir": folder,
        "use_cpu": not fsdp,
        "per_device_train_batch_size": rows,
        "num_generations": 4,
        "generation_kwargs": {"max_new_tokens": 3},
        "max_completion_length": 400,
        "optim": "sgd",
    }
    prompts = [[{"role": "user", "content": f"{i}+3?"}] for i in range(6)]
    with pytest.MonkeyPatch.context() as patch:
        scripted.script_turns(patch, AGENT_TURNS, lambda trainer: trainer.accelerator.process_index * rows)
        trainer = Recording(
            model,
            progress,
            args=OTBGRPOConfig(**settings),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            tools=scripted.TOOLS,
        )
        trainer.train()
    trainer.save_model(os.path.join(folder, "saved"))
    return {
        "processes": trainer.accelerator.num_processes,
        "advantages": trainer.advantages,
        "places": [of_rows.tolist() for of_rows in places(trainer.rollouts["train"])],
        "reward": [h["reward"] for h in trainer.state.log_history if "reward" in h],
    }


def noise_case(model: str, folder: str) -> dict:
    """Four parts of one group each: four micro-batches of one process, or two of each of two."""
    from tests.helpers import tiny
    from trl_otb import GradientNoiseCallback, OTBGRPOConfig, OTBGRPOTrainer

    meter = GradientNoiseCallback()
    settings = {
        **tiny.SETTINGS,
        "output_dir": folder,
        "per_device_train_batch_size": 3,
        "num_generations": 3,
        "gradient_accumulation_steps": 4 // int(os.environ.get("WORLD_SIZE", 1)),
        "max_completion_length": 32,
        "max_grad_norm": 0.05,  # clips
        "optim": "sgd",
        "learning_rate": 0.3,
        "max_steps": 4,
    }
    trainer = OTBGRPOTrainer(
        model,
        tiny.even_bytes,
        args=OTBGRPOConfig(**settings),
        train_dataset=tiny.prompts(),
        rollout_func=rollout,
        callbacks=[meter],
    )
    trainer.train()
    return {
        "processes": trainer.accelerator.num_processes,
        "averages": meter._averages,
        "batch_over_scale": [h.get("noise/batch_over_scale") for h in trainer.state.log_history],
        "grad_norm": [h["grad_norm"] for h in trainer.state.log_history if "grad_norm" in h],
    }


def compare_case(model: str, folder: str) -> dict:
    """Five prompts, which two processes cannot share evenly; kept by the first process, read again by all."""
    from tests.helpers import tiny
    from trl_otb import OTBGRPOConfig, OTBGRPOTrainer, compare_baselines

    rows = 12 // int(os.environ.get("WORLD_SIZE", 1))
    settings = {**tiny.SETTINGS, "output_dir": folder, "per_device_train_batch_size": rows, "num_generations": 3}
    trainer = OTBGRPOTrainer(
        model,
        tiny.even_bytes,
        args=OTBGRPOConfig(**settings, per_device_eval_batch_size=24),
        train_dataset=tiny.prompts(),
    )
    options = {"num_prompts": 5, "completions_per_prompt": 24, "group_sizes": [3], "baselines": ["otb", "ogb_pooled"]}
    noise = os.path.join(folder, "noise")
    report = compare_baselines(trainer, output_dir=noise, **options)
    again = compare_baselines(trainer, output_dir=noise, **options)  # nothing is left to measure
    try:
        compare_baselines(trainer, output_dir=noise, seed=1, **options)
        refused = ""
    except ValueError as error:
        refused = str(error)
    return {
        "processes": trainer.accelerator.num_processes,
        "report": report.to_json(),
        "again": again.to_json(),
        "refused": refused,
        "files": sorted(name for name in os.listdir(noise) if name.startswith("prompt-")),
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


def launch(folder: Path, name: str, world: int, env: dict, run, model: str, *part: Part) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("fork")
    arguments = (model, str(folder / name), *part)
    processes = [
        context.Process(target=_process, args=(rank, world, port, env, run, arguments, folder / f"{name}.{rank}.pt"))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
        if process.is_alive():
            process.kill()


def main(folder: Path) -> None:
    import deepspeed.ops
    import torch
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401
    import trl.trainer.grpo_trainer  # noqa: F401

    from tests.helpers import tiny, tiny_vision
    from trl_otb import OTBGRPOTrainer  # noqa: F401

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled for a minute, and is not needed
    torch.set_num_threads(1)
    model = tiny.save_model(folder / "model")
    models = {False: model, True: tiny_vision.save_model(folder / "pictures", "patches")}
    for part in dict.fromkeys(part for _, part in CASES):
        launch(folder, f"single-{part.name}", 1, {}, case, models[part.pictures], part)
    for backend, part in CASES:
        launch(folder, f"{backend}-{part.name}", 2, BACKENDS[backend], case, models[part.pictures], part)
    launch(folder, "agent-single", 1, {}, agent_case, model)
    for backend in AGENT_BACKENDS:
        launch(folder, f"agent-{backend}", 2, BACKENDS[backend], agent_case, model)
    launch(folder, "noise-single", 1, {}, noise_case, model)
    launch(folder, "noise-ddp", 2, {}, noise_case, model)
    launch(folder, "compare-single", 1, {}, compare_case, model)
    for backend in ("ddp", "zero2", "zero3"):
        launch(folder, f"compare-{backend}", 2, BACKENDS[backend], compare_case, model)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
