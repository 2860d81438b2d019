"""
The command `trl-dataeff`. `main.py` runs each sub-command, and prints a `UserError` as a sentence.

`grpo.py` reads the command line and a recipe, checks them (`checks.py`), loads data and rewards (`data.py`), and
trains here or through `accelerate launch`. `console.py` shows the progress. For use from Python,
`trl_dataeff.cli.grpo` has `parse` and `train`.

`parser.py` reads the command line, with the options of `options.py` and the help of `help.py`. `recipe_file.py` reads
a YAML file, `recipe_values.py` gives its values to the parser, and `arguments.py` constructs the configurations,
which say what they refuse.
"""
