"""
Success rates of prompts, predicted from their embeddings.

    predictor.py     DifficultyPredictor, the contract
    logistic.py      logistic regression on principal components of the embeddings, fitted in milliseconds
    attention.py     attention over reference groups, the predictor of arXiv 2506.05316
    online.py        RollingDifficulty: a predictor that follows the groups of a run
    embedding.py     embeddings of the prompts, by the policy or by another model
    loading.py       predictors by name or path; saving and loading them
    published.py     checkpoints of the authors of arXiv 2506.05316
"""

from trl_dataeff.difficulty.loading import PREDICTORS, load_predictor, make_predictor, save_predictor


__all__ = ["PREDICTORS", "load_predictor", "make_predictor", "save_predictor"]
