"""The lab: a bench on which a GRPO method shows in minutes whether it saves rollouts.

In the order in which data flows: `tasks`, `model`, `pretrain` (the trained start), `evaluate` (exact accuracy), `pools`,
`rewards`, `counting` (rollouts), `methods`, `train` (one run), `runs` (many), `store` (files), `curves`, `ratios`,
`report`, and `cli`. What is deliberately not here: a GPU, a download, a held-out set that needs sampling.
"""
