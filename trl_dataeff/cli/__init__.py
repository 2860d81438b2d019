"""
The command `trl-dataeff`. `main.py` runs each sub-command, and prints a `UserError` as a sentence.

`grpo.py` reads a recipe (`recipe_file.py`) and the command line (`parser.py`, with what `trl_fields.py` knows of TRL's
fields), checks them (`checks.py`), loads data and rewards (`data.py`), and trains here or through `accelerate launch`.
`help.py` prints the fields, and `console.py` shows the progress. For use from Python, `trl_dataeff.cli.grpo` has `parse`
and `train`.
"""
