"""The command `trl-dataeff`: `main.py` hands each sub-command to its own module, and prints what is a `UserError`.

`grpo.py` reads recipe and options (`recipe.py`, `field_parser.py`, `parser.py`), checks them (`checks.py`), loads data and
rewards (`sources.py`, `data.py`, `rewards.py`), and trains; `launch.py` decides whether that happens here or through
`accelerate launch`; `recipes.py` lists and validates recipes. `trl_dataeff.cli.grpo` has `parse` and `train` for use from
Python. `help.py`, `recipe.py` and `arguments.py` import neither torch nor `GRPOConfig`.
"""
