# %% [markdown]
# # A first run, and the files that it leaves
#
# Run this file as it is, `python examples/first_run.py`, or cell by cell in an editor that knows `# %%`.

# %%
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import zarr

# A notebook's kernel has arguments of its own.
given = sys.argv[1:] if sys.argv[0].endswith("first_run.py") else []
UPDATES, RUNS = (int(given[0]), Path(given[1])) if given else (12, Path("runs"))

# %% [markdown]
# A run is one command. Every field of the configuration can be overridden after it. The model of 84,000 parameters
# learns to add; a few updates are enough to look around.

# %%
command = [sys.executable, "-m", "streamppo", "run", "configs/math.toml", "--runs", str(RUNS)]
subprocess.run([*command, "name=first_run", f"updates={UPDATES}", "queue.batch_size=64"], check=True)
run = RUNS / "first_run"

# %% [markdown]
# `metrics.jsonl` has one line for each update, beside those of evaluations.

# %%
lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
for line in [line for line in lines if "update" in line][-3:]:
    print({name: round(line[name], 4) for name in ("update", "reward", "lag_max", "entropy")})

# %% [markdown]
# The archive has the batch of every update, exactly as it was trained on: flat columns, in which trajectory i stands at
# `offsets[i] : offsets[i + 1]`.

# %%
file = min((run / "archive").glob("*.zarr.zip"))
batch = zarr.open_group(zarr.storage.ZipStore(file, mode="r"), mode="r")
rewards, offsets = np.asarray(batch["reward"]), np.asarray(batch["offsets"])
print(f"{file.name}: {len(rewards)} trajectories, mean reward {rewards.mean():.3f}")
print("tokens of the first:", np.asarray(batch["tokens"])[offsets[0] : offsets[1]].tolist())
