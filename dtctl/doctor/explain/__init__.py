"""Diagnosis of a failed job from the output of its workers. It needs no cluster and guesses nothing."""
