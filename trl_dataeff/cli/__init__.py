"""The command `trl-dataeff`: `main.py` hands each sub-command to its own module, and prints a `UserError` as a sentence.

`grpo.py` reads a recipe (`recipes.py`) and the command line with TRL's parser, loads rewards (`rewards.py`) and data (`data.py`),
and trains here or through `accelerate launch` (`launch.py`); `console.py` shows the progress. `trl_dataeff.cli.grpo` has `parse`
and `train` for use from Python.
"""
