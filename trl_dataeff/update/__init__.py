"""
What becomes of a generation batch in the loss: its advantages, its rows, and the correction for earlier rollouts.
"""
