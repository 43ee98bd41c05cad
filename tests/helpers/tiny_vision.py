"""
Tiny vision-language models, their processors and datasets with pictures, made on the spot: no hub, no torchvision.

Two layouts of `pixel_values`: Qwen2-VL's, a stretch of patches for each picture whose length is its size's, and
LLaVA's, a row for each picture.
"""

from functools import cache
from pathlib import Path

import numpy as np
import torch
import trl
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Pictures
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    ProcessorMixin,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLProcessor,
    Qwen3Config,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from . import tiny


IMAGE_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
LAYOUTS = ("patches", "rows")


class StillsProcessor(Qwen2VLProcessor):
    """Qwen2-VL's without a video processor, which would need torchvision."""

    def __init__(self, image_processor, tokenizer, chat_template=None):
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def processor(layout: str) -> ProcessorMixin:
    tokenizer = tiny.tokenizer(None)
    tokenizer.add_tokens(IMAGE_TOKENS, special_tokens=True)
    template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5_vl.jinja").read_text()
    if layout == "patches":
        size = {"shortest_edge": 64, "longest_edge": 4096}
        images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=1, size=size)
        return StillsProcessor(images, tokenizer, chat_template=template)
    side = {"height": 8, "width": 8}
    images = CLIPImageProcessorPil(size=side, crop_size=side, do_center_crop=False)
    options = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    options |= {"image_token": "<|image_pad|>", "chat_template": template}
    return LlavaProcessor(images, tokenizer, patch_size=4, **options)


def model(layout: str, seed: int = 0) -> torch.nn.Module:
    tokenizer = processor(layout).tokenizer
    text = tiny.config(vocab_size=len(tokenizer)).to_dict()
    start, end, image, video = tokenizer.convert_tokens_to_ids(IMAGE_TOKENS)
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(seed)
    if layout == "patches":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
        text |= {"model_type": "qwen2_vl_text", "rope_parameters": rope}
        vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
        vision |= {"patch_size": 4, "temporal_patch_size": 1}
        places = {"image_token_id": image, "video_token_id": video}
        places |= {"vision_start_token_id": start, "vision_end_token_id": end}
        config = Qwen2VLConfig(text_config=text, vision_config=vision, **places, **ends)
        result = Qwen2VLForConditionalGeneration(config)
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 32, "image_size": 8, "patch_size": 4, "projection_dim": 16}
        vision = CLIPVisionConfig(num_hidden_layers=2, num_attention_heads=2, **sizes)
        of_image = {"image_token_index": image, "image_seq_length": 4}
        config = LlavaConfig(vision_config=vision, text_config=Qwen3Config(**text), **of_image, **ends)
        result = LlavaForConditionalGeneration(config)
    result = result.float()
    for parameter in result.parameters():
        if parameter.dim() > 1:  # far from initialisation, so that what is seen changes what is said
            torch.nn.init.normal_(parameter, std=0.15)
    torch.nn.init.normal_(result.get_output_embeddings().weight, std=0.5)
    return result


def save_model(folder, layout: str) -> str:
    model(layout).save_pretrained(folder)
    return str(folder)


def given(layout: str, model: str, dataset: Dataset) -> dict:
    """Arguments of a trainer and a config. Tokens that a model takes for places of pictures are not to be sampled."""
    own = processor(layout)
    suppressed = {"suppress_tokens": own.tokenizer.convert_tokens_to_ids(IMAGE_TOKENS)}
    return {"model": model, "processing_class": own, "train_dataset": dataset, "generation_kwargs": suppressed}


@cache
def pictures(rows: int = 8) -> list[Pictures.Image]:
    """Pictures of noise, no two alike, in three sizes."""
    noise = np.random.default_rng(0)
    return [
        Pictures.fromarray(noise.integers(0, 256, (8 + 8 * (i % 2), 8 + 8 * (i % 3), 3), dtype=np.uint8))
        for i in range(rows)
    ]


def prompts(rows: int = 8) -> Dataset:
    """A picture to each prompt."""
    return Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": f"{i}?"}] for i in range(rows)], "image": pictures(rows)}
    )


def prompts_with_several(rows: int = 8) -> Dataset:
    """One picture or two to a prompt. (TRL 1.16 cannot mix in prompts without any.)"""
    data = {
        "prompt": [[{"role": "user", "content": f"{i}?"}] for i in range(rows)],
        "images": [pictures(rows)[i : i + 1 + i % 2] for i in range(rows)],
    }
    message = {"role": Value("string"), "content": Value("string")}
    return Dataset.from_dict(data, features=Features({"prompt": List(message), "images": List(Image())}))
