"""Learning-rate schedules: pure functions of the step, total for every combination of lengths."""

from __future__ import annotations

import math

from entasis.run.config import RunConfig
from entasis.run.sections import ScheduleSection

_WSD_DECAY_SHARE = 0.2


def learning_rate(config: RunConfig, step: int) -> float:
    """The rate of update number `step` (from 0)."""
    if config.schedule.name == "power":
        return _power_rate(config, step)
    return config.optimizer.learning_rate * rate_share(config.schedule, step, config.train.steps)


def warm_up_note(config: RunConfig) -> str | None:
    """A line for a run that is no longer than its warm-up, as one that was shortened may be; None for a longer one."""
    warmup, steps = config.schedule.warmup_steps, config.train.steps
    if warmup < steps:
        return None
    return (
        f"schedule.warmup_steps {warmup} is no less than train.steps {steps}: the learning rate only rises, to "
        f"{learning_rate(config, steps - 1):.3g} (optimizer.learning_rate {config.optimizer.learning_rate:g})"
    )


def rate_share(schedule: ScheduleSection, step: int, steps: int) -> float:
    """Share of the peak rate for the update number `step` (from 0) of `steps`, of every schedule but `power`.

    Warm-up is linear and its last update has the full rate; a warm-up as long as the run or longer is cut off by the
    run's end. After it: `cosine` falls along half a wave, `wsd` stays and then falls on a line over `decay_steps`
    (as many as are left after the warm-up, if fewer), both to `final_ratio` at the last update; `constant` stays.
    """
    step, warmup = min(step, steps - 1), min(schedule.warmup_steps, steps)
    if step < warmup:
        return (step + 1) / schedule.warmup_steps
    after = steps - warmup  # at least 1 here
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "cosine":
        falling = after
    else:
        wanted = round(_WSD_DECAY_SHARE * steps) if schedule.decay_steps is None else schedule.decay_steps
        falling = min(wanted, after)
    done = step - (steps - falling) + 1  # updates of the fall, this one included
    if done <= 0:
        return 1.0
    progress = min(1.0, done / falling)
    shape = (1 + math.cos(math.pi * progress)) / 2 if schedule.name == "cosine" else 1 - progress
    return schedule.final_ratio + (1 - schedule.final_ratio) * shape


def _power_rate(config: RunConfig, step: int) -> float:
    """The power schedule of the published ><former recipe: min(cap, a (tokens seen)^exponent), a = scale x sequences.

    `learning_rate` is the cap, which does not bind at the published settings. The warm-up is linear from 0 to the
    curve's value at its end; the first update has the rate 0.
    """

    def curve(at: int) -> float:
        a = config.schedule.power_scale * config.batch_sequences
        tokens = at * config.train.batch_tokens
        return min(config.optimizer.learning_rate, a * math.pow(tokens, config.schedule.power_exponent))

    warmup = config.schedule.warmup_steps
    if step < warmup:
        return curve(warmup) * step / warmup
    return curve(max(step, 1))
