"""Rungs of a ladder of widths: one configuration at another width, everything else in proportion."""

from __future__ import annotations

from collections.abc import Sequence

from entasis.errors import ConfigError, EntasisError
from entasis.run.config import RunConfig
from entasis.shape.families import family_settings

_IN_UNITS = ("mlp_hidden", "expert_hidden")
"""Settings of families that count units; they grow with the width."""


def rung(config: RunConfig, width: int, base_width: int | None = None) -> RunConfig:
    """The configuration with `shape.width` replaced, without its sections about studies.

    The other settings of the shape stay: `heads` heads at every width, so that head dims grow (as on the published
    ><former ladder), or, with `head_dim`, heads of that size, so that their number grows. Hidden units that are given
    as a number are scaled with the width.

    Args:
        config: a run.
        width: the shape's width.
        base_width: the width for which `model.logit_divisor` and `optimizer.block_rate` are meant: at another one the
            divisor is width / base_width times as large and the blocks' rate as many times smaller, which is muP. None:
            both are the same at every width, as in the published ><former recipe.

    Raises:
        ConfigError: the family has no width, or there is no such shape at this width; the line names the width.
    """
    family = config.shape.get("family")
    if isinstance(family, str) and "width" not in family_settings(family):
        raise ConfigError(
            f"shape: family {family} has no setting `width`, so it makes no ladder; choose another family"
        )
    before = config.shape.get("width")
    if not isinstance(before, int) or isinstance(before, bool) or before < 1:
        raise ConfigError(f"shape.width: expected a whole number above 0, got {before!r}")
    shape = {**config.shape, "width": width}
    for name in _IN_UNITS:
        if isinstance(shape.get(name), int):
            shape[name] = max(1, round(shape[name] * width / before))
    times = 1.0 if base_width is None else width / base_width
    made = config.model_copy(
        update={
            "shape": shape,
            "model": config.model.model_copy(update={"logit_divisor": config.model.logit_divisor * times}),
            "optimizer": config.optimizer.model_copy(update={"block_rate": config.optimizer.block_rate / times}),
            "compare": None,
            "transfer": None,
        }
    )
    try:
        made.design(vocab_size=256)  # no rule about shapes depends on the vocabulary
    except EntasisError as error:
        raise ConfigError(f"width {width}: {error}") from None
    return made


def require_ladder(name: str, widths: Sequence[int]) -> None:
    """Raises a ConfigError unless there are two widths or more, rising."""
    if len(widths) < 2 or any(width < 1 for width in widths) or list(widths) != sorted(set(widths)):
        raise ConfigError(f"{name}: expected two widths or more, rising, got {', '.join(map(str, widths)) or 'none'}")
