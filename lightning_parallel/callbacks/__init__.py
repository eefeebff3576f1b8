"""Callbacks that work under every strategy."""

from lightning_parallel.callbacks.averaging import ExponentialMovingAverage
from lightning_parallel.callbacks.batch_size import BatchSizeFinder
from lightning_parallel.callbacks.device_prefetch import DevicePrefetch
from lightning_parallel.callbacks.doctor import Doctor
from lightning_parallel.callbacks.global_batch import GlobalBatch
from lightning_parallel.callbacks.gpu_monitor import GpuMonitor
from lightning_parallel.callbacks.gradient_norm import GradientNorm
from lightning_parallel.callbacks.learning_rate import ScaledLearningRate
from lightning_parallel.callbacks.non_finite import NonFinite
from lightning_parallel.callbacks.pretrained_weights import PretrainedWeights
from lightning_parallel.callbacks.rank_logs import RankLogs
from lightning_parallel.callbacks.step_breakdown import StepBreakdown
from lightning_parallel.callbacks.throughput import Throughput
from lightning_parallel.callbacks.token_weighted import TokenWeighted
from lightning_parallel.callbacks.verify import Verify

__all__ = [
    "BatchSizeFinder",
    "DevicePrefetch",
    "Doctor",
    "ExponentialMovingAverage",
    "GlobalBatch",
    "GpuMonitor",
    "GradientNorm",
    "NonFinite",
    "PretrainedWeights",
    "RankLogs",
    "ScaledLearningRate",
    "StepBreakdown",
    "Throughput",
    "TokenWeighted",
    "Verify",
]
