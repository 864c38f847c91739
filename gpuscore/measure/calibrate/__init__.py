"""`gpuscore calibrate`: probabilities of typed questions that are right as often as they say."""
