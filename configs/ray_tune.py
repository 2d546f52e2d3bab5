"""A sweep of ``lr`` with Ray Tune: each trial is a ``morph run`` (docs/guides/training.md, "Sweeps").

Put this file beside ``mine.py``, whose function ``job(lr)`` returns the job, ``profile.json`` and ``cluster.yaml``.
"""

import json
import subprocess
from pathlib import Path

from ray import tune

HERE = Path(__file__).resolve().parent


def trial(config):
    """Train for 200 steps, and report the last training loss."""
    folder = str(HERE / "runs" / tune.get_context().get_trial_name())
    job = "{}:job({})".format(HERE / "mine.py", ", ".join(f"{name}={value!r}" for name, value in config.items()))
    files = ["--profile", str(HERE / "profile.json"), "--cluster", str(HERE / "cluster.yaml")]
    subprocess.run(["morph", "run", job, *files, "--steps", "200", "--run-dir", folder, "--no-page"], check=True)
    status = subprocess.run(["morph", "status", folder, "--json"], check=True, capture_output=True)
    tune.report({"loss": json.loads(status.stdout)["steps"][-1]["loss"]})


tuner = tune.Tuner(
    tune.with_resources(trial, {"cpu": 2}),  # what a run's workers take
    param_space={"lr": tune.grid_search([1e-4, 1e-3])},
    tune_config=tune.TuneConfig(metric="loss", mode="min"),
)
print(tuner.fit().get_best_result().config)
