"""Training: `wandistill.train.run.train` is the way through it."""
