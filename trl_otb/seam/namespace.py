"""What a trainer of this package keeps: all of it in one object under one name, so that a subclass's names are free."""

from dataclasses import dataclass, field
from typing import Any

from transformers import Trainer

from ..display.page import RolloutPages
from ..progress import Progress
from ..rollout import Rollout, Rollouts
from ..run.baseline import RunBaseline
from ..run.gain import Gain
from .contract import GRPOTrainer
from .forwards import PolicyRecorder
from .subclasses import users_methods


NAMESPACE = "_trl_otb"  # the attribute of a trainer


@dataclass
class Namespace:
    """The state of a trainer, as `trainer._trl_otb`."""

    baseline: RunBaseline
    needs: frozenset[str]  # what rollouts are to hold; more during a comparison
    option: str | None  # `baseline` of the config, as it was when the trainer was made
    rollouts: dict[str, Rollout] = field(default_factory=Rollouts)  # the latest one of each mode, "train" and "eval"
    pages: RolloutPages | None = None  # that steps are recorded in
    energy_source: str | None = None  # of the latest rollout that needed energies
    b0: str = "rloo_pooled"  # the baseline that `value` starts from
    gain: Gain = field(default_factory=Gain)  # of the latest batches of the training
    known_loss: Any = None  # the function that is known to weight each token by its own advantage
    known_forward: bool = False  # whether TRL's sources were read, or its log-probs and energies are a softmax's
    by_sign: bool = False  # whether that is so by its gradients for one advantage per completion
    users_loss_was_tried: bool = False
    weights_fit: bool = False  # of a user's override: they went through a batch where they could have failed
    extra_state: dict[str, Any] = field(default_factory=dict)  # what else checkpoints of a learning baseline hold
    progress: Progress | None = None  # the run's progress functions
    recorder: PolicyRecorder = field(init=False)  # made last, when the policy is complete


class Public:
    """A read-only attribute of a trainer, from its [`Namespace`]; a `TypeError` if a subclass uses the name itself."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, trainer: Trainer | None, owner: type | None = None) -> Any:
        return self if trainer is None else getattr(getattr(trainer, NAMESPACE), self.name)

    def __set__(self, trainer: Trainer, value: Any) -> None:
        raise TypeError(_taken(f"`{type(trainer).__name__}` sets `self.{self.name}`", self.name))


def check_names(trainer: Trainer, of_trl: type = GRPOTrainer) -> None:
    """Raise a `TypeError` if a user's class has an attribute or method by one of the [`Public`] names."""
    ours = {name for cls in type(trainer).__mro__ for name, of in vars(cls).items() if isinstance(of, Public)}
    for owner, name in users_methods(trainer, sorted(ours), of_trl):
        raise TypeError(_taken(f"`{owner}` has a `{name}` of its own", name))


def _taken(what: str, name: str) -> str:
    remedy = " To name a baseline in a class, set `default_baseline`." if name == "baseline" else ""
    return f"{what}, which is an attribute of trl_otb's trainers: choose another name.{remedy}"
