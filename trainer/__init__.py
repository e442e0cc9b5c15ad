"""Relay's Trainer and command line."""

from trainer.trainer import Trainer

__all__ = ["Trainer"]
