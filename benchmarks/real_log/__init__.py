"""
What selection finds in the log of a real GRPO run: `python -m benchmarks.real_log`.

    log.npz, README.md   the log, its origin and licence
    replaying.py         lets a selector draw from it
    methods.py           what is compared
    __main__.py          the tables
"""
