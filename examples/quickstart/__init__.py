"""A real run on a laptop: `python -m examples.quickstart`, which is what `make quickstart` calls.

In order: `weights.py` turns a GGUF file into a Hugging Face folder, `tasks.py` makes questions, the command
`trl-dataeff grpo` trains, `evaluate.py` measures before and after, `summary.py` prints a summary.

What is deliberately not here: a way of training of its own. It runs the command, with a recipe that anyone can copy.
"""
