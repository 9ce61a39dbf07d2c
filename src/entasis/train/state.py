"""The state of training: all that changes from step to step, and how it becomes a checkpoint and back."""

from __future__ import annotations

from dataclasses import dataclass, field

from entasis.errors import EntasisError
from entasis.model.transformer import Transformer
from entasis.run.checkpoint import Checkpoint
from entasis.run.load import restore_model
from entasis.train.optimizer import Optimizer


@dataclass(slots=True)
class TrainState:
    """Everything that the next step depends on beside the configuration and the data.

    There is no random state: initialisation, data order and all else that is random are functions of the seed and
    the step.
    """

    model: Transformer
    optimizer: Optimizer
    data_fingerprint: str
    step: int = 0
    """Optimizer steps taken."""
    tokens: int = 0
    """Tokens read by them."""
    skipped: list[int] = field(default_factory=list)
    """Steps (counted from 1) that were left out, since their loss or gradient was not finite."""

    def to_checkpoint(self) -> Checkpoint:
        """The state as it stands, or what this rank holds of it."""
        return Checkpoint(
            step=self.step,
            model=dict(self.model.state_dict()),
            optimizer=self.optimizer.state() if self.step else {},
            state={
                "tokens": self.tokens,
                "shape": self.model.shape.to_dict(),
                "block": self.model.config.to_dict(),
                "data_fingerprint": self.data_fingerprint,
                "skipped": list(self.skipped),
            },
        )

    def restore(self, checkpoint: Checkpoint, *, other_data: bool = False) -> None:
        """Takes over a checkpoint's state; with `other_data` also one that was trained on other data.

        Raises:
            EntasisError: the checkpoint is of another shape, block or data, even where all tensors would fit.
        """
        if not other_data:
            _require_same_data(checkpoint.state["data_fingerprint"], self.data_fingerprint, checkpoint.step)
        restore_model(self.model, checkpoint)
        self.optimizer.load_state(checkpoint.optimizer)
        self.step = checkpoint.step
        self.tokens = checkpoint.state["tokens"]
        skipped = checkpoint.state.get("skipped", [])
        if not isinstance(skipped, list) or any(type(step) is not int for step in skipped):
            raise EntasisError(f"the checkpoint of step {checkpoint.step}: skipped is not a list of steps")
        self.skipped = list(skipped)


def _require_same_data(saved: str, given: str, step: int) -> None:
    if saved != given:
        raise EntasisError(
            f"the checkpoint of step {step} was trained on other data (fingerprint {saved}, now {given}); restore the "
            "data, choose another `out`, or go on with the new data by --accept-data-change"
        )
