"""Rules that weigh cache against load in tokens, blocks or scores, without a model of time."""
