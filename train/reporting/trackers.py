"""The loggers that send a run's figures to a service: MLflow and Weights & Biases (see loggers.py).

Their packages are the user's own, and are imported in `begin`. Where the service is and who logs in there is said by
the variables of these packages (MLFLOW_TRACKING_URI, WANDB_API_KEY, ...): in the environment, or as secrets of a run
that have their names. A run that is started again goes on under the same name there.
"""

import importlib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from keeper import PRIVATE_DIR

SECRETS = Path(PRIVATE_DIR) / "secrets"  # in the container of a run
NAME_TAG = "muster.run"  # by which a run is found again in MLflow


def take_secrets(prefix: str) -> None:
    """Puts the secrets whose names begin with `prefix` into this process's environment, where they are not yet."""
    with suppress(OSError):  # there are none
        for file in sorted(SECRETS.glob(f"{prefix}*")):
            os.environ.setdefault(file.name, file.read_text(encoding="utf-8").strip())


def figures(result: Mapping[str, Any] | None) -> dict[str, float]:
    """What of result.json is a number."""
    numbers = {name: value for name, value in (result or {}).items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in numbers.items() if not isinstance(value, bool)}


class Mlflow:
    """All calls come from one thread, as MLflow's active run is one of a thread."""

    def begin(self, settings: Mapping[str, Any], name: str) -> None:
        take_secrets("MLFLOW_")
        self.mlflow = mlflow = importlib.import_module("mlflow")
        found = mlflow.search_runs(
            filter_string=f"tags.`{NAME_TAG}` = '{name}'", max_results=1, output_format="list"
        )  # fmt: skip
        if found:
            mlflow.start_run(run_id=found[0].info.run_id)
        else:
            mlflow.start_run(run_name=name, tags={NAME_TAG: name})
            mlflow.log_params(dict(settings))

    def log(self, values: Mapping[str, float], step: int, when: float) -> None:
        self.mlflow.log_metrics(dict(values), step=step)

    def end(self, result: Mapping[str, Any] | None) -> None:
        if known := figures(result):
            self.mlflow.log_metrics(known)
        self.mlflow.end_run("FINISHED" if result is not None else "KILLED")


class Wandb:
    """In the project of WANDB_PROJECT (default: muster); what it keeps on the disk is in the run's folder."""

    def begin(self, settings: Mapping[str, Any], name: str) -> None:
        take_secrets("WANDB_")
        project, folder = os.environ.get("WANDB_PROJECT", "muster"), os.environ.get("WANDB_DIR", settings["run_dir"])
        own = re.sub(r"[/\\#?%:]", "-", name)  # which W&B refuses in an id
        wandb = importlib.import_module("wandb")
        self.run = wandb.init(project=project, id=own, name=name, resume="allow", config=dict(settings), dir=folder)

    def log(self, values: Mapping[str, float], step: int, when: float) -> None:
        self.run.log(dict(values), step=step)

    def end(self, result: Mapping[str, Any] | None) -> None:
        self.run.summary.update(figures(result))
        self.run.finish(exit_code=0 if result is not None else 1)
