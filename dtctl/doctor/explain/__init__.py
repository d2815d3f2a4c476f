"""Why a job failed, from what its workers have printed. No cluster is needed; nothing is guessed."""
