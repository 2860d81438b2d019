"""The command `trl-dataeff`: `main.py` hands each sub-command to its own module.

`grpo.py` reads recipe and options (`parser.py`, `recipe.py`), loads data and rewards (`data.py`, `rewards.py`), and
trains; `launch.py` decides whether that happens here or through `accelerate launch`; `recipes.py` lists and checks
recipes. `trl_dataeff.cli.grpo` has `parse` and `train` for use from Python.
"""
