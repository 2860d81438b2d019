"""
What lets a run be killed, damaged and interrupted.

    manifest.py      says of a checkpoint that it is whole, and proves it
    resume.py        which checkpoint a run goes on from; which older ones are deleted
    signals.py       SIGTERM and Ctrl-C end a run after the current step
    rewards.py       reward functions that return garbage or hang
    server.py        a vLLM server that goes away and comes back
    trainer.py       the wiring: `ReliableGRPOTrainer`, on which `DataEfficientGRPOTrainer` is built
"""
