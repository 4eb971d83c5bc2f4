"""Checkpoints that are whole or absent, written while the training goes on, and agreed on by all hosts.

May import: settings, whole_files, start. Writes and reads checkpoints/step-<n>.pt and its manifest step-<n>.json.

files: the two files of a checkpoint, verified when read.   prune: which checkpoints are kept.
writer: copies the state and writes it in the background.   snapshot: that copy.
own: what each member alone knows, read again, or what is left of it where the members are others.
agree: where a run continues, the same on every host.       transfer: sends a checkpoint to hosts that lack it.
foreign: weights to start from, also files of other programs.
"""

from train.checkpoints.agree import StartPoint, newest_common, resolve
from train.checkpoints.files import CheckpointError, Member, State, load, load_path, manifest, saved_steps
from train.checkpoints.foreign import fit, head_of, load_weights
from train.checkpoints.writer import Own, Writer

__all__ = [
    "CheckpointError",
    "Member",
    "Own",
    "StartPoint",
    "State",
    "Writer",
    "fit",
    "head_of",
    "load",
    "load_path",
    "load_weights",
    "manifest",
    "newest_common",
    "resolve",
    "saved_steps",
]
