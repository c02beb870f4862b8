"""Optimizers, gradient clipping and learning-rate schedules."""

from .adamw import Adam, AdamW
from .clip import clip_grad_norm, grad_norm
from .groups import param_groups
from .optimizer import Optimizer, weights_sha256
from .schedules import (
    CosineAnnealing,
    LinearWarmup,
    StepDecay,
    WarmupCosineDecay,
    WarmupLinearDecay,
)
from .sgd import SGD
