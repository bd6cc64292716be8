"""Training: the loop, its configuration and everything it keeps."""

from swin_lessons.training.checkpoint import (
    CheckpointError,
    consolidate,
    list_checkpoints,
    read_tensors,
    write_tensors,
)
from swin_lessons.training.config import TrainConfig
from swin_lessons.training.ema import EMA
from swin_lessons.training.evaluation import evaluate
from swin_lessons.training.history import History
from swin_lessons.training.init import init_xavier
from swin_lessons.training.loop import TrainingDiverged, train, train_step
from swin_lessons.training.metrics import EvalResult, confusion_matrix, topk_hits
from swin_lessons.training.optim import build_optimizer, param_groups, set_lr
from swin_lessons.training.precision import autocast, best_precision, float32_products, grad_scaler
from swin_lessons.training.processes import Processes, process_group
from swin_lessons.training.recipes import recipe
from swin_lessons.training.scaling import Cluster, StepTime, Work, ddp_step, fsdp_step
from swin_lessons.training.schedule import lr_at, warmup_steps
from swin_lessons.training.seeds import derive_seed, isolated_rng, seed_everything

__all__ = [
    "EMA",
    "CheckpointError",
    "Cluster",
    "EvalResult",
    "History",
    "Processes",
    "StepTime",
    "TrainConfig",
    "TrainingDiverged",
    "Work",
    "autocast",
    "best_precision",
    "build_optimizer",
    "confusion_matrix",
    "consolidate",
    "ddp_step",
    "derive_seed",
    "evaluate",
    "float32_products",
    "fsdp_step",
    "grad_scaler",
    "init_xavier",
    "isolated_rng",
    "list_checkpoints",
    "lr_at",
    "param_groups",
    "process_group",
    "read_tensors",
    "recipe",
    "seed_everything",
    "set_lr",
    "topk_hits",
    "train",
    "train_step",
    "warmup_steps",
    "write_tensors",
]
