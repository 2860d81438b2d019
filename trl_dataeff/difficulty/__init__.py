"""
Predicted success rates of prompts, in the order of the data:

    embedding/          prompts to vectors, cached on disk
    base, registry      the contract of predictors, and how to add one
    logistic, attention the built-in predictors
    online              a predictor that follows a run
    offline             a predictor fitted to finished runs
    loading             predictors by name or from disk
    quality             how well predictions match observations
"""
