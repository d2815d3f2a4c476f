"""Diagnosis of a failed job from the output of its workers, without a cluster and without guesses."""
