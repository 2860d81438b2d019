"""What a rollout is: groups of completions as data, how rewards classify them, and how processes exchange them."""
