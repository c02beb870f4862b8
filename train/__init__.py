"""Training: batches, losses, the trainer, its callbacks, and saved state."""

from .batch import LMBatch
from .callbacks import (
    Action,
    Callback,
    CallbackContext,
    EarlyStopping,
    LRSchedule,
    Monitor,
    Progress,
    SnapshotCallback,
)
from .checkpointing import CheckpointConfig
from .config import TransformerTrainConfig
from .curriculum import AdaptiveCurriculum, Curriculum, LinearCurriculum, TieredCurriculum
from .evaluate import evaluate_batches
from .loop import TrainResult, fit
from .losses import (
    BCEWithLogitsLoss,
    CausalLMLoss,
    CrossEntropyLoss,
    HuberLoss,
    L1Loss,
    MSELoss,
    SampleWeightedLoss,
    WeightedLoss,
)
from .metrics import MetricsTracker, perplexity, tokens_per_second
from .pretrain import PretrainConfig, PretrainLoop, PretrainResult, RunStatus
from .snapshot import list_snapshots, load_snapshot, read_snapshot, save_snapshot
from .trainer import StepRecord, TransformerTrainer
from .verify import verify
