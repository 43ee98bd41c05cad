"""Other programs that put a trainer of their own in the place of TRL's, where a baseline could not be honoured."""

from typing import Any

from .unsloth import check_unsloth


def check_hosts(trainer: type) -> None:
    """An `ImportError` where Unsloth cannot be served; a `TypeError` for Axolotl's asynchronous trainers."""
    check_unsloth()
    # By name, as they are in Axolotl's own files
    asynchronous = next((of for of in trainer.__mro__ if _is_axolotls(of) and "_prepare_inputs" in vars(of)), None)
    if asynchronous is not None:
        raise TypeError(
            f"`{asynchronous.__name__}._prepare_inputs` of Axolotl makes rollouts and advantages by itself, which a "
            f"baseline would not reach. In `{trainer.__name__}`, use `AxolotlGRPOTrainer`, as "
            "`trl_otb.axolotl.trainer.OTBTrainer` does, without `async_prefetch` and `use_data_producer`."
        )


def _is_axolotls(of: Any) -> bool:
    return of.__module__.partition(".")[0] == "axolotl"
