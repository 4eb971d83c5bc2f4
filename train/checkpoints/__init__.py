"""Checkpoints that are whole or absent, written beside the training, agreed on by all hosts.

files: the two files of a checkpoint, verified when read.   durable: how a file becomes whole or stays absent.
writer: copies the state and writes it in the background.   snapshot: that copy.   prune: which checkpoints stay.
agree: where a run goes on, the same on every host.         transfer: the bytes for hosts that lack them.
foreign: weights to start from, also other people's files.
"""

from train.checkpoints.agree import Found, newest_common, resolve
from train.checkpoints.files import CheckpointError, State, load, load_path, saved_steps
from train.checkpoints.foreign import fit, load_weights
from train.checkpoints.writer import Writer

__all__ = [
    "CheckpointError",
    "Found",
    "State",
    "Writer",
    "fit",
    "load",
    "load_path",
    "load_weights",
    "newest_common",
    "resolve",
    "saved_steps",
]
