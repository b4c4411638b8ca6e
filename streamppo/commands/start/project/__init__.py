"""Files of a new project, and the configuration for what people bring.

run.toml, rewards.py, README.md     the project that sorts letters, as it is written
rows.py, policy.py                  what rows, their reward and a model say of themselves
sizes.py                            the numbers of a run, chosen from these
text.py                             the configuration as TOML, with a comment on each line
"""
