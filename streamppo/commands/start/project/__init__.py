"""Templates of a new project, and the writer of a configuration for a user's model, data and reward.

run.toml, rewards.py, README.md     the project that sorts letters, as it is written
rows.py, policy.py                  properties of rows, their reward and a model
sizes.py                            the numeric settings of a run, chosen from these properties
text.py                             the configuration as TOML, with a comment on each line
"""
