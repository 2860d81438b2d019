"""The recipe of a start that is trained in seconds."""

from benchmarks.lab.pretrain import StartRecipe


TINY = StartRecipe(hidden=32, layers=2, steps=150, batch_size=64, learning_rate=1e-2)
