"""
Predicted success rates of prompts, in the order of the data:

    embedding             prompts to vectors, kept in the output folder
    base                  what predictors have in common
    logistic, attention   the two predictors; training.py fits the second, published.py reads the authors' checkpoints
    loading               predictors by name, to a folder and back
    online                a predictor that follows a run
"""
