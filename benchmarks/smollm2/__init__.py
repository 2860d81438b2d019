"""
A pretrained model: SmolLM2-135M-Instruct with LoRA, on short questions of many kinds.

    python -m benchmarks.smollm2 study            # all runs of the tables that are not finished yet; stop it and go on at will
    python -m benchmarks.smollm2 tables           # the tables of the runs that are finished
    python -m benchmarks.smollm2 pools            # initial success rates of the three pools
    python -m benchmarks.smollm2 tune             # the learning rate, on uniform sampling with other seeds

A run is one file of `benchmarks/results/smollm2/runs/`, so that a study grows over days and machines. On a CPU a run takes
one core for some minutes. With a CUDA GPU, `--scale 4` takes four times as many groups a step.
"""
