"""Callbacks: the noise of the gradient, and a notice where a checkpoint will not resume exactly."""

from .gradient_noise import GradientNoiseCallback
from .inexact_resume import InexactResumeNotice


__all__ = ["GradientNoiseCallback", "InexactResumeNotice"]
