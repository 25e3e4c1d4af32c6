"""Device profiles, memory plans, predictions, and the accounting of every byte that a step moves."""
