"""Learning-rate schedules: pure functions of the step, so a resumed run needs only its step number."""

import math

import torch
from torch.optim.lr_scheduler import LambdaLR

from .config import OptimConfig, Schedule


def learning_rate_ratio(config: OptimConfig, step: int, steps: int) -> float:
    """Learning rate of the step numbered ``step`` (from 0) of ``steps``, as a share of ``config.lr``."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule is Schedule.constant:
        return 1.0
    after_warmup = max(1, steps - config.warmup_steps - 1)
    progress = min(1.0, (step - config.warmup_steps) / after_warmup)
    if config.schedule is Schedule.cosine:
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
    decayed = max(0.0, progress - (1 - config.decay_share)) / config.decay_share if config.decay_share else 0.0
    return 1 - (1 - config.min_lr_ratio) * decayed


def build_schedule(config: OptimConfig, optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """Construct PyTorch's scheduler over :func:`learning_rate_ratio`."""
    return LambdaLR(optimizer, lambda step: learning_rate_ratio(config, step, steps))


def set_schedule(schedule: LambdaLR, step: int) -> None:
    """Set a schedule, and the learning rates, to the state after ``step`` steps."""
    rates = [base * ratio(step) for base, ratio in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule.load_state_dict(schedule.state_dict() | {"last_epoch": step, "_step_count": step + 1, "_last_lr": rates})
