"""
The synthetic benchmark: on one CPU core it shows in minutes whether a GRPO method saves rollouts.

In the order in which data flows: `tasks`, `model`, `pretrain` (the trained start), `evaluate` (exact accuracy),
`rewards`, `pools`, `counting` (rollouts), `methods`, `train` (one run), `store` (files), `runs` (many), `ratios`,
`studies`, and `cli`. What is deliberately not here: a GPU, a download, a held-out set that needs sampling.
"""
