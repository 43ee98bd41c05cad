"""
What stands beside TRL's asynchronous trainer, in its own process: no GPU, vLLM server, HTTP or flash-attention.

    worker = LocalWorker(model, args, dataset, [reward], tokenizer, steps_ahead=4)
    with on_cpu():
        AsyncOTBGRPOTrainer(model, args=args, …, rollout_worker=worker, weight_transfer=worker).train()

For trying, testing and studying: prompts, tools, rewards and scores of groups go through TRL's own rollout loop, but
completions are sampled when the trainer asks for them, so that a run is the same every time.
"""

import asyncio
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl.chat_template_utils import add_response_schema
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo import async_grpo_trainer as trl_trainer
from trl.experimental.async_grpo import async_rollout_worker as trl_worker
from trl.experimental.async_grpo import packing as trl_packing

from trl_otb.experimental.async_grpo.worker import stamping
from trl_otb.seam.contract import Contract


PACKAGE = "trl.experimental.async_grpo"
Contract(  # what is relied on here beside the trainer's own
    "AsyncGRPOTrainer in one process",
    parts={
        f"{PACKAGE}.async_grpo_trainer": {"get_peak_flops_per_device": ""},
        f"{PACKAGE}.async_rollout_worker:_AsyncRolloutLoop": {
            "_generate_one": "self prompt tool_dict tools",
            "_generate_one_turn": "self prompt_ids",
            "_score_group": "self group",
        },
        f"{PACKAGE}.packing": {"_flash_attn": ""},
        "trl.chat_template_utils": {"add_response_schema": "processing_class"},
    },
    attributes={},
).check()


def attention(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=None, **options) -> torch.Tensor:
    """flash-attention's: segment s of the queries, `(tokens, heads, d)`, is the end of path s of the keys."""

    def places(cu: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cu, sizes = cu.long(), cu.long().diff()
        segment = torch.arange(len(sizes)).repeat_interleave(sizes)
        return segment, cu[1:][segment] - torch.arange(int(cu[-1]))  # counted from the end

    (of_q, q_left), (of_k, k_left) = places(cu_q), places(cu_k)
    seen = (of_q[:, None] == of_k) & (k_left >= q_left[:, None])
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True)[0].transpose(0, 1)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Context in which TRL's asynchronous trainer needs no flash-attention, and no GPU whose speed is known."""
    kernel = SimpleNamespace(flash_attn_varlen_func=attention)
    with patch.object(trl_packing, "_flash_attn", lambda: kernel):
        with patch.object(trl_trainer, "get_peak_flops_per_device", lambda *args: None):
            yield


def reading_answers(tokenizer: Any) -> Any:
    """The tokenizer, with what TRL's loop parses answers by. Where TRL does not know the chat template, all is text."""
    if getattr(tokenizer, "response_template", None) is None:
        try:
            add_response_schema(tokenizer)
        except ValueError:
            text = {"close": tokenizer.eos_token, "content": "text"}
            tokenizer.response_template = {"defaults": {"role": "assistant"}, "fields": {"content": text}}
    return tokenizer


class LocalLoop(trl_worker._AsyncRolloutLoop):
    """TRL's rollout loop, whose tokens come from a policy in this process."""

    def __init__(self, policy: Any, seed: int, **options: Any) -> None:
        shared = SimpleNamespace(value=0)
        self.policy, self.seed, self.waiting = policy, seed, []
        super().__init__(
            rollout_buffer=queue.Queue(),
            metrics_queue=queue.Queue(),
            model_version_value=shared,
            heartbeat_value=SimpleNamespace(value=0.0),
            failed_event=None,
            exception_info_queue=None,
            **options,
        )

    async def groups(self, first: int, rows: list[dict[str, Any]]) -> list[list[trl_worker.RolloutSample]]:
        """Sample and score a group for each row, numbered from `first`."""
        n, scored = self.num_generations, []
        tools = {tool.__name__: tool for tool in self.tools}
        tasks = [
            asyncio.create_task(self._generate_one(row["prompt"], tools, self.tools)) for row in rows for _ in range(n)
        ]
        while open_ones := [task for task in tasks if not task.done()]:
            if len(self.waiting) == len(open_ones):  # so that batches do not depend on how long tools take
                self.sample()
            await asyncio.sleep(0 if self.waiting else 0.001)
        for i, row in enumerate(rows):
            completions, ids, sequences, calls, failures, rewards = zip(
                *(task.result() for task in tasks[i * n : (i + 1) * n]), strict=True
            )
            group = trl_worker.RolloutGroup(
                [row["prompt"]] * n,
                {key: [value] * n for key, value in row.items() if key != "prompt"},
                *([*values] for values in (completions, ids, sequences, calls, failures)),
                model_version=self.model_version,
                group_id=first + i,
                env_rewards=[None] * n,
                rollout_rewards=[*rewards],
            )
            scored.append(await self._score_group(group))
        return scored

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append((prompt_ids, answer))
        return await answer

    @torch.no_grad()
    def sample(self) -> None:
        """Continue the prompts that wait, and answer with ids and log-probs."""
        waiting, self.waiting = sorted(self.waiting, key=lambda one: one[0]), []
        padded = self.tokenizer.pad(
            {"input_ids": [ids for ids, _ in waiting]}, padding_side="left", return_tensors="pt"
        )
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            self.seed += 1
            found = self.policy.generate(
                **padded.to(self.policy.device),
                do_sample=True,
                max_new_tokens=self.max_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                eos_token_id=self.eos_token_ids,
                pad_token_id=self.tokenizer.pad_token_id,
                output_scores=True,
                return_dict_in_generate=True,
            )
        ids = found.sequences[:, padded["input_ids"].size(1) :]
        logps = torch.stack(found.scores, dim=1).float().log_softmax(-1).gather(2, ids.unsqueeze(2)).squeeze(2)
        ended = torch.isin(ids, torch.tensor(self.eos_token_ids, device=ids.device))
        lengths = (ended.cumsum(1) - ended.long() == 0).sum(1).tolist()
        for (_, answer), own, of, length in zip(waiting, ids.tolist(), logps.tolist(), lengths, strict=True):
            answer.set_result((own[:length], of[:length]))


