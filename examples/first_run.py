# %% [markdown]
# # A first run, and its files
#
# Run the whole file, `python examples/first_run.py`, or cell by cell in an editor with support for `# %%`.

# %%
import sys
from pathlib import Path

import numpy as np
import zarr

import streamppo
from streamppo.types import ScoredText

# In a notebook, sys.argv holds the kernel's arguments.
given = sys.argv[1:] if sys.argv[0].endswith("first_run.py") else []
UPDATES, RUNS = (int(given[0]), Path(given[1])) if given else (12, Path("runs"))

# %% [markdown]
# The reward is a function: 1 for the exact answer. streamppo writes it, with all that it uses, to the run's folder.


# %%
def exact(trajectory: ScoredText, answer: str) -> float:
    return float(trajectory.finish == "stop" and trajectory.completion == answer)


# %% [markdown]
# One call starts a run, and can override every field of the configuration. The model of 84,000 parameters learns to
# add; a few updates are enough to see the files.

# %%
overrides = ["name=first_run", f"updates={UPDATES}", "queue.batch_size=64"]
run = streamppo.run("configs/math.toml", overrides, reward=exact, runs=RUNS)

# %% [markdown]
# `run.metrics` has a dictionary for each update; `run.dataframe()` has the same as a pandas DataFrame.

# %%
for row in run.metrics[-3:]:
    print({name: round(row[name], 4) for name in ("update", "reward", "lag_max", "entropy")})

# %% [markdown]
# The archive has the batch of every update, exactly as it was trained on. Its files can be read without streamppo: they
# have flat columns, in which trajectory i is `offsets[i] : offsets[i + 1]`.

# %%
file = min((run.folder / "archive").glob("*.zarr.zip"))
batch = zarr.open_group(zarr.storage.ZipStore(file, mode="r"), mode="r")
rewards, offsets = np.asarray(batch["reward"]), np.asarray(batch["offsets"])
print(f"{file.name}: {len(rewards)} trajectories, mean reward {rewards.mean():.3f}")
print("tokens of the first:", np.asarray(batch["tokens"])[offsets[0] : offsets[1]].tolist())
