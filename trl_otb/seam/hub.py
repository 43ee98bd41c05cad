"""Pages of rollouts hold prompts and answers: they are not uploaded with the model."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from huggingface_hub import HfApi
from transformers import Trainer
from transformers import trainer as transformers_trainer


PAGES = ("rollouts*.html", "rollouts*.part")  # with those that were set aside, or left by a crash


class LeavesPagesOut(Trainer):
    """A [`~transformers.Trainer`] whose pushes to the hub leave out `rollouts.html`, which one uploads oneself."""

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        with _without_pages():
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with _without_pages():
            super()._push_from_checkpoint(*args, **kwargs)


@contextmanager
def _without_pages() -> Iterator[None]:
    upload = HfApi.upload_folder

    def uploads(api: HfApi, *args: Any, ignore_patterns: list[str] | str | None = None, **kwargs: Any) -> Any:
        patterns = [ignore_patterns] if isinstance(ignore_patterns, str) else [*(ignore_patterns or ())]
        return upload(api, *args, ignore_patterns=[*patterns, *PAGES], **kwargs)

    def uploads_alone(*args: Any, **kwargs: Any) -> Any:
        return uploads(HfApi(), *args, **kwargs)

    # Older transformers have the function itself
    known = "upload_folder" if hasattr(transformers_trainer, "upload_folder") else None
    with patch.object(HfApi, "upload_folder", uploads):
        with patch.object(transformers_trainer, known, uploads_alone) if known else nullcontext():
            yield