class LocalWorker:
    """
    A rollout worker and a weight transfer for [`AsyncOTBGRPOTrainer`] and TRL's trainer.

    Args:
        model: Folder or id of the policy.
        args: The trainer's. Without a `token_budget` it becomes 0: micro-batches of a fixed number of completions.
        dataset: Prompts as conversations, and what rewards read. Groups take rows in order.
        reward_funcs, tools: As for the trainer.
        processing_class: The tokenizer.
        steps_ahead: Samples are kept ready for so many optimizer steps: every sample is as many weight versions old
            when it is taken.
    """

    def __init__(
        self,
        model: str,
        args: AsyncGRPOConfig,
        dataset: Dataset,
        reward_funcs: list[Callable],
        processing_class: Any,
        *,
        tools: list[Callable] | None = None,
        steps_ahead: int = 0,
    ) -> None:
        if args.token_budget is None:
            args.token_budget = 0  # there is no server to ask for one
        dtype = (args.model_init_kwargs or {}).get("dtype", args.dtype)  # as the trainer's
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        ends = policy.generation_config.eos_token_id
        ends = {processing_class.eos_token_id, *([ends] if isinstance(ends, int) else ends or [])}
        reading_answers(processing_class)
        loop = LocalLoop(
            policy,
            args.seed,
            model_name=model,
            dataset=dataset,
            reward_funcs=reward_funcs,
            processing_class=processing_class,
            eos_token_ids=[*ends],
            tools=tools,
            num_generations=args.num_generations,
            max_tokens=args.max_completion_length,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
            max_tool_calling_iterations=args.max_tool_calling_iterations,
            fork_threshold_tokens=args.fork_threshold_tokens,
            chat_template_kwargs=args.chat_template_kwargs,
        )
        self.loop = stamping(loop)
        step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        self.groups_at_once, self.ready = max(step // args.num_generations, 1), steps_ahead * step
        self.groups_made = 0
        self.rollout_buffer, self.metrics_queue = self, self.loop._metrics_queue

    # The buffer

    def qsize(self) -> int:
        return self.loop.rollout_buffer.qsize()

    def get(self, timeout: float | None = None) -> trl_worker.RolloutSample:
        while self.qsize() <= self.ready:
            numbers = range(self.groups_made, self.groups_made + self.groups_at_once)
            rows = [self.loop.dataset[number % len(self.loop.dataset)] for number in numbers]
            self.groups_made += len(rows)
            for group in self.groups_of(rows, numbers[0]):
                for sample in group:
                    self.loop.rollout_buffer.put_nowait(sample)
        return self.loop.rollout_buffer.get_nowait()

    def groups_of(self, rows: list[dict[str, Any]], first: int = 0) -> list[list[trl_worker.RolloutSample]]:
        """Samples of a group for each row, from the latest weights."""
        return self.loop._loop.run_until_complete(self.loop.groups(first, rows))

    # The worker and the transfer

    def update_model_version(self, model_version: int) -> None:
        self.loop._model_version_value.value = model_version

    @torch.no_grad()
    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.loop.policy.named_parameters())
        for name, tensor in iterator:
            own[name].copy_(tensor)

    def check_health(self, stale_after_s: float) -> None:
        pass

    def init_weight_transfer(self) -> None:
        pass

    start = stop = pause = resume = destroy = init_weight_transfer
